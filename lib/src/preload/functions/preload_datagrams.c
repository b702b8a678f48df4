// Datagrams of a proxy with `proxy_protocol`: the header is taken off, and the client's address
// shown. A datagram to a client goes to the address from which the proxy last sent one of that
// client. A datagram without a header does not come from the proxy, and is dropped: by the filter
// of the socket (preload.c), or here if the program has another one.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <sys/uio.h>

#include "preload/functions/preload.h"

// Clients whose way back is known. Of more, those that sent nothing for longest are forgotten.
enum { CLIENTS_MAX = 16384, NEAR = 4, CONTROL_BYTES_MAX = 1024 };

struct client {
    struct place client;
    struct sockaddr_storage proxy;
    socklen_t proxy_length;
    unsigned long number;
};

typedef ssize_t receive_function(int, struct msghdr*, int);
typedef ssize_t send_function(int, const struct msghdr*, int);

static pthread_once_t found = PTHREAD_ONCE_INIT;
static receive_function* next_recvmsg;
static send_function* next_sendmsg;
static struct client clients[CLIENTS_MAX];
static unsigned long received;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

static void unlock_in_child(void) { pthread_mutex_init(&guard, NULL); }

static void find(void) {
    next_recvmsg = (receive_function*)dlsym(RTLD_NEXT, "recvmsg");
    next_sendmsg = (send_function*)dlsym(RTLD_NEXT, "sendmsg");
    pthread_atfork(NULL, NULL, unlock_in_child);
}

static struct client* near_of(const struct place* place) {
    uint64_t halves[2], hash;
    memcpy(halves, &place->host, sizeof(halves));
    hash = (halves[0] ^ halves[1] * 0x9e3779b97f4a7c15u ^ place->port) * 0x9e3779b97f4a7c15u;
    return &clients[(hash >> 40) % (CLIENTS_MAX / NEAR) * NEAR];
}

static bool is_client(const struct client* entry, const struct place* place) {
    return entry->number != 0 && entry->client.port == place->port &&
           IN6_ARE_ADDR_EQUAL(&entry->client.host, &place->host);
}

static void remember(const struct place* place, const struct sockaddr_storage* proxy,
                     socklen_t length) {
    pthread_mutex_lock(&guard);
    struct client *near = near_of(place), *entry = near;
    for (size_t at = 0; at < NEAR; at++) {
        if (near[at].number < entry->number) entry = &near[at];
        if (is_client(&near[at], place)) {
            entry = &near[at];
            break;
        }
    }
    entry->client = *place;
    entry->proxy = *proxy;
    entry->proxy_length = length;
    entry->number = ++received;
    pthread_mutex_unlock(&guard);
}

// Where the proxy awaits what is sent to a client.
static bool way_back(const struct place* place, struct sockaddr_storage* proxy, socklen_t* length) {
    bool is_known = false;
    pthread_mutex_lock(&guard);
    struct client* near = near_of(place);
    for (size_t at = 0; at < NEAR && !is_known; at++) {
        is_known = is_client(&near[at], place);
        if (is_known) *proxy = near[at].proxy, *length = near[at].proxy_length;
    }
    pthread_mutex_unlock(&guard);
    return is_known;
}

// The address to which the client sent, in place of that at which the proxy asks.
static void show_destination(struct msghdr* message, const struct place* server) {
    if (is_any(&server->host)) return;
    for (struct cmsghdr* c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO &&
            IN6_IS_ADDR_V4MAPPED(&server->host)) {
            struct in_pktinfo info;
            memcpy(&info, CMSG_DATA(c), sizeof(info));
            memcpy(&info.ipi_addr, server->host.s6_addr + 12, 4);
            info.ipi_spec_dst = info.ipi_addr;
            memcpy(CMSG_DATA(c), &info, sizeof(info));
        } else if (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_PKTINFO) {
            struct in6_pktinfo info;
            memcpy(&info, CMSG_DATA(c), sizeof(info));
            info.ipi6_addr = server->host;
            memcpy(CMSG_DATA(c), &info, sizeof(info));
        }
    }
}

// Puts bytes before those in a program's buffers, whose last ones are lost if there is no room for
// all. `carry` has at most HEADER_BYTES_MAX bytes and is changed.
static void put_before(const struct msghdr* message, unsigned char* carry, size_t carried,
                       size_t length) {
    for (size_t at = 0; at < message->msg_iovlen && carried > 0; at++) {
        unsigned char *bytes = message->msg_iov[at].iov_base, pushed[HEADER_BYTES_MAX];
        size_t room = message->msg_iov[at].iov_len, here = length < room ? length : room;
        size_t out = carried + here > room ? carried + here - room : 0;
        if (room == 0) continue;
        length -= here;
        if (out <= here) {
            memcpy(pushed, bytes + (here - out), out);
            memmove(bytes + carried, bytes, here - out);
            memcpy(bytes, carry, carried);
        } else {
            memcpy(pushed, carry + room, carried - room);
            memcpy(pushed + (carried - room), bytes, here);
            memcpy(bytes, carry, room);
        }
        memcpy(carry, pushed, out);
        carried = out;
    }
}

static size_t room_of(const struct msghdr* message) {
    size_t room = 0;
    for (size_t at = 0; at < message->msg_iovlen; at++) room += message->msg_iov[at].iov_len;
    return room;
}

// A header of IPv4 is shorter than its place: the first bytes behind it come into that place, and
// are put before the others.
static ssize_t receive(int fd, struct msghdr* message, int flags, int family) {
    unsigned char header[HEADER_BYTES_MAX] = {0};
    struct iovec parts[IOV_MAX];
    size_t room = room_of(message);
    if (message->msg_iovlen >= IOV_MAX) {
        errno = EMSGSIZE;
        return -1;
    }
    parts[0] = (struct iovec){header, sizeof(header)};
    memcpy(parts + 1, message->msg_iov, message->msg_iovlen * sizeof(*parts));
    for (;;) {
        struct sockaddr_storage proxy;
        struct msghdr whole = *message;
        struct ends ends;
        whole.msg_name = &proxy, whole.msg_namelen = sizeof(proxy);
        whole.msg_iov = parts, whole.msg_iovlen = message->msg_iovlen + 1;
        ssize_t got = next_recvmsg(fd, &whole, flags);
        if (got < 0) return got;
        size_t length = (size_t)got,
               head = length < HEADER_BYTES_V4 ? 0 : parse_header(header, SOCK_DGRAM, &ends);
        if (head == 0 || length < head) {
            struct msghdr nothing = {0};
            if (flags & MSG_PEEK) next_recvmsg(fd, &nothing, MSG_DONTWAIT);
            continue;
        }
        remember(&ends.client, &proxy, whole.msg_namelen);
        if (message->msg_name)
            show_address(&ends.client, family, message->msg_name, &message->msg_namelen);
        message->msg_flags = whole.msg_flags, message->msg_controllen = whole.msg_controllen;
        show_destination(message, &ends.server);
        size_t payload = length - head, first = sizeof(header) - head;
        if (first > payload) first = payload;
        // With MSG_TRUNC the length is that of the datagram, of which the buffers may have less.
        size_t behind = payload - first < room ? payload - first : room;
        put_before(message, header + head, first, behind);
        if (payload <= room) return (ssize_t)payload;
        message->msg_flags |= MSG_TRUNC;
        return (ssize_t)(flags & MSG_TRUNC ? payload : room);
    }
}

PUBLIC ssize_t recvmsg(int fd, struct msghdr* message, int flags) {
    int family;
    struct rule* rule = has_headers() ? rule_of(fd, &family) : NULL;
    pthread_once(&found, find);
    if (!next_recvmsg) {
        errno = ENOSYS;
        return -1;
    }
    if (!rule || !rule->has_header || rule->type != SOCK_DGRAM || flags & MSG_ERRQUEUE)
        return next_recvmsg(fd, message, flags);
    return receive(fd, message, flags, family);
}

PUBLIC ssize_t recvfrom(int fd, void* restrict bytes, size_t count, int flags,
                        struct sockaddr* restrict address, socklen_t* restrict length) {
    struct iovec part = {bytes, count};
    struct msghdr message = {
        .msg_name = length ? address : NULL, .msg_iov = &part, .msg_iovlen = 1};
    if (message.msg_name) message.msg_namelen = *length;
    ssize_t got = recvmsg(fd, &message, flags);
    if (got >= 0 && address && length) *length = message.msg_namelen;
    return got;
}

PUBLIC ssize_t recv(int fd, void* bytes, size_t count, int flags) {
    return recvfrom(fd, bytes, count, flags, NULL, NULL);
}

// The same for programs that were compiled with checks of lengths.
ssize_t __recvfrom_chk(int fd, void* bytes, size_t count, size_t room, int flags,
                       struct sockaddr* address, socklen_t* length);
PUBLIC ssize_t __recvfrom_chk(int fd, void* bytes, size_t count, size_t room, int flags,
                              struct sockaddr* address, socklen_t* length) {
    return recvfrom(fd, bytes, count < room ? count : room, flags, address, length);
}

ssize_t __recv_chk(int fd, void* bytes, size_t count, size_t room, int flags);
PUBLIC ssize_t __recv_chk(int fd, void* bytes, size_t count, size_t room, int flags) {
    return recv(fd, bytes, count < room ? count : room, flags);
}

PUBLIC int recvmmsg(int fd, struct mmsghdr* messages, unsigned count, int flags,
                    struct timespec* patience) {
    unsigned taken = 0;
    (void)patience;
    while (taken < count) {
        // Only the first one is waited for, unless the program waits for all.
        int wait = taken > 0 && flags & MSG_WAITFORONE ? MSG_DONTWAIT : 0;
        ssize_t length = recvmsg(fd, &messages[taken].msg_hdr, (flags & ~MSG_WAITFORONE) | wait);
        if (length < 0) break;
        messages[taken++].msg_len = (unsigned)length;
    }
    return taken > 0 || count == 0 ? (int)taken : -1;
}

// Without the address from which a datagram is to be sent: the proxy sends from that to which the
// client sent.
static bool without_source(const struct msghdr* message, char* room, struct msghdr* copy) {
    size_t used = 0;
    for (struct cmsghdr* c = CMSG_FIRSTHDR(message); c;
         c = CMSG_NXTHDR((struct msghdr*)message, c)) {
        size_t space = CMSG_SPACE(c->cmsg_len - CMSG_LEN(0));
        if (c->cmsg_len < CMSG_LEN(0)) return false;
        if ((c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO) ||
            (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_PKTINFO))
            continue;
        if (space > CONTROL_BYTES_MAX - used) return false;
        memset(room + used, 0, space);
        memcpy(room + used, c, c->cmsg_len);
        used += space;
    }
    copy->msg_control = used ? room : NULL, copy->msg_controllen = used;
    return true;
}

PUBLIC ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
    _Alignas(struct cmsghdr) char room[CONTROL_BYTES_MAX];
    struct sockaddr_storage proxy;
    struct msghdr copy;
    struct place client;
    int family;
    struct rule* rule = has_headers() ? rule_of(fd, &family) : NULL;
    pthread_once(&found, find);
    if (!next_sendmsg) {
        errno = ENOSYS;
        return -1;
    }
    if (!rule || !rule->has_header || rule->type != SOCK_DGRAM || !message->msg_name)
        return next_sendmsg(fd, message, flags);
    copy = *message;
    if (!place_of(message->msg_name, message->msg_namelen, &client) ||
        !way_back(&client, &proxy, &copy.msg_namelen))
        return next_sendmsg(fd, message, flags);
    copy.msg_name = &proxy;
    if (message->msg_control && !without_source(message, room, &copy)) {
        errno = EINVAL;
        return -1;
    }
    return next_sendmsg(fd, &copy, flags);
}

PUBLIC ssize_t sendto(int fd, const void* bytes, size_t count, int flags,
                      const struct sockaddr* address, socklen_t length) {
    struct iovec part = {(void*)bytes, count};
    struct msghdr message = {.msg_name = (void*)address,
                             .msg_namelen = address ? length : 0,
                             .msg_iov = &part,
                             .msg_iovlen = 1};
    return sendmsg(fd, &message, flags);
}

PUBLIC int sendmmsg(int fd, struct mmsghdr* messages, unsigned count, int flags) {
    unsigned sent = 0;
    while (sent < count) {
        ssize_t length = sendmsg(fd, &messages[sent].msg_hdr, flags);
        if (length < 0) break;
        messages[sent++].msg_len = (unsigned)length;
    }
    return sent > 0 || count == 0 ? (int)sent : -1;
}
