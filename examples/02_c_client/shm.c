// Sends a million requests to a service on this machine through shared memory, and prints the time
// per request.
//   ./shm /tmp/echo.sock [requests]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <serval/client.h>

static void must(int result, const char* what) {
    if (result == SERVAL_OK) return;
    // Some results have a detail.
    const char* detail = serval_detail();
    fprintf(stderr, "%s: %s%s%s\n", what, serval_strerror(result), *detail ? ": " : "", detail);
    exit(1);
}

int main(int count, char** arguments) {
    if (count < 2) return fprintf(stderr, "usage: %s PATH [REQUESTS]\n", arguments[0]), 2;
    const unsigned long requests = count > 2 ? strtoul(arguments[2], NULL, 10) : 1000000;

    serval_shm* client;
    must(serval_shm_connect(arguments[1], NULL, &client), "connect");

    unsigned long sent = 0, received = 0, lost = 0;
    const uint64_t start = serval_now_ns();
    while (received < requests) {
        // As many as fit; the next wait publishes them to the engine.
        while (sent < requests) {
            char request[32] = {0};
            snprintf(request, sizeof request, "request %lu", sent);
            const int result = serval_shm_send(client, sent, request, sizeof request);
            if (result == SERVAL_FULL) break;
            must(result, "send");
            sent++;
        }
        must(serval_shm_wait(client, serval_now_ns() + 5000000000u), "wait");

        char buffer[32], expected[32] = {0};
        serval_reply reply;
        while (serval_shm_recv(client, buffer, sizeof buffer, &reply) == SERVAL_OK) {
            received++;
            // Every request has an outcome.
            if (reply.lost) {
                fprintf(stderr, "request %llu: %s\n", (unsigned long long)reply.tag,
                        serval_drop_reason(reply.reason));
                lost++;
                continue;
            }
            memset(expected, 0, sizeof expected);
            snprintf(expected, sizeof expected, "request %llu", (unsigned long long)reply.tag);
            if (reply.len != sizeof expected || memcmp(buffer, expected, sizeof expected) != 0)
                return fprintf(stderr, "a wrong reply to request %llu\n",
                               (unsigned long long)reply.tag),
                       1;
        }
    }
    printf("%lu replies, %lu lost, %.0f ns each\n", received - lost, lost,
           (double)(serval_now_ns() - start) / (double)received);
    serval_shm_close(client);
    return lost > 0;
}
