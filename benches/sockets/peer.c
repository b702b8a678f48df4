// The programs around tools/measure-sockets: a plain spinning TCP server, a sink, and clients that check what comes back.
//
//   peer echo PORT              sends back what it reads, one connection after the other; non-blocking, spinning
//   peer sink PORT              reads 1 MiB at a time until the end, then sends how many bytes that were (u64 LE); blocking
//   peer ping PORT ROUNDS       64 bytes there and back, spinning; prints p50 and p99 in microseconds
//   peer send PORT BYTES        sends that many bytes, in chunks of 1 MiB with the same content, and reads the count; prints MB/s
//   peer products PORT N REQUESTS CONNECTIONS
//                               asks for products of N x N matrices (device/kernels/matmul.cpp), a thread for each connection, and compares every
//                               number; prints the rate of all, p50 and p99 in microseconds
//
// A server prints "ready" when it listens. All use 127.0.0.1. Exit code 1 if a byte is wrong.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PING_BYTES = 64, CHUNK = 1 << 20 };

static void fail(const char* what) {
    perror(what);
    exit(1);
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int opened(int port, int listens) {
    const int one = 1, s = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (listens) {
        if (bind(s, (struct sockaddr*)&at, sizeof at) || listen(s, 16)) fail("listen");
        puts("ready");
        fflush(stdout);
    } else if (connect(s, (struct sockaddr*)&at, sizeof at)) {
        fail("connect");
    }
    return s;
}

static int accepted(int listener) {
    const int one = 1, s = accept(listener, NULL, NULL);
    if (s < 0) fail("accept");
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return s;
}

// Reads or writes all bytes, without sleeping if the socket is non-blocking. 0 at the end of the stream.
static int whole(int s, char* bytes, size_t count, int writes) {
    for (size_t done = 0; done < count;) {
        const ssize_t n = writes ? send(s, bytes + done, count - done, MSG_NOSIGNAL) : recv(s, bytes + done, count - done, 0);
        if (n > 0) done += (size_t)n;
        else if (n == 0) return 0;
        else if (errno != EAGAIN && errno != EINTR) return 0;
    }
    return 1;
}

static void serve_echo(int port) {
    static char bytes[1 << 16];
    const int listener = opened(port, 1);
    for (;;) {
        const int s = accepted(listener);
        fcntl(s, F_SETFL, O_NONBLOCK);
        for (;;) {
            const ssize_t n = recv(s, bytes, sizeof bytes, 0);
            if (n > 0 ? !whole(s, bytes, (size_t)n, 1) : n == 0 || (errno != EAGAIN && errno != EINTR)) break;
        }
        close(s);
    }
}

static void serve_sink(int port) {
    static char bytes[CHUNK];
    const int listener = opened(port, 1);
    for (;;) {
        const int s = accepted(listener);
        uint64_t count = 0;
        for (ssize_t n; (n = recv(s, bytes, sizeof bytes, 0)) > 0;) count += (uint64_t)n;
        whole(s, (char*)&count, sizeof count, 1);
        close(s);
    }
}

static int by_value(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static void ping(int port, int rounds) {
    const int s = opened(port, 0), warm = rounds / 10;
    double* times = malloc(sizeof(double) * (size_t)rounds);
    char out[PING_BYTES], in[PING_BYTES];
    fcntl(s, F_SETFL, O_NONBLOCK);
    for (int round = -warm; round < rounds; round++) {
        for (int i = 0; i < PING_BYTES; i++) out[i] = (char)(i * 7 + round);
        const double began = now_us();
        if (!whole(s, out, sizeof out, 1) || !whole(s, in, sizeof in, 0)) fail("ping");
        if (round >= 0) times[round] = now_us() - began;
        if (memcmp(out, in, sizeof in)) exit(1);
    }
    qsort(times, (size_t)rounds, sizeof(double), by_value);
    printf("%.2f %.2f\n", times[rounds / 2], times[rounds * 99L / 100]);
    close(s);
}

static void send_stream(int port, uint64_t bytes) {
    static char chunk[CHUNK];
    const int s = opened(port, 0);
    for (size_t i = 0; i < sizeof chunk; i++) chunk[i] = (char)(i * 7 + (i >> 8));
    const double began = now_us();
    for (uint64_t done = 0; done < bytes; done += sizeof chunk)
        if (!whole(s, chunk, sizeof chunk, 1)) fail("send");
    shutdown(s, SHUT_WR);
    uint64_t count = 0;
    if (!whole(s, (char*)&count, sizeof count, 0) || count != (bytes + CHUNK - 1) / CHUNK * CHUNK) exit(1);
    printf("%.1f\n", (double)count / (now_us() - began));
    close(s);
}

static struct {
    int port, requests;
    uint32_t n;
    char* request;
    float* wanted;
} job;

// One connection; returns its times.
static void* ask(void* unused) {
    (void)unused;
    const int s = opened(job.port, 0);
    const size_t numbers = (size_t)job.n * job.n;
    double* times = malloc(sizeof(double) * (size_t)job.requests);
    float* answer = malloc(4 * numbers);
    for (int i = 0; i < job.requests; i++) {
        const double began = now_us();
        if (!whole(s, job.request, 4 + 8 * numbers, 1) || !whole(s, (char*)answer, 4 * numbers, 0)) fail("products");
        times[i] = now_us() - began;
        for (size_t k = 0; k < numbers; k++)
            if (answer[k] != job.wanted[k]) exit(1);
    }
    free(answer);
    close(s);
    return times;
}

static void products(int port, int n, int requests, int connections) {
    const size_t numbers = (size_t)n * (size_t)n;
    job.port = port, job.requests = requests, job.n = (uint32_t)n;
    job.request = malloc(4 + 8 * numbers);
    job.wanted = calloc(numbers, 4);
    memcpy(job.request, &job.n, 4);
    float *a = (float*)(job.request + 4), *b = a + numbers;
    // Small whole numbers: every sum is exact, in any order.
    for (size_t i = 0; i < numbers; i++) a[i] = (float)(i % 7) - 3, b[i] = (float)(i % 5) - 2;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++)
            for (int j = 0; j < n; j++) job.wanted[i * n + j] += a[i * n + k] * b[k * n + j];
    pthread_t threads[64];
    double* all = malloc(sizeof(double) * (size_t)requests * (size_t)connections);
    const double began = now_us();
    for (int c = 0; c < connections; c++)
        if (pthread_create(&threads[c], NULL, ask, NULL)) fail("pthread_create");
    for (int c = 0; c < connections; c++) {
        void* times;
        pthread_join(threads[c], &times);
        memcpy(all + (size_t)c * (size_t)requests, times, sizeof(double) * (size_t)requests);
    }
    const double rate = (double)requests * connections / (now_us() - began) * 1e6;
    const long total = (long)requests * connections;
    qsort(all, (size_t)total, sizeof(double), by_value);
    printf("%.1f %.1f %.1f\n", rate, all[total / 2], all[total * 99 / 100]);
}

int main(int argc, char** argv) {
    const int port = argc > 2 ? atoi(argv[2]) : 0;
    if (argc == 3 && !strcmp(argv[1], "echo")) serve_echo(port);
    else if (argc == 3 && !strcmp(argv[1], "sink")) serve_sink(port);
    else if (argc == 4 && !strcmp(argv[1], "ping")) ping(port, atoi(argv[3]));
    else if (argc == 4 && !strcmp(argv[1], "send")) send_stream(port, strtoull(argv[3], NULL, 10));
    else if (argc == 6 && !strcmp(argv[1], "products") && atoi(argv[3]) <= 512 && atoi(argv[5]) <= 64)
        products(port, atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
    else return fprintf(stderr, "usage: peer echo|sink PORT, peer ping PORT ROUNDS, peer send PORT BYTES, peer products PORT N REQUESTS CONNECTIONS\n"), 2;
    return 0;
}
