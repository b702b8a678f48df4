// Bursts of UDP datagrams: as many as possible with one system call.
//
// Sending. A *GSO batch* is a sequence of datagrams of equal length in one buffer that the host
// kernel (or the network card) splits: UDP_SEGMENT, with at most 64 datagrams and 65507 bytes. One
// sendmmsg carries up to MESSAGES_MAX batches. If batches are refused (a route without checksum
// offload, a datagram that is longer than the route's packets), single datagrams are sent,
// MESSAGES_MAX with one system call.
//
// Receiving. One recvmmsg fills up to RECEIVED_MAX buffers, each with a datagram or, with UDP_GRO,
// with a batch of datagrams of equal length (the last may be shorter).
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "burst/result.h"

// C libraries older than the host kernel do not define these.
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

// Datagrams of a GSO batch: UDP_MAX_SEGMENTS of include/linux/udp.h up to Linux 6.8, where it
// became 128.
#define SEGMENTS_MAX 64
// Bytes of the longest UDP payload over IPv4, and of the longest GSO batch.
#define DATAGRAM_BYTES_MAX 65507
// Messages of one sendmmsg, and buffers of one recvmmsg.
#define MESSAGES_MAX 64
#define RECEIVED_MAX 32
#define BUFFER_BYTES 65536
#define SOCKET_BUFFER_BYTES (4 << 20)

// Room for a control message with one number.
struct control {
    _Alignas(struct cmsghdr) char bytes[CMSG_SPACE(sizeof(int))];
};

struct serval_burst {
    int socket;
    // The address as given, for error texts; truncated if too long.
    char address[280];
    enum serval_burst_path path;
    int gro;
    struct mmsghdr out[MESSAGES_MAX];
    struct iovec out_parts[MESSAGES_MAX];
    struct control segment;
    // Number of filled buffers, the one being returned, and how much of it has been returned.
    unsigned filled, current;
    size_t handed_out;
    struct mmsghdr in[RECEIVED_MAX];
    struct iovec in_parts[RECEIVED_MAX];
    struct control in_controls[RECEIVED_MAX];
    uint8_t* buffers;
};

// ---- opening

// Splits "[udp://]HOST:PORT"; false if the text has another form.
static int split_address(const char* address, char* host, size_t host_bytes, const char** port) {
    static const char scheme[] = "udp://";
    if (strncmp(address, scheme, sizeof scheme - 1) == 0) address += sizeof scheme - 1;
    const char* colon = strrchr(address, ':');
    if (!colon || colon == address || colon[1] == '\0') return 0;
    const char *first = address, *end = colon;
    if (*first == '[') {
        if (end[-1] != ']') return 0;
        first++, end--;
    }
    const size_t len = (size_t)(end - first);
    if (len == 0 || len >= host_bytes) return 0;
    memcpy(host, first, len);
    host[len] = '\0';
    *port = colon + 1;
    return 1;
}

// A socket connected to the first address that accepts it.
static int connected_socket(const char* address, int* made) {
    char host[256];
    const char* port;
    if (!split_address(address, host, sizeof host, &port))
        return serval_fail(SERVAL_ERROR_ARGUMENT, "\"%s\" is no address: write udp://HOST:PORT",
                           address);
    struct addrinfo hints = {0}, *found = NULL;
    hints.ai_socktype = SOCK_DGRAM;
    hints.ai_flags = AI_NUMERICSERV;
    const int error = getaddrinfo(host, port, &hints, &found);
    if (error != 0)
        return serval_fail(SERVAL_ERROR_CONNECT, "%s: %s", address, gai_strerror(error));
    int result = SERVAL_ERROR_CONNECT;
    for (const struct addrinfo* at = found; at && result != SERVAL_OK; at = at->ai_next) {
        const int s = socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (s >= 0 && connect(s, at->ai_addr, at->ai_addrlen) == 0) {
            *made = s;
            result = SERVAL_OK;
        } else {
            result =
                serval_fail(SERVAL_ERROR_SYSTEM, "connect to %s: %s", address, strerror(errno));
            if (s >= 0) close(s);
        }
    }
    freeaddrinfo(found);
    return result;
}

static void prepare(serval_burst* burst) {
    struct cmsghdr* segment = (struct cmsghdr*)burst->segment.bytes;
    segment->cmsg_level = SOL_UDP;
    segment->cmsg_type = UDP_SEGMENT;
    segment->cmsg_len = CMSG_LEN(sizeof(uint16_t));
    for (unsigned i = 0; i < MESSAGES_MAX; i++) {
        burst->out[i].msg_hdr.msg_iov = &burst->out_parts[i];
        burst->out[i].msg_hdr.msg_iovlen = 1;
    }
    for (unsigned i = 0; i < RECEIVED_MAX; i++) {
        burst->in_parts[i].iov_base = burst->buffers + (size_t)i * BUFFER_BYTES;
        burst->in_parts[i].iov_len = BUFFER_BYTES;
        burst->in[i].msg_hdr.msg_iov = &burst->in_parts[i];
        burst->in[i].msg_hdr.msg_iovlen = 1;
    }
}

int serval_burst_open(const char* address, const serval_burst_options* options,
                      serval_burst** burst) {
    if (!burst)
        return serval_fail(SERVAL_ERROR_ARGUMENT,
                           "there is nowhere to put the client: `burst` is NULL");
    *burst = NULL;
    if (!address) return serval_fail(SERVAL_ERROR_ARGUMENT, "the address is NULL");
    const serval_burst_options wishes = options ? *options : (serval_burst_options){0};
    serval_burst* made = calloc(1, sizeof *made);
    uint8_t* buffers = malloc((size_t)RECEIVED_MAX * BUFFER_BYTES);
    if (!made || !buffers) {
        free(made);
        free(buffers);
        return serval_fail(SERVAL_ERROR_SYSTEM, "no memory for a client");
    }
    made->buffers = buffers;
    snprintf(made->address, sizeof made->address, "%s", address);
    const int result = connected_socket(address, &made->socket);
    if (result != SERVAL_OK) {
        free(buffers);
        free(made);
        return result;
    }
    prepare(made);
    // The host kernel gives less if its limit is lower.
    const uint32_t wished =
        wishes.socket_buffer_bytes ? wishes.socket_buffer_bytes : SOCKET_BUFFER_BYTES;
    const int bytes = wished > (uint32_t)INT32_MAX ? INT32_MAX : (int)wished;
    setsockopt(made->socket, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
    setsockopt(made->socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    const int on = 1, off = 0;
    made->path = SERVAL_BURST_SENDMMSG;
    // Setting it to 0 has no effect, but fails if the host kernel does not support it.
    if (!wishes.no_offload && setsockopt(made->socket, SOL_UDP, UDP_SEGMENT, &off, sizeof off) == 0)
        made->path = SERVAL_BURST_SEGMENT;
    made->gro =
        !wishes.no_offload && setsockopt(made->socket, SOL_UDP, UDP_GRO, &on, sizeof on) == 0;
    *burst = made;
    return SERVAL_OK;
}

// An ICMP message reported that no server listens.
static int nobody_there(const serval_burst* burst) {
    return serval_fail(SERVAL_ERROR_CLOSED, "no server listens at %s", burst->address);
}

// ---- sending

// Points the first messages at `count` datagrams, in batches of up to `segments`; returns the
// number of messages.
static unsigned fill(serval_burst* burst, const uint8_t* at, size_t bytes_each, size_t count,
                     size_t segments) {
    unsigned messages = 0;
    while (count > 0 && messages < MESSAGES_MAX) {
        const size_t now = count < segments ? count : segments;
        struct msghdr* header = &burst->out[messages].msg_hdr;
        burst->out_parts[messages].iov_base = (void*)(uintptr_t)at;
        burst->out_parts[messages].iov_len = now * bytes_each;
        header->msg_control = now > 1 ? &burst->segment : NULL;
        header->msg_controllen = now > 1 ? CMSG_SPACE(sizeof(uint16_t)) : 0;
        at += now * bytes_each;
        count -= now;
        messages++;
    }
    return messages;
}

// One system call. Returns the number of datagrams sent, or a negative errno.
static long send_some(serval_burst* burst, const uint8_t* at, size_t bytes_each, size_t count,
                      size_t segments) {
    const unsigned messages = fill(burst, at, bytes_each, count, segments);
    int taken;
    do {
        taken = sendmmsg(burst->socket, burst->out, messages, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (taken < 0 && errno == EINTR);
    if (taken < 0) return -errno;
    size_t bytes = 0;
    for (int i = 0; i < taken; i++) bytes += burst->out_parts[i].iov_len;
    return (long)(bytes / bytes_each);
}

int serval_burst_send(serval_burst* burst, const void* datagrams, size_t bytes_each, size_t count,
                      size_t* sent) {
    size_t done = 0;
    int result = SERVAL_OK;
    if (bytes_each == 0) result = SERVAL_ERROR_ARGUMENT;
    if (bytes_each > DATAGRAM_BYTES_MAX) result = SERVAL_ERROR_TOO_LONG;
    size_t segments = 1;
    if (result == SERVAL_OK && burst->path == SERVAL_BURST_SEGMENT) {
        const uint16_t step = (uint16_t)bytes_each;
        memcpy(CMSG_DATA((struct cmsghdr*)burst->segment.bytes), &step, sizeof step);
        segments = DATAGRAM_BYTES_MAX / bytes_each < SEGMENTS_MAX ? DATAGRAM_BYTES_MAX / bytes_each
                                                                  : SEGMENTS_MAX;
    }
    while (result == SERVAL_OK && done < count) {
        const uint8_t* at = (const uint8_t*)datagrams + done * bytes_each;
        const long taken = send_some(burst, at, bytes_each, count - done, segments);
        if (taken > 0) {
            done += (size_t)taken;
        } else if (taken == -EAGAIN || taken == -ENOBUFS) {
            result = SERVAL_FULL;
        } else if (taken == -ECONNREFUSED) {
            result = nobody_there(burst);
        } else if (segments > 1 && (taken == -EINVAL || taken == -EMSGSIZE)) {
            // These datagrams do not fit the route's packets: they are sent one by one; others may
            // still be sent in batches.
            segments = 1;
        } else if (segments > 1 && (taken == -EIO || taken == -EOPNOTSUPP)) {
            // The route has no checksum offload: batches can never be sent there.
            segments = 1;
            burst->path = SERVAL_BURST_SENDMMSG;
        } else if (taken == -EMSGSIZE) {
            result = SERVAL_ERROR_TOO_LONG;
        } else {
            result = serval_fail(SERVAL_ERROR_SYSTEM, "send: %s", strerror((int)-taken));
        }
    }
    if (sent) *sent = done;
    return result;
}

// ---- receiving

// One system call: fills the buffers after all their datagrams have been returned.
static int receive_some(serval_burst* burst) {
    burst->filled = burst->current = 0;
    burst->handed_out = 0;
    for (unsigned i = 0; i < RECEIVED_MAX; i++) {
        burst->in[i].msg_hdr.msg_control = burst->gro ? &burst->in_controls[i] : NULL;
        burst->in[i].msg_hdr.msg_controllen = burst->gro ? sizeof burst->in_controls[i] : 0;
    }
    int count;
    do {
        count = recvmmsg(burst->socket, burst->in, RECEIVED_MAX, MSG_DONTWAIT, NULL);
    } while (count < 0 && errno == EINTR);
    if (count < 0) {
        if (errno == EAGAIN) return SERVAL_EMPTY;
        if (errno == ECONNREFUSED) return nobody_there(burst);
        return serval_fail(SERVAL_ERROR_SYSTEM, "recvmmsg: %s", strerror(errno));
    }
    burst->filled = (unsigned)count;
    return SERVAL_OK;
}

// Bytes of each datagram of the batch in buffer `i`; the whole buffer if it holds one datagram.
static size_t step_of(const serval_burst* burst, unsigned i) {
    struct msghdr header = burst->in[i].msg_hdr;
    for (struct cmsghdr* c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
        int step;
        if (c->cmsg_level != SOL_UDP || c->cmsg_type != UDP_GRO ||
            c->cmsg_len < CMSG_LEN(sizeof step))
            continue;
        memcpy(&step, CMSG_DATA(c), sizeof step);
        if (step > 0) return (size_t)step;
    }
    return burst->in[i].msg_len;
}

// Returns datagrams from the buffers.
static size_t hand_out(serval_burst* burst, serval_datagram* datagrams, size_t capacity) {
    size_t count = 0;
    while (count < capacity && burst->current < burst->filled) {
        const unsigned i = burst->current;
        const uint8_t* bytes = burst->buffers + (size_t)i * BUFFER_BYTES;
        const size_t len = burst->in[i].msg_len, step = step_of(burst, i);
        do {
            const size_t left = len - burst->handed_out;
            datagrams[count].bytes = bytes + burst->handed_out;
            datagrams[count].len = left < step ? left : step;
            burst->handed_out += datagrams[count].len;
            count++;
        } while (count < capacity && burst->handed_out < len);
        if (burst->handed_out == len) {
            burst->current++;
            burst->handed_out = 0;
        }
    }
    return count;
}

int serval_burst_recv(serval_burst* burst, serval_datagram* datagrams, size_t capacity,
                      uint64_t deadline_ns, size_t* count) {
    *count = 0;
    if (capacity == 0) return SERVAL_ERROR_ARGUMENT;
    while (burst->current == burst->filled) {
        const int result = receive_some(burst);
        if (result == SERVAL_OK) break;
        if (result != SERVAL_EMPTY) return result;
        const int ms = serval_poll_ms(deadline_ns);
        if (ms == 0) return SERVAL_EMPTY;
        struct pollfd file = {burst->socket, POLLIN, 0};
        if (poll(&file, 1, ms) < 0 && errno != EINTR)
            return serval_fail(SERVAL_ERROR_SYSTEM, "poll: %s", strerror(errno));
    }
    *count = hand_out(burst, datagrams, capacity);
    return SERVAL_OK;
}

enum serval_burst_path serval_burst_path(const serval_burst* burst) { return burst->path; }

int serval_burst_fd(const serval_burst* burst) { return burst->socket; }

void serval_burst_close(serval_burst* burst) {
    if (!burst) return;
    close(burst->socket);
    free(burst->buffers);
    free(burst);
}
