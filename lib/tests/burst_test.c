// Bursts to a UDP port of a service that echoes. The first argument says which test; see
// crates/cli/tests/c_client.rs.
#define _GNU_SOURCE
#include <unistd.h>

#include "check.h"

#define CAPACITY 256

static serval_burst* open_to(const char* address, uint32_t no_offload) {
    serval_burst_options options = {0};
    options.no_offload = no_offload;
    serval_burst* burst = NULL;
    CHECK_RESULT(serval_burst_open(address, &options, &burst), SERVAL_OK);
    CHECK(burst != NULL && serval_burst_fd(burst) >= 0);
    return burst;
}

// Sends all of them, however full the socket is at times.
static void send_all(serval_burst* burst, const uint8_t* at, size_t bytes_each, size_t count) {
    const uint64_t deadline = serval_now_ns() + PATIENCE_NS;
    while (count > 0) {
        size_t sent = 0;
        const int result = serval_burst_send(burst, at, bytes_each, count, &sent);
        CHECK(result == SERVAL_OK ? sent == count : result == SERVAL_FULL && sent < count);
        CHECK(serval_now_ns() < deadline);
        at += sent * bytes_each;
        count -= sent;
    }
}

// Receives the replies to `window` requests from number `first` on; asks again for those that got
// lost. Returns how often.
static unsigned receive_window(serval_burst* burst, const uint8_t* requests, size_t bytes_each,
                               size_t window, uint64_t first, uint8_t* seen) {
    const uint64_t deadline = serval_now_ns() + PATIENCE_NS;
    size_t received = 0, count;
    unsigned again = 0;
    serval_datagram datagrams[CAPACITY];
    memset(seen, 0, window);
    while (received < window) {
        CHECK(serval_now_ns() < deadline);
        const int result =
            serval_burst_recv(burst, datagrams, CAPACITY, serval_now_ns() + 500000000, &count);
        if (result == SERVAL_EMPTY) {
            // UDP may lose; what is missing is asked for once more.
            for (size_t i = 0; i < window; i++)
                if (!seen[i]) send_all(burst, requests + i * bytes_each, bytes_each, 1);
            again++;
            continue;
        }
        CHECK_RESULT(result, SERVAL_OK);
        CHECK(count >= 1 && count <= CAPACITY);
        for (size_t i = 0; i < count; i++) {
            CHECK(datagrams[i].len == bytes_each);
            const uint64_t number = number_of(datagrams[i].bytes);
            // A late answer to a request that was asked twice may be of an earlier window.
            CHECK(number < first + window);
            if (number < first || seen[number - first]) continue;
            CHECK(memcmp(datagrams[i].bytes, requests + (number - first) * bytes_each,
                         bytes_each) == 0);
            seen[number - first] = 1;
            received++;
        }
    }
    return again;
}

static void load(const char* address, uint64_t messages, size_t bytes_each, size_t window,
                 uint32_t no_offload) {
    CHECK(bytes_each >= 8 && window >= 1);
    serval_burst* burst = open_to(address, no_offload);
    uint8_t* requests = malloc(window * bytes_each);
    uint8_t* seen = malloc(window);
    CHECK(requests && seen);
    unsigned again = 0;
    for (uint64_t first = 0; first < messages; first += window) {
        for (size_t i = 0; i < window; i++)
            fill_message(requests + i * bytes_each, bytes_each, first + i);
        send_all(burst, requests, bytes_each, window);
        again += receive_window(burst, requests, bytes_each, window, first, seen);
    }
    const char* path = serval_burst_path(burst) == SERVAL_BURST_SEGMENT ? "segment" : "sendmmsg";
    CHECK(!no_offload || strcmp(path, "sendmmsg") == 0);
    printf("%llu right, %s, asked again %u times\n", (unsigned long long)messages, path, again);
    free(requests);
    free(seen);
    serval_burst_close(burst);
}

// Datagrams of one train arrive in any number of portions; lengths differ from burst to burst;
// longest and shortest work.
static void portions(const char* address) {
    serval_burst* burst = open_to(address, 0);
    static uint8_t requests[64 * 100];
    static uint8_t seen[64];
    for (size_t capacity = 1; capacity <= 7; capacity += 2) {
        for (size_t i = 0; i < 64; i++) fill_message(requests + i * 100, 100, i);
        send_all(burst, requests, 100, 64);
        memset(seen, 0, sizeof seen);
        for (size_t received = 0, count; received < 64; received += count) {
            serval_datagram datagrams[7];
            CHECK_RESULT(serval_burst_recv(burst, datagrams, capacity,
                                           serval_now_ns() + PATIENCE_NS, &count),
                         SERVAL_OK);
            CHECK(count >= 1 && count <= capacity);
            for (size_t i = 0; i < count; i++) {
                const uint64_t number = number_of(datagrams[i].bytes);
                CHECK(datagrams[i].len == 100 && number < 64 && !seen[number]);
                CHECK(memcmp(datagrams[i].bytes, requests + number * 100, 100) == 0);
                seen[number] = 1;
            }
        }
    }
    static uint8_t longest[3 * 4096];
    static const size_t lengths[] = {8, 9, 1023, 1472, 1473, 4096};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        for (size_t n = 0; n < 3; n++) fill_message(longest + n * lengths[i], lengths[i], n);
        send_all(burst, longest, lengths[i], 3);
        receive_window(burst, longest, lengths[i], 3, 0, seen);
    }
    serval_burst_close(burst);
    printf("portions right\n");
}

// The results of every call at its limits; no server listens at `unused`.
static void limits(const char* address, const char* unused) {
    serval_burst* burst = NULL;
    static const char* const bad[] = {
        "", "udp://", "udp://127.0.0.1", "udp://127.0.0.1:", ":9000", "[::1:9000", "udp://[]:9"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_RESULT(serval_burst_open(bad[i], NULL, &burst), SERVAL_ERROR_ARGUMENT);
    CHECK(burst == NULL && strstr(serval_detail(), "udp://HOST:PORT") != NULL);
    CHECK_RESULT(serval_burst_open(NULL, NULL, &burst), SERVAL_ERROR_ARGUMENT);
    CHECK_RESULT(serval_burst_open("127.0.0.1:http", NULL, &burst), SERVAL_ERROR_CONNECT);

    burst = open_to(address, 0);
    static uint8_t bytes[65508];
    serval_datagram datagram;
    size_t count = 99;
    CHECK_RESULT(serval_burst_send(burst, bytes, 0, 1, &count), SERVAL_ERROR_ARGUMENT);
    CHECK_RESULT(serval_burst_send(burst, bytes, 65508, 1, &count), SERVAL_ERROR_TOO_LONG);
    CHECK(count == 0);
    CHECK_RESULT(serval_burst_send(burst, bytes, 8, 0, &count), SERVAL_OK);
    CHECK_RESULT(serval_burst_recv(burst, &datagram, 0, 0, &count), SERVAL_ERROR_ARGUMENT);
    CHECK_RESULT(serval_burst_recv(burst, &datagram, 1, 0, &count), SERVAL_EMPTY);
    const uint64_t before = serval_now_ns();
    CHECK_RESULT(serval_burst_recv(burst, &datagram, 1, before + 2000000, &count), SERVAL_EMPTY);
    CHECK(serval_now_ns() >= before + 2000000 && count == 0);
    serval_burst_close(burst);
    serval_burst_close(NULL);

    burst = open_to(unused, 0);
    CHECK_RESULT(serval_burst_send(burst, bytes, 8, 1, &count), SERVAL_OK);
    CHECK_RESULT(serval_burst_recv(burst, &datagram, 1, serval_now_ns() + PATIENCE_NS, &count),
                 SERVAL_ERROR_CLOSED);
    CHECK(strcmp(serval_detail() + strlen("no server listens at "), unused) == 0);
    serval_burst_close(burst);
    printf("limits right\n");
}

int main(int count, char** arguments) {
    // Whatever goes wrong, this program ends.
    alarm(600);
    CHECK(count >= 3);
    const char* test = arguments[1];
    const char* address = arguments[2];
    if (strcmp(test, "load") == 0 && count == 7)
        load(address, number_argument(arguments, 3), number_argument(arguments, 4),
             number_argument(arguments, 5), strcmp(arguments[6], "plain") == 0);
    else if (strcmp(test, "portions") == 0)
        portions(address);
    else if (strcmp(test, "limits") == 0 && count == 4)
        limits(address, arguments[3]);
    else
        CHECK(!"a known test with its arguments");
    return 0;
}
