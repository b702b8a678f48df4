// Asks a service over UDP, 64 datagrams with one system call, and prints the time per request.
//   ./burst udp://127.0.0.1:9000 [bursts]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <serval/client.h>

#define BURST 64
#define BYTES 32

static void must(int result, const char* what) {
    if (result == SERVAL_OK) return;
    // Some results have a detail.
    const char* detail = serval_detail();
    fprintf(stderr, "%s: %s%s%s\n", what, serval_strerror(result), *detail ? ": " : "", detail);
    exit(1);
}

int main(int count, char** arguments) {
    if (count < 2) return fprintf(stderr, "usage: %s ADDRESS [BURSTS]\n", arguments[0]), 2;
    const unsigned long bursts = count > 2 ? strtoul(arguments[2], NULL, 10) : 10000;

    serval_burst* client;
    must(serval_burst_open(arguments[1], NULL, &client), "open");

    unsigned long received = 0, lost = 0;
    const uint64_t start = serval_now_ns();
    for (unsigned long n = 0; n < bursts; n++) {
        // The datagrams are contiguous.
        char requests[BURST][BYTES] = {{0}};
        for (unsigned i = 0; i < BURST; i++) snprintf(requests[i], BYTES, "%lu.%u", n, i);
        must(serval_burst_send(client, requests, BYTES, BURST, NULL), "send");

        // Datagrams may be lost, so the wait has a deadline.
        const uint64_t deadline = serval_now_ns() + 1000000000u;
        for (size_t have = 0, more; have < BURST; have += more) {
            serval_datagram replies[BURST];
            const int result = serval_burst_recv(client, replies, BURST - have, deadline, &more);
            if (result == SERVAL_EMPTY) {
                lost += BURST - have;
                break;
            }
            must(result, "receive");
            received += more;
            for (size_t i = 0; i < more; i++)
                if (replies[i].len != BYTES)
                    return fprintf(stderr, "a reply of another length\n"), 1;
        }
    }
    const char* path =
        serval_burst_path(client) == SERVAL_BURST_SEGMENT ? "UDP_SEGMENT" : "sendmmsg";
    printf("%lu replies, %lu lost, %.0f ns each, sent with %s\n", received, lost,
           (double)(serval_now_ns() - start) / (double)(received + lost), path);
    serval_burst_close(client);
    return 0;
}
