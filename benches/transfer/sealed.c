/*
 * Sealed files through sockets: sealed ENGINE FILE SECONDS, for tools/compare-builds.
 *
 * Four transfers of the whole file with AES-256-GCM are in flight, each to a TCP connection of its own, which a thread of this process
 * reads. After half a second the number of transfers that end in SECONDS is counted; all bytes have to arrive. Prints
 * {"rate": transfers a second, "messages": all of them}.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <serval/transfer.h>

enum { STREAMS = 4 };
#define WARMUP_S 0.5

struct stream {
    int ours, theirs; /* the engine writes to `ours` */
    uint64_t id;
};
static struct stream streams[STREAMS];
static volatile uint64_t received;

static void fail(const char *what) {
    fprintf(stderr, "sealed: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* A TCP connection over loopback. */
static void connect_pair(int *a, int *b) {
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener, 1) < 0 ||
        getsockname(listener, (struct sockaddr *)&address, &length) < 0)
        fail("cannot listen");
    *a = socket(AF_INET, SOCK_STREAM, 0);
    if (*a < 0 || connect(*a, (struct sockaddr *)&address, sizeof address) < 0) fail("cannot connect");
    *b = accept(listener, NULL, NULL);
    if (*b < 0) fail("cannot accept");
    close(listener);
}

static void *drain(void *unused) {
    static char bytes[1 << 20];
    struct pollfd ready[STREAMS];
    (void)unused;
    for (int i = 0; i < STREAMS; i++) ready[i] = (struct pollfd){ .fd = streams[i].theirs, .events = POLLIN };
    int open = STREAMS;
    while (open > 0) {
        if (poll(ready, STREAMS, -1) < 0 && errno != EINTR) fail("poll");
        for (int i = 0; i < STREAMS; i++) {
            if (!ready[i].revents) continue;
            ssize_t got = read(ready[i].fd, bytes, sizeof bytes);
            if (got > 0) received += (uint64_t)got;
            if (got == 0) ready[i].fd = -1, open--;
            if (got < 0 && errno != EINTR) fail("read");
        }
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "usage: sealed ENGINE FILE SECONDS\n"), 2;
    static const uint8_t key[32] = { 7 };
    sv_transfers *engine;
    int error = sv_transfers_open(argv[1], &engine);
    if (error < 0) return errno = -error, fail(argv[1]), 1;
    int file = open(argv[2], O_RDONLY | O_CLOEXEC);
    if (file < 0) fail(argv[2]);
    const sv_transfer transfer = SV_TRANSFER_DEFAULTS;
    for (int i = 0; i < STREAMS; i++) connect_pair(&streams[i].ours, &streams[i].theirs);
    pthread_t reader;
    if (pthread_create(&reader, NULL, drain, NULL)) fail("cannot start a thread");
    for (int i = 0; i < STREAMS; i++)
        if (sv_encrypted_sendfile_start(engine, streams[i].ours, file, &transfer, key, &streams[i].id) < 0) fail("cannot start a transfer");
    const double begin = now() + WARMUP_S, end = begin + atof(argv[3]);
    uint64_t all = 0, counted = 0, written = 0;
    int in_flight = STREAMS;
    while (in_flight > 0) {
        sv_transfer_result result;
        error = sv_transfers_next(engine, 10000, &result);
        if (error < 0) errno = -error, fail("no result");
        if (result.error) return fprintf(stderr, "sealed: %s\n", result.text), 1;
        const double time = now();
        written += result.written;
        all++;
        counted += time >= begin && time < end;
        in_flight--;
        for (int i = 0; i < STREAMS && time < end; i++) {
            if (streams[i].id != result.id) continue;
            if (sv_encrypted_sendfile_start(engine, streams[i].ours, file, &transfer, key, &streams[i].id) < 0) fail("cannot start a transfer");
            in_flight++;
        }
    }
    for (int i = 0; i < STREAMS; i++) close(streams[i].ours);
    sv_transfers_close(engine);
    pthread_join(reader, NULL);
    if (received != written || written == 0)
        return fprintf(stderr, "sealed: %llu bytes arrived of %llu\n", (unsigned long long)received, (unsigned long long)written), 1;
    printf("{\"rate\": %.1f, \"messages\": %llu}\n", (double)counted / atof(argv[3]), (unsigned long long)all);
    return 0;
}
