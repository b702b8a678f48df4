// Kernel TLS without the kernel: OpenSSL asks with setsockopt(TCP_ULP, "tls") and
// setsockopt(SOL_TLS, TLS_TX) that the kernel seals what it sends, and gives it version, cipher,
// key and number of the next record. This library says yes in the kernel's place. From then on
// OpenSSL writes plain bytes: data with write, files with sendfile, messages of other types with
// sendmsg and a control message. Every call that sends is replaced here, so that these bytes leave
// the process as records; calls that cannot be replaced so fail on such a connection. What is
// received stays with OpenSSL.
//
// A call is taken over only if it comes from a libcrypto 3, whose functions then seal; everything
// else gets the kernel's own answer.
#define _GNU_SOURCE
#include "preload/transfer/preload_tls.h"
#include "preload/transfer/tls_hold.h"
#include "preload/transfer/tls_table.h"

#include "preload/transfer/next.h"

#include <aio.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/close_range.h>
#include <linux/tls.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef SOL_TLS
#define SOL_TLS 282
#endif

static bool started;
// The first connection is still to be reported.
static atomic_bool reports;

// The libraries that have asked, which are few and stay.
struct library {
    struct tls_crypto crypto;
    void* base;
    struct library* next;
};

static _Atomic(struct library*) libraries;

void tls_start(bool verbose) {
    atomic_store(&reports, verbose);
    started = true;
}

// Says once that records are made here: the program and its peers see no difference.
static void report(const struct tls_crypto_info* info) {
    if (!atomic_load_explicit(&reports, memory_order_relaxed) || !atomic_exchange(&reports, false))
        return;
    const char* version = info->version == TLS_1_3_VERSION ? "1.3" : "1.2";
    fprintf(stderr,
            "serval: libserval_transfer_preload.so makes the TLS records of process %d (first "
            "connection: TLS %s)\n",
            (int)getpid(), version);
}

// The functions of the libcrypto that has this code; NULL: it is another library.
static const struct tls_crypto* crypto_of(void* code) {
    Dl_info info;
    if (!dladdr(code, &info) || !info.dli_fname) return NULL;
    for (struct library* each = libraries; each; each = each->next)
        if (each->base == info.dli_fbase) return &each->crypto;
    void* handle = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_NOW);
    struct library* made = handle ? calloc(1, sizeof *made) : NULL;
    if (!made || !tls_crypto_find(&made->crypto, handle, info.dli_fbase)) {
        free(made);
        if (handle) dlclose(handle);
        return NULL;
    }
    // Without a lock, which another thread could hold when the process is forked. Two threads may
    // both add the library.
    made->base = info.dli_fbase;
    made->next = libraries;
    while (!atomic_compare_exchange_weak(&libraries, &made->next, made)) continue;
    return &made->crypto;
}

// Whether it is a connected TCP socket without a protocol of the kernel above it.
static bool is_plain_tcp(int fd) {
    int domain = 0, protocol = 0;
    socklen_t len = sizeof domain;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &len) < 0 ||
        (domain != AF_INET && domain != AF_INET6))
        return false;
    len = sizeof protocol;
    if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &len) < 0 || protocol != IPPROTO_TCP)
        return false;
    struct sockaddr_storage peer;
    len = sizeof peer;
    if (getpeername(fd, (struct sockaddr*)&peer, &len) < 0) return false;
    char name[16] = "";
    len = sizeof name;
    return getsockopt(fd, IPPROTO_TCP, TCP_ULP, name, &len) < 0 || len == 0 || !name[0];
}

// Takes the keys of a connection. Returns 0, an error of the call, or -1: the kernel is to answer.
static int take_over(int fd, const void* info, socklen_t len, const struct tls_crypto* crypto) {
    struct tls_connection* found = tls_table_find(fd);
    bool is_new = !found;
    if (is_new) found = tls_connection_new(fd);
    if (!found) return -1;
    int error = EBUSY;
    // A number is used once with a key, so a connection gets keys again only where TLS asks for new
    // ones.
    if (tls_connection_is_own(found)) {
        tls_table_enter();
        pthread_mutex_lock(&found->lock);
        if (is_new || found->stream.wants_keys)
            error = tls_stream_set_keys(&found->stream, crypto, info, len) ? 0 : EINVAL;
        pthread_mutex_unlock(&found->lock);
        tls_table_leave();
    }
    if (is_new && error == 0 && (!tls_table_put(fd, found) || !tls_table_mark_copies(fd, found))) {
        tls_table_closed(fd, found);
        error = EINVAL;
    }
    tls_table_release(found);
    return is_new && error ? -1 : error;
}

static int set_option(int fd, int level, int option, const void* value, socklen_t len,
                      void* caller) {
    bool asks = level == IPPROTO_TCP && option == TCP_ULP,
         gives = level == SOL_TLS && option == TLS_TX;
    if (started && (asks || gives) && value) {
        int before = errno;
        const struct tls_crypto* crypto = is_plain_tcp(fd) ? crypto_of(caller) : NULL;
        if (crypto && asks && len >= 3 && memcmp(value, "tls", 3) == 0) {
            errno = before;
            return 0;
        }
        int error = crypto && gives ? take_over(fd, value, len, crypto) : -1;
        // The kernel has not been asked yet, as this library has answered for it.
        if (crypto && gives && error < 0)
            NEXT(setsockopt)(fd, IPPROTO_TCP, TCP_ULP, "tls", sizeof "tls");
        if (crypto && gives && error == 0) report(value);
        errno = error > 0 ? error : before;
        if (error >= 0) return error ? -1 : 0;
    }
    if (level == IPPROTO_TCP && option == TCP_CORK && tls_table_has(fd)) {
        tls_hold_never(fd);
        tls_hold_closed(fd);
    }
    return NEXT(setsockopt)(fd, level, option, value, len);
}

PUBLIC int setsockopt(int fd, int level, int option, const void* value, socklen_t len) {
    return set_option(fd, level, option, value, len, __builtin_return_address(0));
}

static ssize_t host_send(int fd, const void* bytes, size_t len, int flags) {
    return NEXT(send)(fd, bytes, len, flags);
}

static ssize_t host_preadv(int fd, const struct iovec* parts, int count, off_t offset) {
    return preadv(fd, parts, count, offset);
}

static const struct tls_host host = {host_send, host_preadv};

// Begins a call on a connection. False: it fails.
static bool begin(struct tls_connection* connection, int fd, int* cancel) {
    if (tls_table_is_nested(connection) || !tls_connection_is_own(connection)) {
        errno = tls_table_is_nested(connection) ? EDEADLK : EIO;
        return false;
    }
    // A thread that is cancelled would keep the lock.
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, cancel);
    tls_hold_begin(fd);
    tls_table_enter();
    pthread_mutex_lock(&connection->lock);
    return true;
}

static void end(struct tls_connection* connection, int fd, ssize_t sent, bool waits,
                const int* cancel) {
    int error = errno;
    if (sent > 0) tls_hold_end(fd, waits);
    pthread_mutex_unlock(&connection->lock);
    tls_table_leave();
    pthread_setcancelstate(*cancel, NULL);
    tls_table_release(connection);
    errno = error;
}

static ssize_t refuse(struct tls_connection* connection, int error) {
    tls_table_release(connection);
    errno = error;
    return -1;
}

// The flags that kernel TLS knows.
static bool are_known(int flags) { return !(flags & ~(MSG_MORE | MSG_DONTWAIT | MSG_NOSIGNAL)); }

// Sends parts as data, or as a message of another type. Releases the connection.
static ssize_t send_parts(struct tls_connection* connection, int fd, uint8_t type,
                          const struct iovec* parts, size_t count, int flags) {
    int cancel;
    if (!are_known(flags)) return refuse(connection, EOPNOTSUPP);
    if (count > IOV_MAX) return refuse(connection, EMSGSIZE);
    if (!begin(connection, fd, &cancel)) return refuse(connection, errno);
    size_t bytes = count == 1 ? parts[0].iov_len : SIZE_MAX;
    bool waits = type == TLS_DATA && tls_hold_may(connection, fd, bytes);
    if (waits) flags |= MSG_MORE;
    ssize_t sent =
        type == TLS_DATA
            ? tls_stream_write(&connection->stream, &host, fd, parts, count, flags)
            : tls_stream_message(&connection->stream, &host, fd, type, parts, count, flags);
    end(connection, fd, sent, waits, &cancel);
    return sent;
}

static ssize_t send_bytes(struct tls_connection* connection, int fd, const void* bytes, size_t len,
                          int flags) {
    struct iovec part = {(void*)bytes, len};
    return send_parts(connection, fd, TLS_DATA, &part, 1, flags);
}

// The type of what a message sends. False: the control messages are wrong.
static bool type_of(const struct msghdr* message, uint8_t* type) {
    *type = TLS_DATA;
    for (struct cmsghdr* each = CMSG_FIRSTHDR(message); each;
         each = CMSG_NXTHDR((struct msghdr*)message, each)) {
        if (each->cmsg_level != SOL_TLS) continue;
        if (each->cmsg_type != TLS_SET_RECORD_TYPE || each->cmsg_len < CMSG_LEN(1)) return false;
        *type = *CMSG_DATA(each);
    }
    return true;
}

static ssize_t send_message(struct tls_connection* connection, int fd, const struct msghdr* message,
                            int flags) {
    uint8_t type;
    if (!type_of(message, &type)) return refuse(connection, EINVAL);
    return send_parts(connection, fd, type, message->msg_iov, message->msg_iovlen, flags);
}

bool tls_sendfile(int out, int in, off_t* offset, size_t count, ssize_t* sent) {
    struct tls_connection* found = tls_table_has(out) ? tls_table_find(out) : NULL;
    if (!found) return false;
    int cancel;
    if (!begin(found, out, &cancel)) {
        *sent = refuse(found, errno);
        return true;
    }
    *sent = tls_stream_sendfile(&found->stream, &host, out, in, offset, count);
    end(found, out, *sent, false, &cancel);
    return true;
}

// The connection of a descriptor, for which most calls are not.
static inline struct tls_connection* tls(int fd) {
    return __builtin_expect(tls_table_has(fd), 0) ? tls_table_find(fd) : NULL;
}

PUBLIC ssize_t write(int fd, const void* bytes, size_t len) {
    struct tls_connection* found = tls(fd);
    return found ? send_bytes(found, fd, bytes, len, 0) : NEXT(write)(fd, bytes, len);
}

PUBLIC ssize_t writev(int fd, const struct iovec* parts, int count) {
    struct tls_connection* found = tls(fd);
    if (!found) return NEXT(writev)(fd, parts, count);
    return count < 0 ? refuse(found, EINVAL)
                     : send_parts(found, fd, TLS_DATA, parts, (size_t)count, 0);
}

PUBLIC ssize_t send(int fd, const void* bytes, size_t len, int flags) {
    struct tls_connection* found = tls(fd);
    return found ? send_bytes(found, fd, bytes, len, flags) : NEXT(send)(fd, bytes, len, flags);
}

// A connected TCP socket ignores the address.
PUBLIC ssize_t sendto(int fd, const void* bytes, size_t len, int flags, const struct sockaddr* to,
                      socklen_t to_len) {
    struct tls_connection* found = tls(fd);
    return found ? send_bytes(found, fd, bytes, len, flags)
                 : NEXT(sendto)(fd, bytes, len, flags, to, to_len);
}

PUBLIC ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
    struct tls_connection* found = tls(fd);
    return found ? send_message(found, fd, message, flags) : NEXT(sendmsg)(fd, message, flags);
}

PUBLIC int sendmmsg(int fd, struct mmsghdr* messages, unsigned count, int flags) {
    struct tls_connection* found = tls(fd);
    if (!found) return NEXT(sendmmsg)(fd, messages, count, flags);
    tls_table_release(found);
    unsigned done = 0;
    for (; done < count && done < IOV_MAX; done++) {
        ssize_t sent = sendmsg(fd, &messages[done].msg_hdr, flags);
        if (sent < 0) return done ? (int)done : -1;
        messages[done].msg_len = (unsigned)sent;
    }
    return (int)done;
}

// What follows would put plain bytes into the socket, and no program is known that calls it after
// OpenSSL's TLS_TX.
PUBLIC ssize_t splice(int in, off64_t* in_offset, int out, off64_t* out_offset, size_t len,
                      unsigned flags) {
    struct tls_connection* found = tls(out);
    return found ? refuse(found, EOPNOTSUPP)
                 : NEXT(splice)(in, in_offset, out, out_offset, len, flags);
}

PUBLIC ssize_t pwritev2(int fd, const struct iovec* parts, int count, off_t offset, int flags) {
    struct tls_connection* found = tls(fd);
    return found ? refuse(found, EOPNOTSUPP) : NEXT(pwritev2)(fd, parts, count, offset, flags);
}

PUBLIC ssize_t pwritev64v2(int fd, const struct iovec* parts, int count, off64_t offset,
                           int flags) {
    struct tls_connection* found = tls(fd);
    return found ? refuse(found, EOPNOTSUPP) : NEXT(pwritev64v2)(fd, parts, count, offset, flags);
}

PUBLIC int aio_write(struct aiocb* command) {
    struct tls_connection* found = tls(command->aio_fildes);
    return found ? (int)refuse(found, EOPNOTSUPP) : NEXT(aio_write)(command);
}

PUBLIC int aio_write64(struct aiocb64* command) {
    struct tls_connection* found = tls(command->aio_fildes);
    return found ? (int)refuse(found, EOPNOTSUPP) : NEXT(aio_write64)(command);
}

PUBLIC int lio_listio(int mode, struct aiocb* const commands[], int count, struct sigevent* event) {
    for (int i = 0; i < count; i++) {
        struct tls_connection* found = commands[i] && commands[i]->aio_lio_opcode == LIO_WRITE
                                           ? tls(commands[i]->aio_fildes)
                                           : NULL;
        if (found) return (int)refuse(found, EOPNOTSUPP);
    }
    return NEXT(lio_listio)(mode, commands, count, event);
}

PUBLIC int lio_listio64(int mode, struct aiocb64* const commands[], int count,
                        struct sigevent* event) {
    for (int i = 0; i < count; i++) {
        struct tls_connection* found = commands[i] && commands[i]->aio_lio_opcode == LIO_WRITE
                                           ? tls(commands[i]->aio_fildes)
                                           : NULL;
        if (found) return (int)refuse(found, EOPNOTSUPP);
    }
    return NEXT(lio_listio64)(mode, commands, count, event);
}

PUBLIC FILE* fdopen(int fd, const char* mode) {
    struct tls_connection* found = mode[0] == 'r' && !strchr(mode, '+') ? NULL : tls(fd);
    if (!found) return NEXT(fdopen)(fd, mode);
    refuse(found, EOPNOTSUPP);
    return NULL;
}

PUBLIC int vdprintf(int fd, const char* format, va_list arguments) {
    struct tls_connection* found = tls(fd);
    return found ? (int)refuse(found, EOPNOTSUPP) : NEXT(vdprintf)(fd, format, arguments);
}

PUBLIC int dprintf(int fd, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int printed = vdprintf(fd, format, arguments);
    va_end(arguments);
    return printed;
}

PUBLIC int __vdprintf_chk(int fd, int flag, const char* format, va_list arguments) {
    struct tls_connection* found = tls(fd);
    return found ? (int)refuse(found, EOPNOTSUPP)
                 : NEXT(__vdprintf_chk)(fd, flag, format, arguments);
}

PUBLIC int __dprintf_chk(int fd, int flag, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int printed = __vdprintf_chk(fd, flag, format, arguments);
    va_end(arguments);
    return printed;
}

PUBLIC int close(int fd) {
    if (!tls_table_has(fd)) return NEXT(close)(fd);
    // The mark goes after the socket, so that no call in between finds a socket without it.
    struct tls_connection* found = tls_table_find(fd);
    tls_hold_closed(fd);
    int result = NEXT(close)(fd), error = errno;
    if (found) {
        tls_table_closed(fd, found);
        tls_table_release(found);
    }
    errno = error;
    return result;
}

PUBLIC int close_range(unsigned first, unsigned last, int flags) {
    int result = NEXT(close_range)(first, last, flags);
    // The descriptors of other threads stay open.
    if (result == 0 && (flags & CLOSE_RANGE_UNSHARE)) tls_table_keep_marks();
    if (result == 0 && started && !(flags & (CLOSE_RANGE_CLOEXEC | CLOSE_RANGE_UNSHARE)))
        tls_table_closed_range(first, last);
    return result;
}

PUBLIC int unshare(int flags) {
    if (flags & CLONE_FILES) tls_table_keep_marks();
    return NEXT(unshare)(flags);
}

PUBLIC void closefrom(int first) {
    NEXT(closefrom)(first);
    if (started) tls_table_closed_range(first < 0 ? 0 : (unsigned)first, UINT_MAX);
}

// Whether a copy may be made, which a process that cannot mark it would fill with plain bytes.
static bool may_copy(int fd) {
    if (tls_table_may_copy(fd)) return true;
    errno = EOPNOTSUPP;
    return false;
}

// Marks a copy as what it is a copy of.
static int copied(int from, int to) {
    if (to < 0 || !started) return to;
    int before = errno;
    if (!tls_table_copy(from, to)) {
        NEXT(close)(to);
        errno = ENOMEM;
        return -1;
    }
    errno = before;
    return to;
}

PUBLIC int dup(int fd) { return may_copy(fd) ? copied(fd, NEXT(dup)(fd)) : -1; }

PUBLIC int dup2(int fd, int to) { return may_copy(fd) ? copied(fd, NEXT(dup2)(fd, to)) : -1; }

PUBLIC int dup3(int fd, int to, int flags) {
    return may_copy(fd) ? copied(fd, NEXT(dup3)(fd, to, flags)) : -1;
}

#define FCNTL(name)                                                     \
    PUBLIC int name(int fd, int command, ...) {                         \
        va_list arguments;                                              \
        va_start(arguments, command);                                   \
        void* argument = va_arg(arguments, void*);                      \
        va_end(arguments);                                              \
        bool copies = command == F_DUPFD || command == F_DUPFD_CLOEXEC; \
        if (copies && !may_copy(fd)) return -1;                         \
        int result = NEXT(name)(fd, command, argument);                 \
        return copies ? copied(fd, result) : result;                    \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

// Other names that libc has for them.
#define ALIAS(name, of, ...) PUBLIC __typeof__(of) name __attribute__((alias(#of), __VA_ARGS__));
ALIAS(__write, write)
ALIAS(__send, send)
ALIAS(__close, close)
ALIAS(__dup2, dup2, nothrow, leaf)
ALIAS(__fcntl, fcntl)
