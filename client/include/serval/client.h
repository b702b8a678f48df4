/* The client library of Serval.
 *
 * A service of Serval can be asked over plain UDP and TCP with nothing but sockets. This library is for programs on the path
 * of whom a system call for each message is too much. It has two ways, and both work from C11 and C++:
 *
 *   burst   UDP: many equal datagrams leave with one system call (UDP_SEGMENT where the host kernel offers it, else
 *           sendmmsg) and many replies arrive with one (UDP_GRO). For `udp://` ports, near and far.
 *   shm     Shared memory: requests and replies cross in a ring between this process and the engine, with no system call
 *           while both are busy. For `shm://` ports of an engine on this machine, run by the same user.
 *
 * Results. A function returns SERVAL_OK (0), one of the two that mean "not now" (SERVAL_EMPTY, SERVAL_FULL), or an error. Errors
 * are values: nothing is printed, nothing ends the process. serval_strerror() says what a value means; after a failure
 * serval_detail() says in one sentence what happened and what helps.
 *
 * Threads. A client belongs to one thread at a time: no two threads may be in calls on the same client at once. Different
 * clients have nothing in common.
 *
 * Time. Deadlines are instants of serval_now_ns() in nanoseconds; 0 means "do not wait", SERVAL_FOREVER "without limit".
 *
 * Trust. The engine is not believed: what it writes into shared memory is read once, checked, and the copy is used. An engine
 * that crashes or writes nonsense costs its clients the connection, never their process. */
#ifndef SERVAL_CLIENT_H
#define SERVAL_CLIENT_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define SERVAL_API __attribute__((visibility("default")))
#else
#define SERVAL_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What a call came to. The numbers do not change between releases. */
enum serval_result {
    SERVAL_OK = 0,
    /* Nothing has arrived (in time). */
    SERVAL_EMPTY = 1,
    /* No room for more now: receive first, then try again. */
    SERVAL_FULL = 2,
    /* An argument is outside its range. */
    SERVAL_ERROR_ARGUMENT = 16,
    /* Nobody listens at the address. */
    SERVAL_ERROR_CONNECT = 17,
    /* This user may not connect there. */
    SERVAL_ERROR_PERMISSION = 18,
    /* The engine gave a reason not to let this client in: serval_detail() has it. */
    SERVAL_ERROR_REFUSED = 19,
    /* Whoever listens there is no engine, or speaks another version. */
    SERVAL_ERROR_PROTOCOL = 20,
    /* The engine did not answer the handshake in time. */
    SERVAL_ERROR_SILENT = 21,
    /* The shared memory that the engine passed cannot be used. */
    SERVAL_ERROR_REGION = 22,
    /* The message is longer than the service, or the transport, takes. */
    SERVAL_ERROR_TOO_LONG = 23,
    /* The reply does not fit the buffer; it stays where it is. */
    SERVAL_ERROR_BUFFER = 24,
    /* The engine has ended or closed the connection: serval_detail() has the reason if it gave one. */
    SERVAL_ERROR_CLOSED = 25,
    /* The rings hold impossible words: the client cannot be used any more, connect again. */
    SERVAL_ERROR_CORRUPT = 26,
    /* The host kernel refused: serval_detail() says what and why. */
    SERVAL_ERROR_SYSTEM = 27
};

/* A deadline that never comes. */
#define SERVAL_FOREVER UINT64_MAX

/* What a result means: constant English text, also for numbers that are none. */
SERVAL_API const char* serval_strerror(int result);

/* What the last failure on this thread was, as a sentence; "" before the first. Valid until this thread's next failure. Send,
 * receive and wait set it only for SERVAL_ERROR_SYSTEM: the others say everything with their number. */
SERVAL_API const char* serval_detail(void);

/* Nanoseconds of a clock that never goes back (CLOCK_MONOTONIC). */
SERVAL_API uint64_t serval_now_ns(void);

/* ---- burst: UDP ---------------------------------------------------------------------------------------------------------- */

/* A UDP socket that is connected to one port of a service. */
typedef struct serval_burst serval_burst;

/* How datagrams leave. */
enum serval_burst_path {
    /* One buffer for up to 64 datagrams, cut by the host kernel or the network card (UDP_SEGMENT, Linux 4.18). */
    SERVAL_BURST_SEGMENT = 1,
    /* One system call, but a buffer each (sendmmsg). */
    SERVAL_BURST_SENDMMSG = 2
};

/* How to open; all zero is the default. */
typedef struct serval_burst_options {
    /* Not 0: do not use UDP_SEGMENT and UDP_GRO, even where they work. */
    uint32_t no_offload;
    /* Bytes of each socket buffer that are asked for; the host kernel's limit is net.core.[rw]mem_max. 0: 4 MiB. */
    uint32_t socket_buffer_bytes;
} serval_burst_options;

/* One received datagram. */
typedef struct serval_datagram {
    /* Its bytes, in memory of the client. */
    const uint8_t* bytes;
    /* How many. */
    size_t len;
} serval_datagram;

/* Opens a client of the port at `address`: "udp://HOST:PORT" or "HOST:PORT", HOST a number ("127.0.0.1", "[::1]") or a name.
 * `options` may be NULL. On success *burst is to be given to serval_burst_close(), else it is NULL. Nothing is sent: that nobody
 * listens there shows later, as SERVAL_ERROR_CLOSED.
 * Errors: ARGUMENT, CONNECT (no such host), SYSTEM. */
SERVAL_API int serval_burst_open(const char* address, const serval_burst_options* options, serval_burst** burst);

/* Sends `count` datagrams of `bytes_each` bytes, which lie one after the other from `datagrams` on, with as few system calls as
 * possible (one for 1024 short ones). bytes_each is in [1, 65507]. *sent (may be NULL) is how many the host kernel took, in
 * order. Does not wait.
 * SERVAL_FULL: the socket's buffer is full and *sent is less than count. Errors: ARGUMENT, TOO_LONG, CLOSED, SYSTEM. */
SERVAL_API int serval_burst_send(serval_burst* burst, const void* datagrams, size_t bytes_each, size_t count, size_t* sent);

/* Receives up to `capacity` (at least 1) datagrams from the service: *count is how many `datagrams` were filled in. Their bytes
 * are valid until the next call on this client. Waits until `deadline_ns` for the first, for no other. Datagrams can be lost on
 * the way, and the host kernel sheds those that find the socket's buffer full: whoever counts on all of them must bound
 * what is under way, and give up on time.
 * SERVAL_EMPTY: none in time. Errors: ARGUMENT, CLOSED (an ICMP message says that nobody listens), SYSTEM. */
SERVAL_API int serval_burst_recv(serval_burst* burst, serval_datagram* datagrams, size_t capacity, uint64_t deadline_ns,
                                 size_t* count);

/* The way that datagrams leave at present. A host kernel or network card that refuses UDP_SEGMENT is noticed at the first
 * send, so ask after it. */
SERVAL_API enum serval_burst_path serval_burst_path(const serval_burst* burst);

/* The socket, to wait for it with poll or epoll. It belongs to the client. A datagram that an earlier serval_burst_recv() took but
 * had no room for does not make it readable: wait only after SERVAL_EMPTY. */
SERVAL_API int serval_burst_fd(const serval_burst* burst);

/* Closes and frees; NULL is allowed. */
SERVAL_API void serval_burst_close(serval_burst* burst);

/* ---- shm: shared memory -------------------------------------------------------------------------------------------------- */

/* A connection to a `shm://` port. */
typedef struct serval_shm serval_shm;

/* How to connect; all zero is the default. */
typedef struct serval_shm_options {
    /* Slots of each ring, which is also the most requests under way: in [1, 16384], rounded up to a power of two. The engine
     * gives fewer where messages are long. 0: the engine's default, 1024. */
    uint32_t depth;
    /* How long the engine may take to let the client in, in milliseconds. 0: 5000. */
    uint32_t timeout_ms;
} serval_shm_options;

/* What the engine agreed to. */
typedef struct serval_shm_terms {
    /* Most requests under way. */
    uint32_t depth;
    /* Longest request in bytes. */
    uint32_t request_bytes_max;
    /* Longest reply in bytes. */
    uint32_t reply_bytes_max;
    /* Not 0: every request gets an outcome. 0: the service never answers, and nothing is ever received. */
    uint32_t answers;
} serval_shm_terms;

/* What became of a request. */
typedef struct serval_reply {
    /* The tag it was sent with. */
    uint64_t tag;
    /* Bytes of the reply; 0 when it was lost. */
    uint32_t len;
    /* Not 0: there is no reply, and `reason` says why. */
    uint16_t lost;
    /* Code of the drop reason (see serval_drop_reason); 0 when not lost. */
    uint16_t reason;
} serval_reply;

/* Connects to the engine that listens at `path`, the absolute path of a `shm://` port. `options` may be NULL. On success *client is
 * to be given to serval_shm_close(), else it is NULL.
 * Errors: ARGUMENT, CONNECT, PERMISSION, REFUSED, PROTOCOL, SILENT, REGION, CLOSED, SYSTEM. */
SERVAL_API int serval_shm_connect(const char* path, const serval_shm_options* options, serval_shm** client);

/* What the engine agreed to; constant for the life of the client. */
SERVAL_API serval_shm_terms serval_shm_agreed(const serval_shm* client);

/* Writes a request of `len` bytes into the ring; the engine sees it after serval_shm_flush(). `tag` is any number, and comes back with
 * the outcome; outcomes come in any order. No system call, no waiting.
 * SERVAL_FULL: `depth` requests are under way, or the engine has not taken enough of them yet. Flush, receive, try again.
 * Errors: TOO_LONG, CLOSED (told by some call of many after the engine's end), CORRUPT. */
SERVAL_API int serval_shm_send(serval_shm* client, uint64_t tag, const void* request, size_t len);

/* Shows the engine every request sent, and wakes it if it sleeps: one store and one fence, and a system call only for a sleeper. */
SERVAL_API void serval_shm_flush(serval_shm* client);

/* The next outcome, if there is one; a reply's bytes are copied to the front of `buffer`, which has room for `capacity`. No waiting.
 * SERVAL_EMPTY: there is none. Errors: BUFFER (reply->len says how long it is; call again with more room), CLOSED (told by some call
 * of many after the engine's end, once everything it wrote has been received), CORRUPT.
 * Before CLOSED, each request that the engine has not taken comes back as lost with the reason `draining`; the engine has not
 * counted it. If serval_shm_under_way() is not 0 then, the engine has ended without an outcome for as many. */
SERVAL_API int serval_shm_recv(serval_shm* client, void* buffer, size_t capacity, serval_reply* reply);

/* Flushes, then waits until there is an outcome to receive: for some microseconds by looking, then asleep until the engine rings.
 * SERVAL_EMPTY: none before the deadline. Errors: CLOSED (at once when the engine ends), CORRUPT. */
SERVAL_API int serval_shm_wait(serval_shm* client, uint64_t deadline_ns);

/* Requests whose outcome has not been received, in [0, depth]. Always 0 for a service that does not answer. */
SERVAL_API uint32_t serval_shm_under_way(const serval_shm* client);

/* The name of a drop reason as metrics and `serval drop-reasons` show it, "other" for a code that this library does not know:
 * an engine that is newer may have more reasons. Codes never change their meaning. */
SERVAL_API const char* serval_drop_reason(unsigned reason);

/* Ends the connection and frees; requests under way are answered to nobody. NULL is allowed. */
SERVAL_API void serval_shm_close(serval_shm* client);

#ifdef __cplusplus
}
#endif

#endif
