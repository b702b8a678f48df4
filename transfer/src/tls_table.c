/*
 * A descriptor has a place in a table of pages, which are made where they are needed and stay. Descriptors without a connection cost two loads. A
 * connection is found by the number of a descriptor and then compared with the socket's cookie, so a number that was closed where this library
 * does not see it (fclose, another program's code) and is used for something else is not taken for the connection.
 *
 * After a fork both processes have the socket. Only the one that made the connection can count its records, so the other one has no keys of it and
 * its calls fail. A child of vfork has its parent's memory, so what it closes stays in the table, and its calls count for both.
 */
#define _GNU_SOURCE
#include "tls_table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PAGE_SLOTS = 1024 };

typedef _Atomic(struct tls_connection *) slot;

static _Atomic(slot *) pages[TLS_DESCRIPTORS_MAX / PAGE_SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;
/* Whose table this is. */
static pid_t process;
/* How many forks this process is from the first one, and a page that a child of any kind finds empty. */
static unsigned generation;
static volatile bool *unforked;

static void before_fork(void) {
    pthread_mutex_lock(&lock);
}

static void after_fork(void) {
    pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void) {
    process = getpid();
    generation++;
    *unforked = true;
    /* Another thread may have used a connection, and is not here: its lock is not touched again. */
    for (size_t page = 0; page < TLS_DESCRIPTORS_MAX / PAGE_SLOTS; page++)
        for (size_t at = 0; pages[page] && at < PAGE_SLOTS; at++)
            if (pages[page][at]) tls_stream_clear(&pages[page][at]->stream);
    pthread_mutex_unlock(&lock);
}

static void prepare(void) {
    static bool without_page;
    void *page = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unforked = page != MAP_FAILED && madvise(page, 1, MADV_WIPEONFORK) == 0 ? page : &without_page;
    *unforked = true;
    process = getpid();
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

static slot *place(int fd) {
    if (fd < 0 || fd >= TLS_DESCRIPTORS_MAX) return NULL;
    slot *page = atomic_load_explicit(&pages[fd / PAGE_SLOTS], memory_order_acquire);
    return page ? &page[fd % PAGE_SLOTS] : NULL;
}

bool tls_table_has(int fd) {
    slot *found = place(fd);
    return found && atomic_load_explicit(found, memory_order_acquire);
}

static bool cookie_of(int fd, uint64_t *cookie) {
    socklen_t len = sizeof *cookie;
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, cookie, &len) == 0 && len == sizeof *cookie;
}

/* Whether a descriptor is another file than the connection's socket. If the host does not say, it is the socket: plain bytes must not go there. */
static bool is_other(int fd, const struct tls_connection *connection) {
    uint64_t cookie;
    if (cookie_of(fd, &cookie)) return cookie != connection->cookie;
    return errno == EBADF || errno == ENOTSOCK;
}

struct tls_connection *tls_connection_new(int fd) {
    pthread_once(&prepared, prepare);
    if (process != getpid()) return NULL;
    struct tls_connection *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    if (!cookie_of(fd, &made->cookie)) {
        free(made);
        return NULL;
    }
    pthread_mutex_init(&made->lock, NULL);
    made->generation = generation;
    made->references = 1;
    return made;
}

bool tls_connection_is_own(const struct tls_connection *connection) {
    return connection->generation == generation && *unforked;
}

static void release_locked(struct tls_connection *connection) {
    if (--connection->references > 0) return;
    tls_stream_clear(&connection->stream);
    free(connection);
}

void tls_table_release(struct tls_connection *connection) {
    pthread_mutex_lock(&lock);
    release_locked(connection);
    pthread_mutex_unlock(&lock);
}

static void set_locked(slot *at, struct tls_connection *connection) {
    struct tls_connection *before = *at;
    if (connection) connection->references++;
    *at = connection;
    if (before) release_locked(before);
}

bool tls_table_put(int fd, struct tls_connection *connection) {
    if (fd < 0 || fd >= TLS_DESCRIPTORS_MAX) return !connection;
    pthread_mutex_lock(&lock);
    slot *page = pages[fd / PAGE_SLOTS];
    if (!page) {
        page = calloc(PAGE_SLOTS, sizeof *page);
        atomic_store_explicit(&pages[fd / PAGE_SLOTS], page, memory_order_release);
    }
    if (page) set_locked(&page[fd % PAGE_SLOTS], connection);
    pthread_mutex_unlock(&lock);
    return page != NULL;
}

struct tls_connection *tls_table_find(int fd) {
    slot *at = place(fd);
    if (!at || !*at) return NULL;
    int before = errno;
    pthread_mutex_lock(&lock);
    struct tls_connection *found = *at;
    if (found) found->references++;
    pthread_mutex_unlock(&lock);
    if (!found) return NULL;
    if (is_other(fd, found)) {
        /* The number has been closed and used again. */
        tls_table_closed(fd, found);
        tls_table_release(found);
        found = NULL;
    }
    errno = before;
    return found;
}

bool tls_table_copy(int from, int to) {
    if (from == to || (!tls_table_has(from) && !tls_table_has(to)) || process != getpid()) return true;
    struct tls_connection *found = tls_table_find(from);
    bool done = tls_table_put(to, found);
    if (found) tls_table_release(found);
    return done;
}

void tls_table_closed(int fd, const struct tls_connection *was) {
    slot *at = place(fd);
    if (!at || !was || process != getpid()) return;
    pthread_mutex_lock(&lock);
    if (*at == was) set_locked(at, NULL);
    pthread_mutex_unlock(&lock);
}

void tls_table_closed_range(unsigned first, unsigned last) {
    if (process != getpid()) return;
    pthread_mutex_lock(&lock);
    for (unsigned fd = first; fd <= last && fd < TLS_DESCRIPTORS_MAX; fd++) {
        slot *page = pages[fd / PAGE_SLOTS];
        if (!page) {
            fd |= PAGE_SLOTS - 1;
        } else if (page[fd % PAGE_SLOTS]) {
            set_locked(&page[fd % PAGE_SLOTS], NULL);
        }
    }
    pthread_mutex_unlock(&lock);
}
