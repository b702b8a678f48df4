// Sources of requests: a socket, a socket with a database behind it, or a generator.
//
// The loop calls `reply` for finished requests, `flush`, `receive` when the front is `empty`, and `give_next` while the pool has room.
#ifndef SERVAL_BASELINES_GPU_FRONTS_CUH
#define SERVAL_BASELINES_GPU_FRONTS_CUH

#include <deque>
#include <utility>

#include "../lookup.h"
#include "../udp.h"
#include "functions.cuh"

namespace gpu {

constexpr unsigned RECEIVE_BATCH = 64;

struct FrontOptions {
    uint32_t bytes_max;
    bool gso;
    // Faces: replies leave in the order of requests, including those answered without the GPU.
    bool ordered;
    sockaddr_in memcached;
    // Of `Network::storage_bytes`, mapped into the GPU, which reads requests there; null: requests are copied.
    uint8_t* storage;
};

// Requests of one socket, handed over one by one as there is room for them.
class Network {
  public:
    using Peer = sockaddr_in;
    Network(int fd, const FrontOptions& options) : fd(fd), in_place(options.storage), outbox(fd, RECEIVE_BATCH, options.gso) {
        const size_t bytes = Inbox::storage_bytes(RECEIVE_BATCH, options.bytes_max + 1, options.gso);
        for (unsigned i = 0; i < (in_place ? INBOXES : 1); i++)
            inboxes.emplace_back(RECEIVE_BATCH, options.bytes_max + 1, options.gso, in_place ? options.storage + i * bytes : nullptr);
    }
    static size_t storage_bytes(const FrontOptions& options) {
        return INBOXES * Inbox::storage_bytes(RECEIVE_BATCH, options.bytes_max + 1, options.gso);
    }

    bool empty() const { return taken == waiting.size(); }
    // Launches before this one are finished, and their replies are sent.
    void finished(uint64_t launch) { first_unfinished = launch; }
    bool receive() {
        // The first buffers that no launch reads: those used last are in the cache.
        for (current = 0; in_place && in_use_until[current] > first_unfinished;)
            if (++current == INBOXES) return false;
        Inbox& inbox = inboxes[current];
        waiting.clear();
        taken = 0;
        const unsigned count = inbox.receive(fd, MSG_DONTWAIT);
        for (unsigned i = 0; i < count; i++)
            inbox.each(i, [&](const sockaddr_in& peer, const uint8_t* message, uint32_t bytes) { waiting.push_back({peer, message, bytes}); });
        return count > 0;
    }
    template <class Pool>
    void give_next(Pool& pool) {
        const Waiting& next = waiting[taken++];
        const uint64_t launch = pool.filling();
        if (pool.add(next.peer, next.message, next.bytes) && in_place) in_use_until[current] = launch + 1;
    }
    void reply(const Peer& peer, uint8_t* at, uint32_t bytes) { outbox.add(peer, at, bytes); }
    uint64_t flush() { return outbox.flush(); }

  private:
    static constexpr unsigned INBOXES = 8;
    struct Waiting {
        sockaddr_in peer;
        const uint8_t* message;
        uint32_t bytes;
    };
    const int fd;
    const bool in_place;
    std::vector<Inbox> inboxes;
    // Of each: 1 + the last launch that reads it.
    uint64_t in_use_until[INBOXES] = {};
    unsigned current = 0;
    uint64_t first_unfinished = 0;
    Outbox outbox;
    // What was received; `taken` of it has been handed over.
    std::vector<Waiting> waiting;
    size_t taken = 0;
};

// Face verification like faces.cpp's asynchronous mode, with the comparison on the GPU: all pending requests are looked up
// with one write, and a request whose picture has arrived goes to the GPU with both pictures.
class Database {
  public:
    using Peer = uint32_t;  // which request
    Database(int fd, const FrontOptions& options)
        : fd(fd), inbox(RECEIVE_BATCH, REQUEST_BYTES + 1, options.gso), outbox(fd, RECEIVE_BATCH, options.gso), lookup(options.memcached, 100'000'000, 16),
          requests(REQUESTS_MAX), ordered(options.ordered) {
        for (uint32_t i = REQUESTS_MAX; i-- > 0;) unused.push_back(i);
    }

    bool empty() const { return taken == found.size(); }
    void finished(uint64_t) {}
    bool receive() {
        found.clear();
        taken = 0;
        const auto answer = [this](uint32_t id, const Found& what) { settle(id, what); };
        const uint64_t now = now_ns();
        bool busy = false;
        // Room for one receive; GRO batches could bring more than ever fits, and the excess is dropped.
        if (unused.size() >= REQUESTS_MAX / 2) {
            const unsigned count = inbox.receive(fd, MSG_DONTWAIT);
            for (unsigned i = 0; i < count; i++)
                inbox.each(i, [&](const sockaddr_in& peer, const uint8_t* message, uint32_t bytes) { ask(peer, message, bytes, now); });
            busy = count > 0;
        }
        lookup.flush(answer);
        if (lookup.descriptor() >= 0 && lookup.pending()) busy |= lookup.receive(false, answer);
        lookup.expire(now, answer);
        // Those that the GPU has no part in do not wait for it.
        if (ordered || !answered.empty()) early += send();
        return busy;
    }
    template <class Pool>
    void give_next(Pool& pool) {
        const uint32_t id = found[taken++];
        pool.add(id, requests[id].pictures, Faces::BYTES);
    }
    void reply(const Peer& id, uint8_t* at, uint32_t bytes) {
        Request& request = requests[id];
        if (ordered) {
            // It may wait for longer than the GPU's memory is its own.
            if (at != reinterpret_cast<uint8_t*>(&request.verdict)) memcpy(&request.verdict, at, sizeof request.verdict);
            request.done = true;
            return;
        }
        outbox.add(request.peer, at, bytes);
        answered.push_back(id);
    }
    uint64_t flush() { return send() + std::exchange(early, 0); }

  private:
    uint64_t send() {
        for (; !line.empty() && requests[line.front()].done; line.pop_front()) {
            Request& request = requests[line.front()];
            outbox.add(request.peer, reinterpret_cast<uint8_t*>(&request.verdict), sizeof request.verdict);
            answered.push_back(line.front());
        }
        const uint64_t sent = outbox.flush();
        unused.insert(unused.end(), answered.begin(), answered.end());
        answered.clear();
        return sent;
    }
    static constexpr uint32_t REQUEST_BYTES = LABEL_BYTES + PICTURE_BYTES, REQUESTS_MAX = QUESTIONS_MAX;
    struct Request {
        sockaddr_in peer;
        Faces::Verdict verdict;
        bool done;
        uint8_t pictures[Faces::BYTES];
    };
    void ask(const sockaddr_in& peer, const uint8_t* message, uint32_t bytes, uint64_t now) {
        if (bytes != REQUEST_BYTES || unused.empty()) return;
        const uint32_t id = unused.back();
        unused.pop_back();
        requests[id].peer = peer;
        requests[id].done = false;
        if (ordered) line.push_back(id);
        memcpy(requests[id].pictures, message + LABEL_BYTES, PICTURE_BYTES);
        if (!lookup.ask(id, message, now)) settle(id, {Found::UNAVAILABLE, nullptr});
    }
    // The database has answered; without a picture there is nothing to compare.
    void settle(uint32_t id, const Found& what) {
        Request& request = requests[id];
        if (what.what == Found::VALUE) {
            memcpy(request.pictures + PICTURE_BYTES, what.picture, PICTURE_BYTES);
            found.push_back(id);
            return;
        }
        request.verdict = {what.what == Found::MISS ? 2u : 3u, 0};
        reply(id, reinterpret_cast<uint8_t*>(&request.verdict), sizeof request.verdict);
    }

    const int fd;
    Inbox inbox;
    Outbox outbox;
    Lookup lookup;
    std::vector<Request> requests;
    std::vector<uint32_t> unused, answered;
    const bool ordered;
    // Requests without a reply yet, oldest first, if those leave in order.
    std::deque<uint32_t> line;
    uint64_t early = 0;
    // Requests with both pictures; `taken` of them have been handed over.
    std::vector<uint32_t> found;
    size_t taken = 0;
};

// An unlimited supply of requests, without a network.
class Endless {
  public:
    struct Peer {};
    explicit Endless(uint32_t bytes) : message(bytes, 1) {}
    bool empty() const { return false; }
    void finished(uint64_t) {}
    bool receive() { return true; }
    template <class Pool>
    void give_next(Pool& pool) {
        pool.add({}, message.data(), uint32_t(message.size()));
    }
    void reply(const Peer&, uint8_t*, uint32_t) { replies++; }
    uint64_t flush() { return std::exchange(replies, 0); }

  private:
    const std::vector<uint8_t> message;
    uint64_t replies = 0;
};

}  // namespace gpu

#endif
