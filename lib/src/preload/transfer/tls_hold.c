// nginx sends the head of an answer with one call and its file with the next one. Sent at once, the
// head is a packet of its own, and the client is woken for it. So a short write of a thread that
// has waited for events with epoll is sent with MSG_MORE: the kernel has the bytes, and sends them
// with those of the next call, at the latest after 0.2 s. Before the thread waits for events, and
// before it sends on another connection, they are sent without more.
#define _GNU_SOURCE
#include "preload/transfer/tls_hold.h"

#include "preload/transfer/next.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>

enum { WAITS_MAX = 1024 };

// The descriptor whose last bytes wait, or -1.
static __thread int held = -1;
// Whether the thread has waited for events with epoll.
static __thread bool has_loop;

bool tls_hold_may(struct tls_connection* connection, int fd, size_t bytes) {
    if (!has_loop || bytes > WAITS_MAX) return false;
    if (connection->hold == TLS_HOLD_UNKNOWN) {
        int corked = 1, flags = fcntl(fd, F_GETFL), before = TLS_HOLD_UNKNOWN;
        socklen_t len = sizeof corked;
        if (getsockopt(fd, IPPROTO_TCP, TCP_CORK, &corked, &len) < 0) corked = 1;
        int may = flags >= 0 && (flags & O_NONBLOCK) && !corked ? TLS_HOLD_MAY : TLS_HOLD_NEVER;
        atomic_compare_exchange_strong(&connection->hold, &before, may);
    }
    return connection->hold == TLS_HOLD_MAY;
}

void tls_hold_never(int fd) {
    struct tls_connection* found = tls_table_find(fd);
    if (!found) return;
    found->hold = TLS_HOLD_NEVER;
    tls_table_release(found);
}

static void let_go(void) {
    if (held < 0) return;
    int before = errno, off = 0;
    // The number may be another file's by this time, and another thread may hold the packets of the
    // connection back.
    struct tls_connection* found = tls_table_find(held);
    if (found) {
        if (!tls_table_is_nested(found) && found->hold == TLS_HOLD_MAY)
            NEXT(setsockopt)(held, IPPROTO_TCP, TCP_CORK, &off, sizeof off);
        tls_table_release(found);
    }
    held = -1;
    errno = before;
}

void tls_hold_begin(int fd) {
    if (held != fd) let_go();
}

void tls_hold_end(int fd, bool waits) {
    if (waits)
        held = fd;
    else if (held == fd)
        held = -1;
}

void tls_hold_closed(int fd) {
    if (held == fd) held = -1;
}

static void begin_epoll(void) {
    has_loop = true;
    let_go();
}

PUBLIC int epoll_wait(int epoll, struct epoll_event* events, int count, int ms) {
    begin_epoll();
    return NEXT(epoll_wait)(epoll, events, count, ms);
}

PUBLIC int epoll_pwait(int epoll, struct epoll_event* events, int count, int ms,
                       const sigset_t* mask) {
    begin_epoll();
    return NEXT(epoll_pwait)(epoll, events, count, ms, mask);
}

PUBLIC int epoll_pwait2(int epoll, struct epoll_event* events, int count,
                        const struct timespec* limit, const sigset_t* mask) {
    begin_epoll();
    return NEXT(epoll_pwait2)(epoll, events, count, limit, mask);
}

PUBLIC int poll(struct pollfd* descriptors, nfds_t count, int ms) {
    let_go();
    return NEXT(poll)(descriptors, count, ms);
}

PUBLIC int ppoll(struct pollfd* descriptors, nfds_t count, const struct timespec* limit,
                 const sigset_t* mask) {
    let_go();
    return NEXT(ppoll)(descriptors, count, limit, mask);
}

PUBLIC int __poll_chk(struct pollfd* descriptors, nfds_t count, int ms, size_t bytes) {
    let_go();
    return NEXT(__poll_chk)(descriptors, count, ms, bytes);
}

PUBLIC int __ppoll_chk(struct pollfd* descriptors, nfds_t count, const struct timespec* limit,
                       const sigset_t* mask, size_t bytes) {
    let_go();
    return NEXT(__ppoll_chk)(descriptors, count, limit, mask, bytes);
}

PUBLIC int select(int count, fd_set* readable, fd_set* writable, fd_set* other,
                  struct timeval* limit) {
    let_go();
    return NEXT(select)(count, readable, writable, other, limit);
}

PUBLIC int pselect(int count, fd_set* readable, fd_set* writable, fd_set* other,
                   const struct timespec* limit, const sigset_t* mask) {
    let_go();
    return NEXT(pselect)(count, readable, writable, other, limit, mask);
}
