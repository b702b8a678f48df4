// Kernels with stream sockets on a GPU: the host side acts as the engine and as the peers, through the rings of one block.
#ifndef SERVAL_TESTS_GPU_SOCKETS_H
#define SERVAL_TESTS_GPU_SOCKETS_H

#include <cmath>

namespace {

// A peer: what it sends, and what it got.
struct Peer {
    std::string request;
    size_t piece = ~size_t{0};  // bytes that it sends at a time at most
    std::string answer;
    bool ends = true;     // ends its direction after the request
    bool closed = false;  // the block has closed the connection
};

// The engine of a block with sockets. Peers are served in the order of `wait`, as many at a time as the block has slots.
class SocketEngine {
  public:
    static constexpr unsigned MQUEUE = 1, NONE = ~0u;

    SocketEngine(const Shape& shape, const std::string& kernel, unsigned threads)
        : service(shape), events(service.region.producer(MQUEUE, false)), commands(service.region.consumer(MQUEUE, true)), slots(shape.sockets) {
        service.start(kernel, threads, threads != 128);
    }
    // Moves bytes and takes commands; false if the test is over its time.
    bool turn() {
        while (recv(commands, data) == Look::FOUND) obey();
        open_next();
        for (unsigned i = 0; i < slots.size(); i++)
            if (slots[i].peer) move(i);
        return service.alive();
    }
    // Serves these peers until the block has closed all connections.
    void serve(std::vector<Peer>& peers) {
        for (Peer& peer : peers) waiting.push_back(&peer);
        while (turn() && std::any_of(peers.begin(), peers.end(), [](const Peer& peer) { return !peer.closed; })) {
        }
    }
    // An event of a slot, for a block that waits.
    void nudge(unsigned slot) { CHECK(say(0, {SERVAL_SOCKET_EVENT, slot, slots[slot].generation, 0})); }
    void finish(uint64_t reason) {
        service.stop(SERVAL_STOP_NOW);
        service.join();
        CHECK_EQ(service.region.block()->state, SERVAL_STATE_ENDED);
        CHECK_EQ(service.region.block()->reason, reason);
        CHECK_EQ(wrong, 0);
    }

    Service service;
    std::vector<Peer*> waiting;
    uint64_t wrong = 0;  // commands that no kernel of these sends

  private:
    struct Slot {
        Peer* peer = nullptr;
        uint32_t generation = 0;
        uint64_t put = 0, got = 0;
        bool owed = false, closing = false;
    };
    uint64_t* word(unsigned slot, bool tx, unsigned at) { return service.region.stream_word(slot, tx, at); }
    bool say(uint64_t token, const serval_socket_message& m) {
        uint8_t padded[64] = {};
        std::memcpy(padded, &m, sizeof m);
        return send(events, message(token, sizeof m), padded);
    }
    void obey() {
        serval_socket_message m = {};
        if (data.size() == sizeof m) std::memcpy(&m, data.data(), sizeof m);
        if (m.op == SERVAL_SOCKET_ACCEPT && m.value == 0 && accept == 0) {
            accept = commands.message.token;
        } else if (m.op == SERVAL_SOCKET_CLOSE && m.slot < slots.size() && m.generation == slots[m.slot].generation && slots[m.slot].peer) {
            slots[m.slot].closing = true;
        } else if (m.op != SERVAL_SOCKET_NOTIFY || m.slot >= slots.size()) {
            wrong++;
        }
    }
    // Gives the block the next peer, if it waits for one and has a slot.
    void open_next() {
        if (accept == 0 || waiting.empty()) return;
        for (unsigned i = 0; i < slots.size(); i++) {
            Slot& slot = slots[i];
            if (slot.peer) continue;
            for (bool tx : {false, true})
                for (unsigned at : {SERVAL_STREAM_HEAD, SERVAL_STREAM_HEAD_END, SERVAL_STREAM_TAIL, SERVAL_STREAM_TAIL_END}) store_release(word(i, tx, at), 0);
            if (!say(accept, {SERVAL_SOCKET_DONE, i, slot.generation + 1, SERVAL_STATUS_OK})) return;
            slot = {waiting.front(), slot.generation + 1};
            waiting.erase(waiting.begin());
            accept = 0;
            return;
        }
    }
    // Of one slot: bytes to the block, bytes from it, and an event if something changed.
    void move(unsigned i) {
        Slot& slot = slots[i];
        Peer& peer = *slot.peer;
        const uint64_t capacity = service.region.shape.stream_bytes;
        const uint64_t taken = load_acquire(word(i, false, SERVAL_STREAM_TAIL)), room = capacity - (slot.put - (taken & ~uint64_t{7}));
        const uint64_t count = std::min({room, static_cast<uint64_t>(peer.piece), peer.request.size() - slot.put});
        if (count && !slot.closing) {
            copy(service.region.stream(i, false, SERVAL_STREAM_DATA), slot.put, &peer.request[slot.put], count, true);
            slot.put += count;
            store_release(word(i, false, SERVAL_STREAM_HEAD), slot.put);
            if (slot.put == peer.request.size() && peer.ends) store_release(word(i, false, SERVAL_STREAM_HEAD_END), SERVAL_STATUS_CLOSED);
            slot.owed = true;
        }
        // In this order: the bytes that were written before the close are there.
        const bool closing = slot.closing;
        const uint64_t head = load_acquire(word(i, true, SERVAL_STREAM_HEAD)), some = head - slot.got;
        if (some > capacity) {
            wrong++;
        } else if (some) {
            peer.answer.resize(peer.answer.size() + some);
            copy(service.region.stream(i, true, SERVAL_STREAM_DATA), slot.got, &peer.answer[slot.got], some, false);
            slot.got = head;
            store_release(word(i, true, SERVAL_STREAM_TAIL), head);
            slot.owed = true;
        }
        if (closing) {
            peer.closed = true;
            slot.peer = nullptr;
        } else if (slot.owed) {
            slot.owed = !say(0, {SERVAL_SOCKET_EVENT, i, slot.generation, 0});
        }
    }
    // Between a ring and memory.
    void copy(uint8_t* ring, uint64_t position, char* memory, uint64_t count, bool in) {
        const uint64_t capacity = service.region.shape.stream_bytes, start = position % capacity, first = std::min(count, capacity - start);
        uint8_t* const bytes = reinterpret_cast<uint8_t*>(memory);
        std::memcpy(in ? ring + start : bytes, in ? bytes : ring + start, first);
        std::memcpy(in ? ring : bytes + first, in ? bytes + first : ring, count - first);
    }

    Producer events;
    Consumer commands;
    std::vector<Slot> slots;
    std::vector<uint8_t> data;
    uint64_t accept = 0;  // token of the accept that waits
};

Shape socket_shape(unsigned protocol, unsigned sockets, uint64_t stream_bytes) {
    Shape s;
    s.protocol = protocol;
    s.depth = 64;
    s.sockets = sockets;
    s.stream_bytes = stream_bytes;
    return s;
}

std::string product_request(check::Random& random, uint32_t n) {
    std::string request(4 + 8 * size_t{n} * n, '\0');
    std::memcpy(&request[0], &n, 4);
    for (size_t i = 0; i < 2 * size_t{n} * n; i++) {
        const float number = static_cast<float>(static_cast<int>(random.below(2001)) - 1000) / 1000;
        std::memcpy(&request[4 + 4 * i], &number, 4);
    }
    return request;
}
// The product that the kernel must send, to the last bit: sums in the order of the index, without rounding between.
std::string product_answer(const std::string& request, uint32_t n) {
    std::vector<float> a(size_t{n} * n), b(a), c(a.size());
    std::memcpy(a.data(), &request[4], 4 * a.size());
    std::memcpy(b.data(), &request[4 + 4 * a.size()], 4 * a.size());
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < n; k++)
            for (size_t j = 0; j < n; j++) c[i * n + j] = std::fma(a[i * n + k], b[k * n + j], c[i * n + j]);
    return std::string(reinterpret_cast<const char*>(c.data()), 4 * c.size());
}

}  // namespace

// Streams of any length in pieces of any length, so that rings, pieces and memory have every alignment.
TEST(gpu_sockets_echo_streams) {
    for (unsigned protocol : PROTOCOLS)
        for (unsigned threads : {32u, 128u, 256u}) {
            SocketEngine e(socket_shape(protocol, 3, threads == 32 ? 4096 : 65536), "stream_echo", threads);
            check::Random random(threads + protocol);
            std::vector<Peer> peers(30);
            for (size_t i = 0; i < peers.size(); i++) {
                peers[i].request.resize(i < 6 ? i : 1 + random.below(200000));
                random.fill(peers[i].request.empty() ? nullptr : &peers[i].request[0], peers[i].request.size());
                peers[i].piece = i % 3 == 0 ? ~size_t{0} : 1 + random.below(i % 3 == 1 ? 300 : 20000);
                // Without bytes nothing is put, so there would be no end.
                if (peers[i].request.empty()) peers[i].request = "x";
            }
            e.serve(peers);
            uint64_t wrong = 0;
            for (const Peer& peer : peers) wrong += !peer.closed || peer.answer != peer.request;
            CHECK_EQ(wrong, 0);
            e.finish(SERVAL_REASON_STOPPED);
        }
}

TEST(gpu_sockets_multiply) {
    for (unsigned threads : {32u, 96u, 256u}) {
        SocketEngine e(socket_shape(SERVAL_PROTOCOL_GRANULE16, 4, 1 << 20), "matmul", threads);
        check::Random random(threads);
        std::vector<Peer> peers;
        std::vector<std::string> wanted;
        for (uint32_t n : {1u, 2u, 3u, 4u, 31u, 32u, 63u, 64u, 65u, 100u, 127u, 128u, 129u, 190u, 256u, 511u, 512u}) {
            if (threads != 256 && n > 256) continue;
            Peer peer;
            std::string want;
            for (unsigned i = 0; i < 2; i++) {
                const std::string one = product_request(random, n);
                peer.request += one;
                want += product_answer(one, n);
            }
            peer.piece = n % 2 ? 1 + random.below(50000) : ~size_t{0};
            peers.push_back(peer);
            wanted.push_back(want);
        }
        // Impossible sizes, and a request that ends early: no answer.
        for (uint32_t n : {0u, 513u, ~0u}) {
            Peer peer;
            peer.request = std::string(reinterpret_cast<const char*>(&n), 4) + "rest";
            peers.push_back(peer);
            wanted.push_back("");
        }
        Peer part;
        part.request = product_request(random, 40).substr(0, 5000);
        peers.push_back(part);
        wanted.push_back("");
        e.serve(peers);
        for (size_t i = 0; i < peers.size(); i++) CHECK(peers[i].closed && peers[i].answer == wanted[i]);
        e.finish(SERVAL_REASON_STOPPED);
    }
}

// A connection that sends nothing does not keep others waiting.
TEST(gpu_sockets_beside_an_idle_one) {
    SocketEngine e(socket_shape(SERVAL_PROTOCOL_GRANULE16, 2, 4096), "stream_echo", 128);
    Peer idle;
    e.waiting.push_back(&idle);
    while (e.turn() && !e.waiting.empty()) {
    }
    std::vector<Peer> peers(3);
    for (Peer& peer : peers) peer.request = "hello";
    e.serve(peers);
    for (const Peer& peer : peers) CHECK(peer.answer == "hello");
    idle.request = "late";
    while (e.turn() && !idle.closed) {
    }
    CHECK(idle.answer == "late");
    e.finish(SERVAL_REASON_STOPPED);
}

// An impossible position ends the block.
TEST(gpu_sockets_hostile_words) {
    for (unsigned kind = 0; kind < 2; kind++) {
        SocketEngine e(socket_shape(SERVAL_PROTOCOL_GRANULE16, 1, 4096), "stream_echo", 128);
        Peer peer;
        peer.request = "hello";
        peer.ends = false;
        e.waiting.push_back(&peer);
        while (e.turn() && peer.answer.size() < 5) {
        }
        CHECK(peer.answer == "hello");
        if (kind == 0) store_release(e.service.region.stream_word(0, false, SERVAL_STREAM_HEAD), 5 + 4097);
        // The block has not filled its ring, so it looks at the end only.
        if (kind == 1) store_release(e.service.region.stream_word(0, true, SERVAL_STREAM_TAIL_END), SERVAL_STATUS_RESET), peer.request += "again";
        if (kind == 0) {
            e.nudge(0);
            while (e.service.alive() && load_acquire(&e.service.region.block()->state) != SERVAL_STATE_ENDED) {
            }
        } else {
            while (e.turn() && !peer.closed) {
            }
            CHECK(peer.answer == "hello");
        }
        e.finish(kind == 0 ? SERVAL_REASON_RING_CORRUPT : SERVAL_REASON_STOPPED);
    }
}

// Without a network: what the block and the bus take. Every byte is checked.
TEST(gpu_sockets_times) {
    struct Case {
        const char* kernel;
        uint32_t bytes, n;
        unsigned threads, rounds;
    };
    for (const Case& c : {Case{"stream_echo", 64, 0, 128, 3000}, Case{"stream_echo", 16384, 0, 128, 1000}, Case{"matmul", 0, 64, 256, 500}, Case{"matmul", 0, 256, 256, 300},
                          Case{"matmul", 0, 512, 256, 50}}) {
        SocketEngine e(socket_shape(SERVAL_PROTOCOL_GRANULE16, 1, 4 << 20), c.kernel, c.threads);
        check::Random random(1);
        std::string request(c.bytes, '\0');
        if (c.n) request = product_request(random, c.n);
        else random.fill(&request[0], request.size());
        const std::string want = c.n ? product_answer(request, c.n) : request;
        Peer peer;
        peer.ends = false;
        e.waiting.push_back(&peer);
        std::vector<uint64_t> times;
        uint64_t wrong = 0;
        for (unsigned round = 0; round < c.rounds; round++) {
            const uint64_t from = now_ns();
            peer.request += request;
            const size_t end = peer.answer.size() + want.size();
            while (e.turn() && peer.answer.size() < end) {
            }
            times.push_back(now_ns() - from);
            if (peer.answer.size() != end) break;
            wrong += peer.answer.compare(end - want.size(), want.size(), want) != 0;
        }
        CHECK_EQ(wrong, 0);
        CHECK_EQ(times.size(), c.rounds);
        std::sort(times.begin(), times.end());
        std::printf("%s, %zu bytes in, %zu out: p50 %.1f us, p99 %.1f us\n", c.kernel, request.size(), want.size(), 1e-3 * static_cast<double>(times[times.size() / 2]),
                    1e-3 * static_cast<double>(times[times.size() * 99 / 100]));
        e.finish(SERVAL_REASON_STOPPED);
    }
}

#endif
