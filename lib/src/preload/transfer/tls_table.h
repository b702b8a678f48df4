// The TLS connections whose records this library makes, by descriptor.
#pragma once

#include "preload/transfer/tls_stream.h"

#include <pthread.h>
#include <stdatomic.h>

// Descriptors from here on are left to libcrypto.
#define TLS_DESCRIPTORS_MAX (1 << 20)

enum { TLS_HOLD_UNKNOWN, TLS_HOLD_MAY, TLS_HOLD_NEVER };

struct tls_connection {
    struct tls_stream stream;
    pthread_mutex_t lock;
    // The one process that can count its records, by its number of forks from the first one.
    unsigned generation;
    // The socket's identity: the number of a descriptor is used again.
    uint64_t cookie;
    // Whether short data may wait in the kernel for more (tls_hold.c).
    atomic_int hold;
    // Descriptors that are this connection, and calls that use it.
    unsigned references;
    // The forking thread has locked it; a thread that is not in this process has left it locked.
    bool is_locked_for_fork, is_lost;
};

// Whether a descriptor may be one of a TLS connection.
bool tls_table_has(int fd);
// The connection of a descriptor, to be released; NULL: it is none.
struct tls_connection* tls_table_find(int fd);
void tls_table_release(struct tls_connection* connection);
// Makes the connection, or none, that of a descriptor. False: there is no memory, or the number is
// too high.
bool tls_table_put(int fd, struct tls_connection* connection);
// Between these a handler of a signal finds connections that it cannot use.
void tls_table_enter(void);
void tls_table_leave(void);
// Whether what was found is such a one.
bool tls_table_is_nested(const struct tls_connection* connection);
// Whether a copy of a descriptor could be marked: not by a child of vfork.
bool tls_table_may_copy(int from);
// Marks the descriptors that became copies of a connection's socket before it was a connection.
// False: not all of them can be marked.
bool tls_table_mark_copies(int fd, struct tls_connection* connection);
// From here on no mark is removed because a descriptor is closed.
void tls_table_keep_marks(void);
// A descriptor has become a copy of another one. False: it cannot be marked, so it must not be
// used.
bool tls_table_copy(int from, int to);
// A descriptor has been closed; `was`, if any, is the connection that it was then.
void tls_table_closed(int fd, const struct tls_connection* was);
// Descriptors have been closed.
void tls_table_closed_range(unsigned first, unsigned last);
// A connection for the socket, of this process and without keys; NULL: errno.
struct tls_connection* tls_connection_new(int fd);
// Whether this process has made the connection.
bool tls_connection_is_own(const struct tls_connection* connection);
