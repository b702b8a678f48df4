// libserval_transfer_preload.so: with LD_PRELOAD, sendfile of an unmodified program is done by a
// transfer engine.
//
// The call is synchronous: it returns when the engine has put the bytes into the socket, or when a
// non-blocking socket is full. So what the program writes, shuts down or closes afterwards comes
// after them, and epoll reports the program's own socket as always. These calls go to libc: short
// ones, those on non-blocking sockets if the settings say so, sockets with SO_SNDTIMEO, other
// descriptors than a regular file and a stream socket, and everything while no engine answers.
// splice, tee and copy_file_range are not replaced.
//
// preload_settings.c says which engine a program has, if any. Every thread has a connection of its
// own. A process that was forked closes those of its parent, so that the parent's end ends the
// parent's transfers, and opens new ones.
#define _GNU_SOURCE
#include "preload/transfer/preload_settings.h"
#include "preload/transfer/preload_tls.h"
#include "serval/transfer.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

// After a failure the engine is looked for again after this time.
enum { RETRY_MS = 1000 };
// On a non-blocking socket: the time after which a transfer is cancelled.
enum { NO_WAIT_MS = 250 };
// The time after which an engine is given up that does not end a cancelled transfer. The end of its
// process is seen at once.
enum { CANCEL_MS = 10000 };
// As Linux: sendfile transfers at most this number of bytes.
#define BYTES_MAX ((size_t)0x7ffff000)

typedef ssize_t sendfile_function(int, int, off_t*, size_t);

// The connection of a thread.
struct connection {
    sv_transfers* transfers;
    pid_t process;
    // The socket's identity: a program that closes all descriptors may use the number for something
    // else.
    dev_t device;
    ino_t inode;
    int64_t retry_at_ms;
    struct connection* next;
};

static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static bool has_key;
static sendfile_function* next_sendfile;
static atomic_bool warned;
// Whether this thread is in a call for the engine. A signal handler that calls sendfile meanwhile
// must touch neither the connection, whose answers are those of the outer call, nor a lock: libc
// sends for it. A handler that leaves the outer call by siglongjmp leaves the thread to libc. No
// memory is allocated for it.
static _Thread_local volatile sig_atomic_t is_inside __attribute__((tls_model("initial-exec")));
// Read when the library is loaded: programs such as nginx replace their environment, and others
// their root.
static struct settings settings;

// Whether a handler of the program ends calls with EINTR. Which handler has run is not known, so
// one such handler is enough: a program that has it expects EINTR.
static bool signals_end_calls(void) {
    for (int signal = 1; signal < NSIG; signal++) {
        struct sigaction action;
        if (sigaction(signal, NULL, &action) < 0 || action.sa_handler == SIG_DFL ||
            action.sa_handler == SIG_IGN)
            continue;
        if (!(action.sa_flags & SA_RESTART)) return true;
    }
    return false;
}

static void drop(struct connection* connection);

// The connections of all threads.
static pthread_mutex_t connections_lock = PTHREAD_MUTEX_INITIALIZER;
static struct connection* connections;

static void end_of_thread(void* value) {
    pthread_mutex_lock(&connections_lock);
    struct connection** at = &connections;
    while (*at && *at != value) at = &(*at)->next;
    if (*at) *at = (*at)->next;
    pthread_mutex_unlock(&connections_lock);
    drop(value);
    free(value);
}

static void before_fork(void) { pthread_mutex_lock(&connections_lock); }

static void after_fork(void) { pthread_mutex_unlock(&connections_lock); }

// As long as a child held them, the engine would not see the end of the parent.
static void after_fork_in_child(void) {
    for (struct connection* each = connections; each; each = each->next) drop(each);
    pthread_mutex_unlock(&connections_lock);
}

__attribute__((constructor)) static void load(void) {
    int before = errno;
    settings_load(&settings);
    if (settings.tls) tls_start(settings.verbose);
    errno = before;
}

static void prepare(void) {
    has_key = pthread_key_create(&key, end_of_thread) == 0 &&
              pthread_atfork(before_fork, after_fork, after_fork_in_child) == 0;
    *(void**)&next_sendfile = dlsym(RTLD_NEXT, "sendfile64");
    if (!next_sendfile) *(void**)&next_sendfile = dlsym(RTLD_NEXT, "sendfile");
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void warn(const char* what, int error) {
    if (atomic_exchange(&warned, true)) return;
    fprintf(stderr, "serval: transfers are done by libc: %s (%s): %s\n", what, settings.engine,
            strerror(error));
}

// At the first call that an engine could do.
static void warn_of_settings(void) {
    if (atomic_exchange(&warned, true)) return;
    fprintf(stderr, "serval: transfers are done by libc: %s\n", settings.error);
}

// Whether the descriptor is still the connection.
static bool is_own(const struct connection* connection) {
    struct stat found;
    return fstat(sv_transfers_fd(connection->transfers), &found) == 0 &&
           found.st_dev == connection->device && found.st_ino == connection->inode;
}

static void drop(struct connection* connection) {
    // If the program has closed the descriptor, its number may be in use: then only the memory is
    // lost, which is little.
    if (connection->transfers && is_own(connection)) sv_transfers_close(connection->transfers);
    connection->transfers = NULL;
}

// The thread's connection, or NULL.
static struct connection* connection(void) {
    if (!has_key) return NULL;
    struct connection* found = pthread_getspecific(key);
    if (!found) {
        found = calloc(1, sizeof *found);
        if (!found) return NULL;
        if (pthread_setspecific(key, found) != 0) {
            free(found);
            return NULL;
        }
        pthread_mutex_lock(&connections_lock);
        found->next = connections;
        connections = found;
        pthread_mutex_unlock(&connections_lock);
    }
    if (found->transfers && (found->process != getpid() || !is_own(found))) {
        drop(found);
        found->retry_at_ms = 0;
    }
    if (found->transfers) return found;
    int64_t now = now_ms();
    if (now < found->retry_at_ms) return NULL;
    int status = sv_transfers_open(settings.engine, &found->transfers);
    struct stat socket;
    if (status < 0 || fstat(sv_transfers_fd(found->transfers), &socket) < 0) {
        warn("no engine answers", status < 0 ? -status : errno);
        found->retry_at_ms = now + RETRY_MS;
        return NULL;
    }
    found->process = getpid();
    found->device = socket.st_dev;
    found->inode = socket.st_ino;
    return found;
}

// What a call is for the engine: the length of its range, or 0 if it is for libc.
static size_t range(int out, int in, const off_t* offset, size_t count, off_t* from,
                    bool* no_wait) {
    if (count < settings.bytes_min) return 0;
    int flags = fcntl(out, F_GETFL);
    *no_wait = flags & O_NONBLOCK;
    if (flags < 0 || (*no_wait && !settings.nonblocking)) return 0;
    struct stat file, socket;
    if (fstat(in, &file) < 0 || !S_ISREG(file.st_mode) || fstat(out, &socket) < 0 ||
        !S_ISSOCK(socket.st_mode))
        return 0;
    *from = offset ? *offset : lseek(in, 0, SEEK_CUR);
    if (*from < 0 || *from >= file.st_size) return 0;
    size_t left = (size_t)(file.st_size - *from);
    if (count > left) count = left;
    if (count > BYTES_MAX) count = BYTES_MAX;
    if (count < settings.bytes_min) return 0;
    int type = 0;
    socklen_t len = sizeof type;
    if (getsockopt(out, SOL_SOCKET, SO_TYPE, &type, &len) < 0 || type != SOCK_STREAM) return 0;
    struct timeval limit = {0, 0};
    len = sizeof limit;
    if (getsockopt(out, SOL_SOCKET, SO_SNDTIMEO, &limit, &len) < 0 || limit.tv_sec || limit.tv_usec)
        return 0;
    return count;
}

static ssize_t through_engine(struct connection* connection, int out, int in, off_t* offset,
                              size_t count, off_t from, bool no_wait, bool* for_libc) {
    sv_transfer transfer = SV_TRANSFER_DEFAULTS;
    sv_transfer_result result;
    transfer.offset = (uint64_t)from;
    transfer.bytes = count;
    transfer.no_wait = no_wait;
    uint64_t id;
    int status = sv_sendfile_start(connection->transfers, out, in, &transfer, &id);
    if (status < 0) {
        // Nothing has been started.
        warn("the engine has gone", -status);
        drop(connection);
        connection->retry_at_ms = now_ms() + RETRY_MS;
        *for_libc = true;
        return -1;
    }
    bool interrupted = false, signalled = false;
    int silent = 0;
    for (;;) {
        status = sv_transfers_next(connection->transfers,
                                   no_wait && !interrupted ? NO_WAIT_MS : CANCEL_MS, &result);
        if (status == 0 && result.id == id) break;
        if (status == 0) continue;
        if (status == -EINTR) {
            interrupted = signalled = true;
            status = sv_transfers_cancel(connection->transfers, id);
            if (status == 0) continue;
        }
        // A peer that reads slowly takes longer; an engine that does not end a cancelled transfer
        // has failed.
        if (status == -EAGAIN && !interrupted && !no_wait && ++silent < 6) continue;
        if (status == -EAGAIN && !interrupted) {
            interrupted = true;
            if (sv_transfers_cancel(connection->transfers, id) == 0) continue;
        }
        if (status == -ECONNREFUSED) {
            // Refused before anything was started.
            warn(result.text, ECONNREFUSED);
            drop(connection);
            connection->retry_at_ms = now_ms() + RETRY_MS;
            *for_libc = true;
            return -1;
        }
        // How far the transfer came is not known, so the stream cannot be continued.
        warn("the engine ended during a transfer", -status);
        drop(connection);
        connection->retry_at_ms = now_ms() + RETRY_MS;
        errno = EIO;
        return -1;
    }
    if (result.written == 0) {
        if (signalled && !no_wait && signals_end_calls()) {
            errno = EINTR;
        } else if (interrupted) {
            // The handler has run. libc's call goes on, as with SA_RESTART.
            *for_libc = true;
        } else if (result.error == 0) {
            errno = EAGAIN;
        } else {
            // libc reports the error as the program expects it, with a signal if there is one.
            *for_libc = true;
        }
        return -1;
    }
    off_t end = from + (off_t)result.written;
    if (offset) {
        *offset = end;
    } else {
        lseek(in, end, SEEK_SET);
    }
    return (ssize_t)result.written;
}

static ssize_t replaced(int out, int in, off_t* offset, size_t count) {
    ssize_t sealed;
    if (tls_sendfile(out, in, offset, count, &sealed)) return sealed;
    pthread_once(&prepared, prepare);
    if (!next_sendfile) {
        errno = ENOSYS;
        return -1;
    }
    int before = errno;
    if (is_inside) return next_sendfile(out, in, offset, count);
    if (!settings.on) {
        off_t from;
        bool no_wait;
        if (settings.error[0] && !atomic_load(&warned) &&
            range(out, in, offset, count, &from, &no_wait))
            warn_of_settings();
        errno = before;
        return next_sendfile(out, in, offset, count);
    }
    off_t from;
    bool no_wait;
    size_t bytes = range(out, in, offset, count, &from, &no_wait);
    bool for_libc = true;
    ssize_t sent = -1;
    if (bytes) {
        is_inside = 1;
        struct connection* found = connection();
        if (found) {
            for_libc = false;
            sent = through_engine(found, out, in, offset, bytes, from, no_wait, &for_libc);
        }
        is_inside = 0;
    }
    if (!for_libc) {
        if (sent >= 0) errno = before;
        return sent;
    }
    errno = before;
    return next_sendfile(out, in, offset, count);
}

SV_TRANSFER_API ssize_t sendfile(int out, int in, off_t* offset, size_t count);
SV_TRANSFER_API ssize_t sendfile64(int out, int in, off_t* offset, size_t count);

ssize_t sendfile(int out, int in, off_t* offset, size_t count) {
    return replaced(out, in, offset, count);
}

ssize_t sendfile64(int out, int in, off_t* offset, size_t count) {
    return replaced(out, in, offset, count);
}
