// What sendfile promises, checked through libserval_transfer_preload.so: `preload_test FOLDER`. The
// same program passes without the library. `preload_test FOLDER handler` is for an engine only.
// `preload_test FOLDER orphan` waits in a call until it is killed; `preload_test FOLDER once` sends
// the file through a blocking socket, and through one that does not block.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                                    \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            fprintf(stderr, "%s:%d: %s is not true (%s)\n", __FILE__, __LINE__, #condition, \
                    strerror(errno));                                                       \
            exit(1);                                                                        \
        }                                                                                   \
    } while (0)

enum { BYTES = 3000001 };
static unsigned char content[BYTES], got[2 * BYTES];

static void pair(int ends[2], int flags) {
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | flags, 0, ends) == 0);
}

// A child reads everything, and compares it with `bytes` of the content followed by "end".
static pid_t reader(int ends[2], size_t bytes) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child > 0) {
        close(ends[1]);
        return child;
    }
    close(ends[0]);
    size_t len = 0;
    ssize_t now;
    while ((now = read(ends[1], got + len, sizeof got - len)) > 0) len += (size_t)now;
    _exit(len == bytes + 3 && memcmp(got, content, bytes) == 0 && memcmp(got + bytes, "end", 3) == 0
              ? 0
              : 1);
}

static void ended_well(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Blocking, with an offset of its own; what is written afterwards comes afterwards.
static void sends_in_order(int file) {
    int ends[2];
    pair(ends, 0);
    pid_t child = reader(ends, BYTES);
    off_t offset = 0;
    CHECK(lseek(file, 7, SEEK_SET) == 7);
    while (offset < BYTES) CHECK(sendfile(ends[0], file, &offset, (size_t)(BYTES - offset)) > 0);
    CHECK(offset == BYTES && lseek(file, 0, SEEK_CUR) == 7);
    CHECK(write(ends[0], "end", 3) == 3);
    CHECK(shutdown(ends[0], SHUT_WR) == 0);
    close(ends[0]);
    ended_well(child);
}

// Without an offset the file position moves, to the end of the file at most.
static void moves_the_position(int file) {
    int ends[2];
    pair(ends, 0);
    pid_t child = reader(ends, BYTES);
    CHECK(lseek(file, 0, SEEK_SET) == 0);
    size_t sent = 0;
    ssize_t now;
    while ((now = sendfile(ends[0], file, NULL, 1 << 30)) > 0) {
        sent += (size_t)now;
        CHECK(lseek(file, 0, SEEK_CUR) == (off_t)sent);
    }
    CHECK(now == 0 && sent == BYTES);
    CHECK(write(ends[0], "end", 3) == 3);
    close(ends[0]);
    ended_well(child);
}

// A non-blocking socket: short counts, EAGAIN, and epoll reports room.
static void does_not_block(int file) {
    int ends[2];
    pair(ends, SOCK_NONBLOCK);
    int epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLOUT | EPOLLET};
    CHECK(epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, ends[0], &event) == 0);
    off_t offset = 0;
    size_t len = 0, refused = 0;
    while (len < BYTES) {
        while (offset < BYTES) {
            off_t before = offset;
            ssize_t sent = sendfile(ends[0], file, &offset, (size_t)(BYTES - offset));
            if (sent < 0) {
                CHECK(errno == EAGAIN && offset == before);
                refused++;
                break;
            }
            CHECK(sent > 0 && offset == before + sent);
        }
        ssize_t now;
        while ((now = read(ends[1], got + len, sizeof got - len)) > 0) len += (size_t)now;
        CHECK(len == (size_t)offset);
        if (offset < BYTES)
            CHECK(epoll_wait(epoll, &event, 1, 10000) == 1 && (event.events & EPOLLOUT));
    }
    CHECK(refused > 0 && memcmp(got, content, BYTES) == 0);
    close(epoll);
    close(ends[0]);
    close(ends[1]);
}

static int signals[2];

static void handler(int signal) {
    (void)signal;
    // The reader of the socket starts when the handler has run.
    CHECK(write(signals[1], "x", 1) == 1);
}

// A signal during a call that has sent nothing: EINTR, or the call goes on if the handler has
// SA_RESTART.
static void is_interrupted(int file, int restart) {
    int ends[2];
    pair(ends, 0);
    CHECK(pipe(signals) == 0);
    // Full: the call waits.
    while (send(ends[0], content, 4096, MSG_DONTWAIT) > 0) {
    }
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char byte;
        close(ends[0]);
        close(signals[1]);
        // Until the first signal that meets the call: one before it changes nothing.
        while (read(signals[0], &byte, 1) == 1) {
            if (restart)
                while (read(ends[1], got, sizeof got) > 0) {
                }
        }
        _exit(0);
    }
    close(ends[1]);
    close(signals[0]);
    struct sigaction action = {.sa_handler = handler, .sa_flags = restart ? SA_RESTART : 0}, before;
    CHECK(sigaction(SIGALRM, &action, &before) == 0);
    struct itimerval timer = {{0, 50000}, {0, 50000}}, none = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
    off_t offset = 0;
    ssize_t sent = sendfile(ends[0], file, &offset, BYTES);
    int error = errno;
    CHECK(setitimer(ITIMER_REAL, &none, NULL) == 0);
    if (restart) {
        CHECK(sent > 0);
    } else {
        errno = error;
        CHECK(sent == -1 && error == EINTR && offset == 0);
    }
    CHECK(sigaction(SIGALRM, &before, NULL) == 0);
    close(ends[0]);
    close(signals[1]);
    ended_well(child);
}

static int handler_file, handler_socket, outer_socket, all_read[2];
static volatile sig_atomic_t handled, waits_for_all;

// Sends a whole file while a call of the same thread waits.
static void sending_handler(int signal) {
    (void)signal;
    if (handled) return;
    char byte = 'x';
    int queued = 0;
    CHECK(ioctl(outer_socket, SIOCOUTQ, &queued) == 0);
    // Before the outer call has begun; the timer comes again.
    if (queued == 0) return;
    struct itimerval none = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &none, NULL) == 0);
    if (waits_for_all) {
        // An engine goes on with the outer call, which has an answer now.
        CHECK(write(signals[1], &byte, 1) == 1);
        CHECK(read(all_read[0], &byte, 1) == 1);
    }
    off_t offset = 0;
    while (offset < BYTES)
        CHECK(sendfile(handler_socket, handler_file, &offset, (size_t)(BYTES - offset)) > 0);
    CHECK(write(handler_socket, "end", 3) == 3);
    close(handler_socket);
    handled = 1;
    CHECK(write(signals[1], &byte, 1) == 1);
}

// A signal handler that calls sendfile, too: both calls send what they are asked for, and say how
// much.
static void is_called_by_a_handler(int file, int restart, bool waits) {
    int ends[2], others[2];
    waits_for_all = waits;
    CHECK(pipe(all_read) == 0);
    pair(ends, 0);
    pair(others, 0);
    CHECK(pipe(signals) == 0);
    pid_t other = reader(others, BYTES);
    handler_file = file;
    handler_socket = others[0];
    outer_socket = ends[0];
    handled = 0;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char byte;
        close(ends[0]);
        close(others[0]);
        close(signals[1]);
        // Nothing is read until the handler has sent, or wants to: the outer call waits.
        CHECK(read(signals[0], &byte, 1) == 1);
        size_t len = 0;
        ssize_t now;
        while ((now = read(ends[1], got + len, sizeof got - len)) > 0) {
            len += (size_t)now;
            if (waits && len == BYTES) CHECK(write(all_read[1], "x", 1) == 1);
        }
        _exit(len == BYTES && memcmp(got, content, BYTES) == 0 ? 0 : 1);
    }
    close(ends[1]);
    close(signals[0]);
    struct sigaction action = {.sa_handler = sending_handler, .sa_flags = restart ? SA_RESTART : 0},
                     before;
    CHECK(sigaction(SIGALRM, &action, &before) == 0);
    struct itimerval timer = {{0, 50000}, {0, 50000}}, none = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
    off_t offset = 0;
    while (offset < BYTES) {
        off_t start = offset;
        ssize_t sent = sendfile(ends[0], file, &offset, (size_t)(BYTES - offset));
        CHECK(sent > 0 || (sent == -1 && errno == EINTR && !restart));
        CHECK(offset == start + (sent > 0 ? sent : 0));
    }
    while (!handled) pause();
    CHECK(setitimer(ITIMER_REAL, &none, NULL) == 0);
    CHECK(sigaction(SIGALRM, &before, NULL) == 0);
    close(ends[0]);
    close(signals[1]);
    close(all_read[0]);
    close(all_read[1]);
    ended_well(other);
    ended_well(child);
}

// The errors are those of libc.
static void fails_as_usual(int file) {
    int ends[2];
    pair(ends, 0);
    CHECK(signal(SIGPIPE, SIG_IGN) != SIG_ERR);
    close(ends[1]);
    off_t offset = 0;
    CHECK(sendfile(ends[0], file, &offset, BYTES) == -1 && errno == EPIPE && offset == 0);
    close(ends[0]);
    CHECK(sendfile(ends[0], file, &offset, BYTES) == -1 && errno == EBADF);
    pair(ends, 0);
    CHECK(sendfile(ends[0], -1, &offset, BYTES) == -1 && errno == EBADF);
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    CHECK(sendfile(ends[0], pipes[0], NULL, BYTES) == -1 && errno == EINVAL);
    // Another file is a sink as well.
    char path[] = "/tmp/serval-preload-XXXXXX";
    int sink = mkstemp(path);
    CHECK(sink >= 0 && unlink(path) == 0);
    offset = 0;
    CHECK(sendfile(sink, file, &offset, BYTES) == BYTES && lseek(sink, 0, SEEK_END) == BYTES);
    close(sink);
    close(pipes[0]);
    close(pipes[1]);
    close(ends[0]);
    close(ends[1]);
}

// A child that was forked after a transfer.
static void survives_a_fork(int file, const char* path) {
    sends_in_order(file);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        // As daemons do, and the numbers are used again.
        for (int descriptor = 3; descriptor < 1024; descriptor++) close(descriptor);
        int own = open(path, O_RDONLY);
        CHECK(own >= 0);
        sends_in_order(own);
        moves_the_position(own);
        _exit(0);
    }
    moves_the_position(file);
    ended_well(child);
}

// A process that waits in a call, and a child of it that lives until the end of standard input.
static void leaves_an_orphan(int file) {
    int ends[2];
    pair(ends, 0);
    sends_in_order(file);
    pid_t child = fork();
    CHECK(child >= 0);
    char byte;
    if (child == 0) _exit(read(0, &byte, 1) == 0 ? 0 : 1);
    off_t offset = 0;
    for (;;) CHECK(sendfile(ends[0], file, &offset, (size_t)(BYTES - offset)) > 0);
}

int main(int argc, char** argv) {
    CHECK(argc == 2 || argc == 3);
    for (size_t at = 0; at < BYTES; at++) content[at] = (unsigned char)(at * 31 ^ at >> 8);
    char path[4096];
    snprintf(path, sizeof path, "%s/source", argv[1]);
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(file >= 0 && write(file, content, BYTES) == BYTES);
    bool is_once = argc == 3 && strcmp(argv[2], "once") == 0;
    bool is_handler = argc == 3 && strcmp(argv[2], "handler") == 0;
    if (is_handler) {
        is_called_by_a_handler(file, 0, true);
        is_called_by_a_handler(file, 1, true);
        printf("ok\n");
        return 0;
    }
    if (argc == 3 && !is_once) leaves_an_orphan(file);
    sends_in_order(file);
    if (is_once) {
        does_not_block(file);
        printf("ok\n");
        return 0;
    }
    moves_the_position(file);
    does_not_block(file);
    is_interrupted(file, 0);
    is_interrupted(file, 1);
    is_called_by_a_handler(file, 0, false);
    is_called_by_a_handler(file, 1, false);
    fails_as_usual(file);
    survives_a_fork(file, path);
    printf("ok\n");
    return 0;
}
