// UDP in batches: recvmmsg with GRO, sendmmsg with GSO.
//
// With GRO the host kernel returns equal-sized datagrams of one sender as one buffer; with GSO replies to one client
// leave as such a batch, which passes through the host kernel's stack once.
#ifndef SERVAL_BASELINES_UDP_H
#define SERVAL_BASELINES_UDP_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/socket.h>

#include <memory>

#include "contract.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

constexpr uint32_t DATAGRAM_BYTES_MAX = 65507;
constexpr uint32_t SEGMENTS_MAX = 64;  // UDP_MAX_SEGMENTS of every Linux that has GSO is at least this
constexpr int SOCKET_BUFFER_BYTES = 4 << 20;

inline sockaddr_in address_of(const std::string& name, const std::string& text) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    const size_t colon = text.rfind(':');
    const std::string host = text.substr(0, colon);
    if (colon == std::string::npos || inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1)
        misused(name + " is ADDRESS:PORT with an IPv4 address, not `" + text + "`");
    address.sin_port = htons(uint16_t(Flags::parse(name, text.substr(colon + 1), 0, 65535)));
    return address;
}

inline std::string url(const char* scheme, const sockaddr_in& address) {
    char host[INET_ADDRSTRLEN];
    inet_ntop(AF_INET, &address.sin_addr, host, sizeof host);
    return std::string(scheme) + "://" + host + ":" + std::to_string(ntohs(address.sin_port));
}

inline void set_option(int fd, int level, int name, int value, const char* what) {
    if (setsockopt(fd, level, name, &value, sizeof value)) fail(what);
}

// A bound socket of `type`; `address` gets the assigned port. `shared`: other sockets on the same port get a share of the senders.
inline int bound_socket(int type, sockaddr_in& address, bool shared = false) {
    const int fd = socket(AF_INET, type | SOCK_CLOEXEC, 0);
    if (fd < 0) fail("open a socket");
    if (type == SOCK_STREAM) set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1, "set SO_REUSEADDR");
    if (shared) set_option(fd, SOL_SOCKET, SO_REUSEPORT, 1, "set SO_REUSEPORT");
    socklen_t length = sizeof address;
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), length)) fail("listen on " + url(type == SOCK_STREAM ? "tcp" : "udp", address));
    getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
    return fd;
}

// A receive time limit, so that a blocked server notices a request to stop.
inline void limit_waiting(int fd, long ms) {
    const timeval limit = {ms / 1000, ms % 1000 * 1000};
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit)) fail("set SO_RCVTIMEO");
}

inline int udp_server(sockaddr_in& address, bool gro, bool shared = false) {
    const int fd = bound_socket(SOCK_DGRAM, address, shared);
    // Beyond the system limit if permitted, as Serval does.
    const int bytes = SOCKET_BUFFER_BYTES;
    if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes)) set_option(fd, SOL_SOCKET, SO_RCVBUF, bytes, "set SO_RCVBUF");
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes)) set_option(fd, SOL_SOCKET, SO_SNDBUF, bytes, "set SO_SNDBUF");
    if (gro) set_option(fd, IPPROTO_UDP, UDP_GRO, 1, "turn on UDP_GRO");
    limit_waiting(fd, 100);
    return fd;
}

// A socket for each of `count` threads, all on one port. All are bound before the first datagram: the host kernel spreads
// senders over the sockets that exist.
inline std::vector<int> udp_servers(sockaddr_in& address, bool gro, size_t count) {
    std::vector<int> sockets;
    for (size_t i = 0; i < count; i++) sockets.push_back(udp_server(address, gro, count > 1));
    return sockets;
}

struct Control {
    alignas(cmsghdr) char bytes[CMSG_SPACE(sizeof(int))];
};

// Receives up to `slots` buffers a call.
class Inbox {
  public:
    // `storage`: memory for the buffers, of `storage_bytes`; its own if there is none.
    Inbox(unsigned slots, uint32_t bytes_max, bool gro, uint8_t* storage = nullptr)
        : gro(gro), bytes_max(gro ? 65536 : bytes_max), stride(stride_of(this->bytes_max)), headers(slots), vectors(slots),
          peers(slots), controls(slots), buffers(storage ? nullptr : new uint8_t[size_t(slots) * stride]) {
        // Slots are an odd number of cache lines apart: a power of two would map all to the same few cache sets.
        for (unsigned i = 0; i < slots; i++) {
            vectors[i] = {(storage ? storage : buffers.get()) + size_t(i) * stride, this->bytes_max};
            auto& header = headers[i].msg_hdr;
            header = {};
            header.msg_name = &peers[i];
            header.msg_iov = &vectors[i];
            header.msg_iovlen = 1;
            if (gro) header.msg_control = &controls[i];
            restore(i);
        }
    }
    static size_t storage_bytes(unsigned slots, uint32_t bytes_max, bool gro) { return size_t(slots) * stride_of(gro ? 65536 : bytes_max); }
    // The number of buffers filled. `flags`: MSG_DONTWAIT or MSG_WAITFORONE.
    unsigned receive(int fd, int flags) {
        for (unsigned i = 0; i < used; i++) restore(i);
        const int count = recvmmsg(fd, headers.data(), unsigned(headers.size()), flags, nullptr);
        used = count > 0 ? unsigned(count) : 1;
        if (count >= 0) return unsigned(count);
        if (errno != EAGAIN && errno != EINTR && errno != ECONNREFUSED) fail("receive");
        return 0;
    }
    // Calls `take(peer, message, bytes)` for every datagram in buffer `i`.
    template <class Take>
    void each(unsigned i, Take take) {
        const uint32_t bytes = headers[i].msg_len;
        if (headers[i].msg_hdr.msg_flags & MSG_TRUNC) return;
        const uint32_t step = gro ? segment_bytes(i, bytes) : bytes;
        auto* at = static_cast<uint8_t*>(vectors[i].iov_base);
        if (bytes == 0) take(peers[i], at, 0u);
        for (uint32_t from = 0; from < bytes; from += step) take(peers[i], at + from, std::min(step, bytes - from));
    }

  private:
    static size_t stride_of(uint32_t bytes_max) { return (bytes_max + 63) / 64 * 64 + 64; }
    void restore(unsigned i) {
        headers[i].msg_hdr.msg_namelen = sizeof(sockaddr_in);
        if (gro) headers[i].msg_hdr.msg_controllen = sizeof(Control);
    }
    uint32_t segment_bytes(unsigned i, uint32_t bytes) {
        auto& header = headers[i].msg_hdr;
        for (auto* c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c))
            if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
                int step;
                memcpy(&step, CMSG_DATA(c), sizeof step);
                if (step > 0) return uint32_t(step);
            }
        return bytes;
    }

    const bool gro;
    const uint32_t bytes_max;
    const size_t stride;
    unsigned used = 0;
    std::vector<mmsghdr> headers;
    std::vector<iovec> vectors;
    std::vector<sockaddr_in> peers;
    std::vector<Control> controls;
    std::unique_ptr<uint8_t[]> buffers;
};

// Collects replies and sends them with one call; with GSO, replies of one length to one client as batches. The replies
// must stay in place until `flush`.
class Outbox {
  public:
    Outbox(int fd, unsigned messages, bool gso) : fd(fd), segments_max(gso ? SEGMENTS_MAX : 1), batches(messages), headers(messages) {
        for (unsigned i = 0; i < messages; i++) {
            auto& header = headers[i].msg_hdr;
            header = {};
            header.msg_name = &batches[i].peer;
            header.msg_namelen = sizeof(sockaddr_in);
            header.msg_iov = batches[i].vectors;
        }
    }
    void add(const sockaddr_in& peer, uint8_t* at, uint32_t bytes) {
        Batch* batch = segments_max > 1 ? open_batch(peer, bytes) : nullptr;
        if (!batch) {
            if (used == batches.size()) taken += flush();
            batch = &batches[used++];
            batch->peer = peer;
            batch->vectors[0] = {at, bytes};
            batch->vector_count = batch->segments = 1;
            batch->step = batch->bytes = bytes;
            batch->closed = bytes == 0;
            return;
        }
        auto& last = batch->vectors[batch->vector_count - 1];
        if (static_cast<uint8_t*>(last.iov_base) + last.iov_len == at)
            last.iov_len += bytes;
        else
            batch->vectors[batch->vector_count++] = {at, bytes};
        batch->segments++;
        batch->bytes += bytes;
        batch->closed = bytes < batch->step;
    }
    // Sends everything; returns the number of replies that the host kernel accepted.
    uint64_t flush() {
        for (unsigned i = 0; i < used; i++) finish(i);
        uint64_t sent = taken;  // by `add`, when it had no room
        taken = 0;
        for (unsigned from = 0; from < used;) {
            const int count = sendmmsg(fd, headers.data() + from, used - from, 0);
            if (count < 0 && errno == EINTR) continue;
            // A reply that cannot be sent (to an invalid port) is skipped.
            for (int i = 0; i < count; i++) sent += batches[from + unsigned(i)].segments;
            from += count > 0 ? unsigned(count) : 1;
        }
        used = 0;
        return sent;
    }

  private:
    struct Batch {
        sockaddr_in peer;
        uint32_t step, bytes, segments, vector_count;
        bool closed;  // its last datagram is shorter: no more may follow
        Control control;
        iovec vectors[SEGMENTS_MAX];
    };
    // The newest batch to a client, if it can take another reply.
    Batch* open_batch(const sockaddr_in& peer, uint32_t bytes) {
        const unsigned oldest = used > 16 ? used - 16 : 0;
        for (unsigned i = used; i-- > oldest;) {
            Batch& batch = batches[i];
            if (batch.peer.sin_port != peer.sin_port || batch.peer.sin_addr.s_addr != peer.sin_addr.s_addr) continue;
            const bool fits = !batch.closed && bytes > 0 && bytes <= batch.step && batch.segments < segments_max &&
                              batch.bytes + bytes <= DATAGRAM_BYTES_MAX;
            return fits ? &batch : nullptr;
        }
        return nullptr;
    }
    void finish(unsigned i) {
        Batch& batch = batches[i];
        auto& header = headers[i].msg_hdr;
        header.msg_iovlen = batch.vector_count;
        header.msg_control = nullptr;
        header.msg_controllen = 0;
        if (batch.segments == 1) return;
        header.msg_control = &batch.control;
        header.msg_controllen = CMSG_SPACE(sizeof(uint16_t));
        auto* c = CMSG_FIRSTHDR(&header);
        c->cmsg_level = IPPROTO_UDP;
        c->cmsg_type = UDP_SEGMENT;
        c->cmsg_len = CMSG_LEN(sizeof(uint16_t));
        const uint16_t step = uint16_t(batch.step);
        memcpy(CMSG_DATA(c), &step, sizeof step);
    }

    const int fd;
    const unsigned segments_max;
    unsigned used = 0;
    uint64_t taken = 0;
    std::vector<Batch> batches;
    std::vector<mmsghdr> headers;
};

#endif
