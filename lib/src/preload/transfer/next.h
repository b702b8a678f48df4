// The functions of libc that the library replaces.
#pragma once

#include <aio.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

// What programs call that are compiled with _FORTIFY_SOURCE.
int __vdprintf_chk(int fd, int flag, const char* format, va_list arguments);
int __dprintf_chk(int fd, int flag, const char* format, ...);
int __poll_chk(struct pollfd* descriptors, nfds_t count, int ms, size_t bytes);
int __ppoll_chk(struct pollfd* descriptors, nfds_t count, const struct timespec* limit,
                const sigset_t* mask, size_t bytes);

#define PUBLIC __attribute__((visibility("default")))

#define NEXT_FUNCTIONS(each)                                                                    \
    each(aio_write) each(aio_write64) each(close) each(close_range) each(closefrom) each(dup)   \
        each(dup2) each(dup3) each(epoll_pwait) each(epoll_pwait2) each(epoll_wait) each(fcntl) \
            each(fcntl64) each(fdopen) each(lio_listio) each(lio_listio64) each(poll)           \
                each(__poll_chk) each(ppoll) each(__ppoll_chk) each(pselect) each(pwritev2)     \
                    each(pwritev64v2) each(select) each(send) each(sendmmsg) each(sendmsg)      \
                        each(sendto) each(setsockopt) each(splice) each(unshare) each(vdprintf) \
                            each(__vdprintf_chk) each(write) each(writev)

struct next {
#define NEXT_MEMBER(name) __typeof__(&name) name;
    NEXT_FUNCTIONS(NEXT_MEMBER)
#undef NEXT_MEMBER
};

extern struct next next;
// Finds them. That takes locks of the dynamic linker, so it is done when the library is loaded, and
// not in a signal handler or after a fork.
void next_find(void);
// The next definition of a function, which is libc's.
#define NEXT(name) \
    (*(__builtin_expect(next.name != NULL, 1) ? next.name : (next_find(), next.name)))
