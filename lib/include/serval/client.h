// The client library of Serval.
//
// Plain UDP and TCP sockets are enough to ask a service of Serval. This library is for programs for
// which one system call per message is too slow. It has two kinds of clients, both for C11 and C++:
//
//   burst   UDP: many equal datagrams leave with one system call (UDP_SEGMENT where the host
//           kernel offers it, else sendmmsg) and many replies arrive with one (UDP_GRO). For
//           `udp://` ports, local and remote.
//   shm     Shared memory: requests and replies pass through rings between this process and the
//           engine, without system calls while both are busy. For `shm://` ports of an engine
//           on this machine, run by the same user.
//
// Results. A function returns SERVAL_OK (0), one of two results that mean "try again later"
// (SERVAL_EMPTY, SERVAL_FULL), or an error. The library prints nothing and does not end the
// process. serval_strerror() describes a result; after a failure serval_detail() has one sentence
// with the cause and the remedy.
//
// Threads. Two threads must not call functions on the same client at the same time. Different
// clients are independent.
//
// Time. Deadlines are values of serval_now_ns() in nanoseconds; 0 means "do not wait",
// SERVAL_FOREVER "without limit".
//
// Trust. The engine is not trusted: its data in shared memory is copied, the copy is checked, then
// used. If an engine crashes or writes invalid data, its clients lose the connection, but their
// process is not affected.
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

// The result of a call. The numbers do not change between releases.
enum serval_result {
    SERVAL_OK = 0,
    // Nothing has arrived (in time).
    SERVAL_EMPTY = 1,
    // No room at present: receive first, then try again.
    SERVAL_FULL = 2,
    // An argument is outside its range.
    SERVAL_ERROR_ARGUMENT = 16,
    // No server listens at the address.
    SERVAL_ERROR_CONNECT = 17,
    // This user may not connect there.
    SERVAL_ERROR_PERMISSION = 18,
    // The engine refused this client: serval_detail() has the reason.
    SERVAL_ERROR_REFUSED = 19,
    // The server at the address is not an engine, or uses another version of the protocol.
    SERVAL_ERROR_PROTOCOL = 20,
    // The engine did not answer the handshake in time.
    SERVAL_ERROR_SILENT = 21,
    // The shared memory that the engine passed cannot be used.
    SERVAL_ERROR_REGION = 22,
    // The message is longer than the service or the transport accepts.
    SERVAL_ERROR_TOO_LONG = 23,
    // The reply does not fit the buffer; it remains in the ring.
    SERVAL_ERROR_BUFFER = 24,
    // The engine ended or closed the connection: serval_detail() has the reason if it gave one.
    SERVAL_ERROR_CLOSED = 25,
    // The rings hold invalid words: the client is unusable, connect again.
    SERVAL_ERROR_CORRUPT = 26,
    // A system call failed: serval_detail() says which and why.
    SERVAL_ERROR_SYSTEM = 27
};

// No deadline.
#define SERVAL_FOREVER UINT64_MAX

// The description of a result: constant English text, also for unknown numbers.
SERVAL_API const char* serval_strerror(int result);

// The last failure on this thread, as a sentence; "" before the first. Valid until the next failure
// on this thread. Send, receive and wait set it only for SERVAL_ERROR_SYSTEM: the other results
// need no further text.
SERVAL_API const char* serval_detail(void);

// Nanoseconds of the monotonic clock (CLOCK_MONOTONIC).
SERVAL_API uint64_t serval_now_ns(void);

// ---- burst: UDP

// A UDP socket connected to one port of a service.
typedef struct serval_burst serval_burst;

// How datagrams are sent.
enum serval_burst_path {
    // One buffer for up to 64 datagrams, split by the host kernel or the network card (UDP_SEGMENT,
    // Linux 4.18).
    SERVAL_BURST_SEGMENT = 1,
    // One system call, but one buffer for each datagram (sendmmsg).
    SERVAL_BURST_SENDMMSG = 2
};

// Options of serval_burst_open(); all zero is the default.
typedef struct serval_burst_options {
    // Not 0: do not use UDP_SEGMENT and UDP_GRO, even where they work.
    uint32_t no_offload;
    // Requested bytes of each socket buffer; the limit of the host kernel is net.core.[rw]mem_max.
    // 0: 4 MiB.
    uint32_t socket_buffer_bytes;
} serval_burst_options;

// One received datagram.
typedef struct serval_datagram {
    // Its bytes, in memory of the library.
    const uint8_t* bytes;
    // The number of bytes.
    size_t len;
} serval_datagram;

// Opens a client of the port at `address`: "udp://HOST:PORT" or "HOST:PORT", HOST a number
// ("127.0.0.1", "[::1]") or a name. `options` may be NULL. On success the caller must close *burst
// with serval_burst_close(); on failure it is NULL. Nothing is sent: if no server listens there, a
// later call returns SERVAL_ERROR_CLOSED. Errors: ARGUMENT, CONNECT (no such host), SYSTEM.
SERVAL_API int serval_burst_open(const char* address, const serval_burst_options* options,
                                 serval_burst** burst);

// Sends `count` datagrams of `bytes_each` bytes, stored contiguously at `datagrams`, with as few
// system calls as possible (one for 1024 short ones). bytes_each is in [1, 65507]. *sent (may be
// NULL) is the number that the host kernel accepted, in order. Does not wait. SERVAL_FULL: the
// socket's buffer is full and *sent is less than count. Errors: ARGUMENT, TOO_LONG, CLOSED, SYSTEM.
SERVAL_API int serval_burst_send(serval_burst* burst, const void* datagrams, size_t bytes_each,
                                 size_t count, size_t* sent);

// Receives up to `capacity` (at least 1) datagrams from the service: *count is the number of
// entries filled in. Their bytes are valid until the next call on this client. Waits until
// `deadline_ns` for the first datagram, and not for others. The network can lose datagrams, and the
// host kernel drops those that exceed the socket's buffer: a program that waits for all replies
// must limit the requests in flight, and stop waiting at a deadline. SERVAL_EMPTY: none in time.
// Errors: ARGUMENT, CLOSED (an ICMP message reported that no server listens), SYSTEM.
SERVAL_API int serval_burst_recv(serval_burst* burst, serval_datagram* datagrams, size_t capacity,
                                 uint64_t deadline_ns, size_t* count);

// How datagrams are sent at present. The library detects at the first send whether the host kernel
// and the network card support UDP_SEGMENT, so call this after it.
SERVAL_API enum serval_burst_path serval_burst_path(const serval_burst* burst);

// The socket, for poll or epoll. It belongs to the client. The library may hold datagrams that it
// has received but not yet returned, which do not make the socket readable: wait only after
// SERVAL_EMPTY.
SERVAL_API int serval_burst_fd(const serval_burst* burst);

// Closes and frees; NULL is allowed.
SERVAL_API void serval_burst_close(serval_burst* burst);

// ---- shm: shared memory

// A connection to a `shm://` port.
typedef struct serval_shm serval_shm;

// Options of serval_shm_connect(); all zero is the default.
typedef struct serval_shm_options {
    // Slots of each ring, and so the largest number of requests in flight: in [1, 16384], rounded
    // up to a power of two. The engine gives fewer if messages are long. 0: the engine's default,
    // 1024.
    uint32_t depth;
    // Time limit for the handshake, in milliseconds. 0: 5000.
    uint32_t timeout_ms;
} serval_shm_options;

// The values on which client and engine agreed.
typedef struct serval_shm_terms {
    // Largest number of requests in flight.
    uint32_t depth;
    // Longest request in bytes.
    uint32_t request_bytes_max;
    // Longest reply in bytes.
    uint32_t reply_bytes_max;
    // Not 0: every request gets an outcome. 0: the service never answers, and nothing is ever
    // received.
    uint32_t answers;
} serval_shm_terms;

// The outcome of a request.
typedef struct serval_reply {
    // The tag it was sent with.
    uint64_t tag;
    // Bytes of the reply; 0 if it was lost.
    uint32_t len;
    // Not 0: there is no reply, and `reason` has the cause.
    uint16_t lost;
    // Code of the drop reason (see serval_drop_reason); 0 when not lost.
    uint16_t reason;
} serval_reply;

// Connects to the engine that listens at `path`, the absolute path of a `shm://` port. `options`
// may be NULL. On success the caller must close *client with serval_shm_close(); on failure it is
// NULL. Errors: ARGUMENT, CONNECT, PERMISSION, REFUSED, PROTOCOL, SILENT, REGION, CLOSED, SYSTEM.
SERVAL_API int serval_shm_connect(const char* path, const serval_shm_options* options,
                                  serval_shm** client);

// The values on which client and engine agreed; constant until serval_shm_close().
SERVAL_API serval_shm_terms serval_shm_agreed(const serval_shm* client);

// Writes a request of `len` bytes into the ring; the engine sees it after serval_shm_flush(). `tag`
// is any number, and is returned with the outcome; outcomes arrive in any order. No system call, no
// waiting. SERVAL_FULL: `depth` requests are in flight, or the engine has not taken enough of them
// yet. Flush, receive, try again. Errors: TOO_LONG, CLOSED (detected by one of many calls after the
// engine ended), CORRUPT.
SERVAL_API int serval_shm_send(serval_shm* client, uint64_t tag, const void* request, size_t len);

// Publishes every request sent to the engine, and wakes the engine if it sleeps: one store and one
// fence, and a system call only to wake it.
SERVAL_API void serval_shm_flush(serval_shm* client);

// The next outcome, if there is one; the reply is copied to `buffer`, which has room for `capacity`
// bytes. No waiting. SERVAL_EMPTY: there is none. Errors: BUFFER (reply->len is its length; call
// again with a larger buffer), CLOSED (detected by one of many calls after the engine ended, and
// only after everything it wrote has been received), CORRUPT. Before CLOSED, each request that the
// engine has not taken is returned as lost with the reason `draining`; the engine has not counted
// it. If serval_shm_under_way() is not 0 then, it is the number of requests for which the engine
// ended without an outcome.
SERVAL_API int serval_shm_recv(serval_shm* client, void* buffer, size_t capacity,
                               serval_reply* reply);

// Flushes, then waits until there is an outcome to receive: it polls for some microseconds, then
// sleeps until the engine wakes it. SERVAL_EMPTY: none before the deadline. Errors: CLOSED (as soon
// as the engine ends), CORRUPT.
SERVAL_API int serval_shm_wait(serval_shm* client, uint64_t deadline_ns);

// Requests whose outcome has not been received, in [0, depth]. Always 0 for a service that does not
// answer.
SERVAL_API uint32_t serval_shm_under_way(const serval_shm* client);

// The name of a drop reason as in the metrics and in `serval drop-reasons`, "other" for a code that
// this library does not know: a newer engine may have more reasons. Codes never change their
// meaning.
SERVAL_API const char* serval_drop_reason(unsigned reason);

// Closes the connection and frees the client; replies to requests in flight are discarded. NULL is
// allowed.
SERVAL_API void serval_shm_close(serval_shm* client);

#ifdef __cplusplus
}
#endif

#endif
