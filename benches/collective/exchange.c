/* What two processes need to exchange BYTES each over one TCP connection, without sums, frames or failures: `exchange BYTES ROUNDS CORE CORE`.
   Both spin on system calls that do not block. Prints the median and the 99th percentile in microseconds, as JSON. */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1e6 * time.tv_sec + time.tv_nsec / 1e3;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void exchange(int fd, char *out, char *in, size_t bytes)
{
    size_t sent = 0, got = 0;
    while (sent < bytes || got < bytes) {
        if (sent < bytes) {
            ssize_t n = send(fd, out + sent, bytes - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
            sent += n > 0 ? n : 0;
        }
        if (got < bytes) {
            ssize_t n = recv(fd, in + got, bytes - got, MSG_DONTWAIT);
            if (n == 0)
                exit(1);
            got += n > 0 ? n : 0;
        }
    }
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    size_t bytes = strtoul(argv[1], 0, 10);
    int rounds = atoi(argv[2]), listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    if (bind(listener, (void *)&address, length) || listen(listener, 1) ||
        getsockname(listener, (void *)&address, &length))
        return 1;
    int child = fork() == 0, fd = child ? socket(AF_INET, SOCK_STREAM, 0) : accept(listener, 0, 0);
    if (child && connect(fd, (void *)&address, length))
        return 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(atoi(argv[3 + child]), &cores);
    sched_setaffinity(0, sizeof cores, &cores);
    char *out = calloc(1, bytes), *in = calloc(1, bytes);
    double *times = malloc(rounds * sizeof *times);
    for (int round = -rounds / 10; round < rounds; round++) {
        double began = now();
        exchange(fd, out, in, bytes);
        if (round >= 0)
            times[round] = now() - began;
    }
    if (child)
        return 0;
    wait(0);
    qsort(times, rounds, sizeof *times, compare);
    printf("{\"p50_us\": %.3f, \"p99_us\": %.3f}\n", times[rounds / 2], times[rounds * 99 / 100]);
    return 0;
}
