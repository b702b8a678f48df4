// A descriptor has a place in a table of pages, which are made where they are needed and stay.
// Descriptors without a connection cost two loads. A connection is found by the number of a
// descriptor and then compared with the socket's cookie, so a number that was closed where this
// library does not see it (fclose, another program's code) and is used for something else is not
// taken for the connection.
//
// After a fork both processes have the socket. Only the one that made the connection can count its
// records, so the other one has no keys of it and its calls fail. A child of _Fork, or of clone
// without CLONE_VM, has a copy of this memory without the handlers of fork: it marks copies in its
// own table, but locks, makes and frees nothing, as another thread of its parent may have held a
// lock. A child of vfork has its parent's memory, so what it closes stays in the table, its calls
// count for both, and it makes no copies.
#define _GNU_SOURCE
#include "preload/transfer/tls_table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PAGE_SLOTS = 1024 };

typedef _Atomic(struct tls_connection*) slot;

static _Atomic(slot*) pages[TLS_DESCRIPTORS_MAX / PAGE_SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;
// Whose table this is.
static pid_t process;
// How many forks this process is from the first one.
static unsigned generation;
// In a page that a child finds empty which does not share this memory.
static volatile bool without_page = true, *unforked = &without_page;
// Threads have tables of descriptors of their own: what one closes may be open in another.
static atomic_bool keeps_marks;
// Descriptors that have been copied, or are copies, at any time; and whether one of them was too
// high for the table.
static _Atomic uint64_t copied[TLS_DESCRIPTORS_MAX / 64];
static atomic_bool copied_beyond;
// Calls that this thread is in. A handler of a signal that interrupts one must not wait for its
// locks.
static __thread unsigned inside;
// What a handler finds then.
static struct tls_connection nested;

void tls_table_enter(void) { inside++; }

void tls_table_leave(void) { inside--; }

static void take_lock(void) {
    inside++;
    if (*unforked) pthread_mutex_lock(&lock);
}

static void give_lock(void) {
    if (*unforked) pthread_mutex_unlock(&lock);
    inside--;
}

// All connections that are marked, some more than once.
static void each_connection(void (*work)(struct tls_connection*)) {
    for (size_t page = 0; page < TLS_DESCRIPTORS_MAX / PAGE_SLOTS; page++)
        for (size_t at = 0; pages[page] && at < PAGE_SLOTS; at++)
            if (pages[page][at]) work(pages[page][at]);
}

static void lock_for_fork(struct tls_connection* connection) {
    if (!connection->is_locked_for_fork)
        connection->is_locked_for_fork = pthread_mutex_trylock(&connection->lock) == 0;
}

static void unlock_after_fork(struct tls_connection* connection) {
    if (connection->is_locked_for_fork) pthread_mutex_unlock(&connection->lock);
    connection->is_locked_for_fork = false;
}

// A connection that was not locked was being changed by a thread that is not here: it is left as it
// is.
static void forget_in_child(struct tls_connection* connection) {
    if (connection->is_locked_for_fork)
        tls_stream_clear(&connection->stream);
    else
        connection->is_lost = true;
    unlock_after_fork(connection);
}

static void before_fork(void) {
    take_lock();
    if (*unforked) each_connection(lock_for_fork);
}

static void after_fork(void) {
    if (*unforked) each_connection(unlock_after_fork);
    give_lock();
}

static void after_fork_in_child(void) {
    static const pthread_mutex_t unlocked = PTHREAD_MUTEX_INITIALIZER;
    process = getpid();
    generation++;
    each_connection(forget_in_child);
    lock = unlocked;
    *unforked = true;
    inside--;
}

static void prepare(void) {
    void* page = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED && madvise(page, 1, MADV_WIPEONFORK) == 0) {
        *(bool*)page = true;
        unforked = page;
    }
    process = getpid();
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

static slot* place(int fd) {
    if (fd < 0 || fd >= TLS_DESCRIPTORS_MAX) return NULL;
    slot* page = atomic_load_explicit(&pages[fd / PAGE_SLOTS], memory_order_acquire);
    return page ? &page[fd % PAGE_SLOTS] : NULL;
}

bool tls_table_has(int fd) {
    slot* found = place(fd);
    return found && atomic_load_explicit(found, memory_order_acquire);
}

static bool cookie_of(int fd, uint64_t* cookie) {
    socklen_t len = sizeof *cookie;
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, cookie, &len) == 0 && len == sizeof *cookie;
}

// Whether a descriptor is another file than the connection's socket. If the host does not say, it
// is the socket: plain bytes must not go there.
static bool is_other(int fd, const struct tls_connection* connection) {
    uint64_t cookie;
    if (cookie_of(fd, &cookie)) return cookie != connection->cookie;
    return errno == EBADF || errno == ENOTSOCK;
}

struct tls_connection* tls_connection_new(int fd) {
    pthread_once(&prepared, prepare);
    if (inside || process != getpid()) return NULL;
    struct tls_connection* made = calloc(1, sizeof *made);
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

bool tls_connection_is_own(const struct tls_connection* connection) {
    return connection->generation == generation && *unforked;
}

static void release_locked(struct tls_connection* connection) {
    if (--connection->references > 0 || connection->is_lost || !*unforked) return;
    tls_stream_clear(&connection->stream);
    free(connection);
}

void tls_table_release(struct tls_connection* connection) {
    if (connection == &nested) return;
    take_lock();
    release_locked(connection);
    give_lock();
}

static void set_locked(slot* at, struct tls_connection* connection) {
    struct tls_connection* before = *at;
    if (connection)
        connection->references++;
    else if (keeps_marks)
        return;
    *at = connection;
    if (before) release_locked(before);
}

// The place of a descriptor, whose page is made if there is none.
static slot* new_place(int fd) {
    if (fd < 0 || fd >= TLS_DESCRIPTORS_MAX) return NULL;
    slot* page = pages[fd / PAGE_SLOTS];
    if (!page) {
        // Not with malloc, whose lock another thread may have held when this process was made.
        void* made = mmap(NULL, PAGE_SLOTS * sizeof *page, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (made == MAP_FAILED) return NULL;
        page = made;
        atomic_store_explicit(&pages[fd / PAGE_SLOTS], page, memory_order_release);
    }
    return &page[fd % PAGE_SLOTS];
}

bool tls_table_put(int fd, struct tls_connection* connection) {
    if (!connection && !tls_table_has(fd)) return true;
    if (inside) return false;
    take_lock();
    slot* at = new_place(fd);
    if (at) set_locked(at, connection);
    give_lock();
    return at != NULL;
}

struct tls_connection* tls_table_find(int fd) {
    slot* at = place(fd);
    if (!at || !*at) return NULL;
    if (inside) return &nested;
    int before = errno;
    take_lock();
    struct tls_connection* found = *at;
    if (found) found->references++;
    give_lock();
    if (!found) return NULL;
    if (is_other(fd, found)) {
        // The number has been closed and used again.
        tls_table_closed(fd, found);
        tls_table_release(found);
        found = NULL;
    }
    errno = before;
    return found;
}

bool tls_table_is_nested(const struct tls_connection* connection) { return connection == &nested; }

bool tls_table_may_copy(int from) {
    return !tls_table_has(from) || process == getpid() || !*unforked;
}

static void note_copy(int fd) {
    if (fd >= TLS_DESCRIPTORS_MAX)
        copied_beyond = true;
    else if (fd >= 0)
        atomic_fetch_or(&copied[fd / 64], (uint64_t)1 << fd % 64);
}

bool tls_table_copy(int from, int to) {
    if (from == to) return true;
    note_copy(from);
    note_copy(to);
    if (!tls_table_has(from) && !tls_table_has(to)) return true;
    // A child of vfork has a table of descriptors of its own.
    if (process != getpid() && *unforked) return true;
    struct tls_connection* found = tls_table_find(from);
    bool done = found ? tls_table_put(to, found) : tls_table_put(to, NULL) || inside;
    if (found) tls_table_release(found);
    return done;
}

bool tls_table_mark_copies(int fd, struct tls_connection* connection) {
    if (copied_beyond) return false;
    if (!(copied[fd / 64] >> fd % 64 & 1)) return true;
    bool done = true;
    for (int at = 0; at < TLS_DESCRIPTORS_MAX; at += 64)
        for (uint64_t left = copied[at / 64]; left; left &= left - 1) {
            int other = at + __builtin_ctzll(left);
            uint64_t cookie;
            if (other != fd && cookie_of(other, &cookie) && cookie == connection->cookie)
                done &= tls_table_put(other, connection);
        }
    return done;
}

void tls_table_closed(int fd, const struct tls_connection* was) {
    slot* at = place(fd);
    if (!at || !was || inside || process != getpid()) return;
    take_lock();
    if (*at == was) set_locked(at, NULL);
    give_lock();
}

void tls_table_closed_range(unsigned first, unsigned last) {
    if (inside || process != getpid()) return;
    take_lock();
    for (unsigned fd = first; fd <= last && fd < TLS_DESCRIPTORS_MAX; fd++) {
        slot* page = pages[fd / PAGE_SLOTS];
        if (!page) {
            fd |= PAGE_SLOTS - 1;
        } else if (page[fd % PAGE_SLOTS]) {
            set_locked(&page[fd % PAGE_SLOTS], NULL);
        }
    }
    give_lock();
}

void tls_table_keep_marks(void) { keeps_marks = true; }
