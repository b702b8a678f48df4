// Stream sockets: what a kernel sees of its connections. The test acts as the engine, on the same thread: a kernel's body takes steps of both
// sides, and where a call waits, the wait callback does. The engine's ends of the stream rings are written byte by byte here, independently of the
// library.
#include "../kernels/matmul.cpp"
#include "../kernels/stream_echo.cpp"

#include <string>

#include "region.h"

using namespace testing;
using serval::Io;
namespace detail = serval::detail;
using serval::Listener;
using serval::Socket;
using serval::Sockets;

namespace {
// The body of the kernel that a test runs, how often it was called, and whether it runs each time.
std::function<void(serval::Block&, Sockets&)> body;
unsigned calls;
bool repeats;

constexpr unsigned MQUEUE = 1;  // number of the socket mqueue
}  // namespace

SERVAL_SOCKET_KERNEL(t_sockets) (serval::Block& block, serval::Mqueue&, Sockets& sockets) {
    if (calls++ == 0 || repeats) body(block, sockets);
}
SERVAL_KERNEL(t_without) (serval::Block&, serval::Mqueue&) {}

namespace {

Shape shape_of(unsigned slots, uint64_t bytes = 4096, unsigned protocol = SERVAL_PROTOCOL_DOORBELL) {
    Shape s;
    s.sockets = slots;
    s.stream_bytes = bytes;
    s.depth = 64;
    s.protocol = protocol;
    return s;
}

struct Command {
    uint64_t token;
    serval_socket_message message;
};

// The engine of one block with sockets.
struct Engine {
    Region region;
    Runner runner;
    Producer events;
    Consumer commands;
    uint64_t put_total[SERVAL_SOCKETS_MAX] = {}, got_total[SERVAL_SOCKETS_MAX] = {};
    uint32_t generations[SERVAL_SOCKETS_MAX] = {};
    // Commands that were taken and not looked at, by kind.
    std::vector<Command> accepts, connects, closes, notifies, cancels, others;
    // Called when the block waits; the number of waits so far.
    std::function<void(unsigned)> turn = [](unsigned) {};
    unsigned turns = 0;
    unsigned why = 99;

    explicit Engine(const Shape& s = shape_of(4))
        : region(s), runner(region), events(region.producer(MQUEUE, false)), commands(region.consumer(MQUEUE, true)) {
        runner.waiting = [this](uint32_t reason, uint64_t) {
            why = reason;
            take();
            // A pause, which takes its time.
            if (reason == SERVAL_WAIT_TIME) return;
            turn(turns++);
            if (turns < 20000) return;
            check::fail(__FILE__, __LINE__, "the block waits without a limit");
            stop(SERVAL_STOP_NOW);
        };
    }
    // Runs the body, after which the block must have ended for this reason.
    bool run(std::function<void(serval::Block&, Sockets&)> b, uint64_t reason = SERVAL_REASON_RETURNED) {
        body = std::move(b);
        calls = 0;
        const bool found = runner.run("t_sockets");
        body = nullptr;
        take();
        return found && check::equal(__FILE__, __LINE__, "reason", region.block()->reason, reason) &&
               check::equal(__FILE__, __LINE__, "state", region.block()->state, SERVAL_STATE_ENDED);
    }
    void stop(uint64_t how) { region.engine()->stop = how; }
    // Takes the block's commands.
    void take() {
        std::vector<uint8_t> data;
        while (recv(commands, data) == Look::FOUND) {
            Command c = {commands.message.token, {}};
            if (data.size() != sizeof c.message) {
                check::fail(__FILE__, __LINE__, "a command has 16 bytes");
                continue;
            }
            std::memcpy(&c.message, data.data(), sizeof c.message);
            switch (c.message.op) {
                case SERVAL_SOCKET_ACCEPT: accepts.push_back(c); break;
                case SERVAL_SOCKET_CONNECT: connects.push_back(c); break;
                case SERVAL_SOCKET_CLOSE: closes.push_back(c); break;
                case SERVAL_SOCKET_NOTIFY: notifies.push_back(c); break;
                case SERVAL_SOCKET_CANCEL: cancels.push_back(c); break;
                default: others.push_back(c);
            }
        }
    }
    void say(uint64_t token, const serval_socket_message& m, uint32_t bytes = sizeof(serval_socket_message)) {
        uint8_t padded[64] = {};
        std::memcpy(padded, &m, sizeof m);
        if (!send(events, message(token, bytes), padded)) check::fail(__FILE__, __LINE__, "there is room for every message of the engine");
    }
    void fail(uint64_t token, uint32_t status) { say(token, {SERVAL_SOCKET_DONE, 0, 0, status}); }
    // Leases a slot: clears its words and completes the command.
    void open(uint64_t token, uint32_t slot) {
        for (unsigned tx = 0; tx < 2; tx++)
            for (unsigned at : {SERVAL_STREAM_HEAD, SERVAL_STREAM_HEAD_END, SERVAL_STREAM_TAIL, SERVAL_STREAM_TAIL_END})
                *region.stream_word(slot, tx, at) = 0;
        put_total[slot] = got_total[slot] = 0;
        say(token, {SERVAL_SOCKET_DONE, slot, ++generations[slot], SERVAL_STATUS_OK});
    }
    void event(uint32_t slot) { say(0, {SERVAL_SOCKET_EVENT, slot, generations[slot], 0}); }
    uint64_t capacity() const { return region.shape.stream_bytes; }
    // Puts as many of these bytes into the ring to the block as there is room for; returns how many.
    size_t put(uint32_t slot, const std::string& bytes) {
        const uint64_t taken = *region.stream_word(slot, false, SERVAL_STREAM_TAIL);
        size_t done = 0;
        for (; done < bytes.size() && put_total[slot] - (taken & ~uint64_t{7}) < capacity(); done++, put_total[slot]++)
            *region.stream(slot, false, SERVAL_STREAM_DATA + static_cast<unsigned>(put_total[slot] % capacity())) = static_cast<uint8_t>(bytes[done]);
        *region.stream_word(slot, false, SERVAL_STREAM_HEAD) = put_total[slot];
        return done;
    }
    void end(uint32_t slot, uint64_t status) { *region.stream_word(slot, false, SERVAL_STREAM_HEAD_END) = status; }
    // Takes at most `max` of the bytes that the block has sent.
    std::string get(uint32_t slot, size_t max = ~size_t{0}) {
        const uint64_t head = *region.stream_word(slot, true, SERVAL_STREAM_HEAD);
        std::string bytes;
        for (; got_total[slot] != head && bytes.size() < max; got_total[slot]++)
            bytes.push_back(static_cast<char>(*region.stream(slot, true, SERVAL_STREAM_DATA + static_cast<unsigned>(got_total[slot] % capacity()))));
        *region.stream_word(slot, true, SERVAL_STREAM_TAIL) = got_total[slot];
        return bytes;
    }
    uint64_t shut(uint32_t slot) { return *region.stream_word(slot, true, SERVAL_STREAM_HEAD_END); }
    // Gives the block a connection in this slot, for a body that calls it.
    Socket accepted(serval::Block& block, Sockets& sockets, uint32_t slot, uint32_t listener = 0) {
        Socket none = sockets.listen(listener).try_accept(block);
        if (none || none.status() != serval::AGAIN) check::fail(__FILE__, __LINE__, "no connection yet");
        take();
        if (accepts.empty()) {
            check::fail(__FILE__, __LINE__, "an accept command");
            return Socket();
        }
        open(accepts.back().token, slot);
        accepts.pop_back();
        return sockets.listen(listener).try_accept(block);
    }
};

bool is_ok(const Io& io, uint64_t bytes) { return io.status == serval::OK && io.bytes == bytes; }
bool is_end(const Io& io, serval::Status status) { return io.status == status && io.bytes == 0 && !io; }
std::string noise(check::Random& random, size_t bytes) {
    std::string s(bytes, '\0');
    random.fill(&s[0], bytes);
    return s;
}

}  // namespace

// Ring positions, private addresses and lengths in every alignment, across the wrap many times; nothing beside the bytes is written.
TEST(bytes_in_every_alignment) {
    for (unsigned protocol : PROTOCOLS) {
        Engine e(shape_of(3, 4096, protocol));
        CHECK(e.run([&](serval::Block& block, Sockets& sockets) {
            Socket s = e.accepted(block, sockets, 1);
            CHECK(s);
            check::Random random(7);
            std::vector<uint8_t> memory(4096 + 64);
            for (unsigned round = 0; round < 3000; round++) {
                const unsigned align = round % 8, size = round % 3 ? 1 + static_cast<unsigned>(random.below(40)) : 1 + static_cast<unsigned>(random.below(4000));
                const std::string text = noise(random, size);
                CHECK_EQ(e.put(1, text), size);
                std::fill(memory.begin(), memory.end(), 0xee);
                uint8_t* const at = memory.data() + 16 + align;
                CHECK(is_ok(s.try_recv(block, at, size), size));
                CHECK(std::memcmp(at, text.data(), size) == 0);
                CHECK(std::all_of(memory.data(), at, [](uint8_t b) { return b == 0xee; }));
                CHECK(std::all_of(at + size, memory.data() + memory.size(), [](uint8_t b) { return b == 0xee; }));
                // Some of the bytes before are still in the ring: they must survive.
                const std::string answer = noise(random, size < 2000 ? size : 2000);
                const std::string left = e.get(1, static_cast<size_t>(-1));
                std::memcpy(memory.data() + 8 + round / 8 % 8, answer.data(), answer.size());
                const unsigned half = static_cast<unsigned>(random.below(answer.size() + 1));
                const uint8_t* from = memory.data() + 8 + round / 8 % 8;
                if (half) CHECK(is_ok(s.try_send(block, from, half), half));
                if (half < answer.size()) CHECK(is_ok(s.try_send(block, from + half, answer.size() - half), answer.size() - half));
                const unsigned part = static_cast<unsigned>(random.below(answer.size() + 1));
                std::string seen = e.get(1, part);
                seen += e.get(1);
                CHECK(seen == answer);
                CHECK(left.empty());
                e.take();
            }
            CHECK(e.put_total[1] > 8 * 4096 && e.got_total[1] > 8 * 4096);
            // The rings of the other slots were not touched.
            for (unsigned slot : {0u, 2u})
                for (unsigned tx = 0; tx < 2; tx++)
                    for (unsigned i = 0; i < SERVAL_STREAM_DATA + 4096; i++) CHECK_EQ(*e.region.stream(slot, tx, i), 0);
        }));
    }
}

// With part of the bytes unread, the ring is filled to the last byte, in every position of head and tail.
TEST(a_full_ring_keeps_unread_bytes) {
    Engine e;
    CHECK(e.run([&](serval::Block& block, Sockets& sockets) {
        Socket s = e.accepted(block, sockets, 0);
        check::Random random(3);
        std::string sent, seen;
        std::vector<uint8_t> memory(8192);
        for (unsigned round = 0; round < 2000; round++) {
            const std::string text = noise(random, 1 + random.below(3000));
            const Io io = s.try_send(block, text.data(), text.size());
            e.take();
            const uint64_t tail = e.got_total[0] & ~uint64_t{7};
            const uint64_t room = 4096 - (sent.size() - tail);
            if (room == 0) CHECK(is_end(io, serval::AGAIN));
            else CHECK(is_ok(io, std::min<uint64_t>(room, text.size())));
            sent.append(text, 0, io.bytes);
            seen += e.get(0, random.below(2500));
            CHECK_EQ(*e.region.stream_word(0, true, SERVAL_STREAM_HEAD), sent.size());
        }
        seen += e.get(0);
        CHECK(seen == sent && sent.size() > 40 * 4096);
        // And the other direction, with small receives.
        sent.clear(), seen.clear();
        for (unsigned round = 0; round < 2000; round++) {
            const std::string text = noise(random, 1 + random.below(3000));
            sent.append(text, 0, e.put(0, text));
            const Io io = s.try_recv(block, memory.data(), 1 + random.below(2500));
            seen.append(reinterpret_cast<char*>(memory.data()), io.bytes);
            e.take();
        }
        while (Io io = s.try_recv(block, memory.data(), 8192)) seen.append(reinterpret_cast<char*>(memory.data()), io.bytes);
        CHECK(seen == sent && sent.size() > 40 * 4096);
    }));
}

TEST(accept) {
    Engine e;
    CHECK(e.run([&](serval::Block& block, Sockets& sockets) {
        Listener in = sockets.listen(1);
        Socket none = in.try_accept(block);
        CHECK(!none && none.status() == serval::AGAIN);
        none = in.accept_until(block, block.now_ns() + 1000);
        CHECK(!none && none.status() == serval::TIMEOUT);
        // There is one command, which is given up. If it succeeds all the same, the next call gets its connection.
        e.take();
        CHECK_EQ(e.accepts.size(), 1);
        CHECK_EQ(e.accepts[0].message.value, 1);
        const uint64_t token = e.accepts[0].token;
        CHECK(e.cancels.size() == 1 && e.cancels[0].token == token);
        e.turn = [&](unsigned) { e.open(token, 3); };
        Socket s = in.accept(block);
        CHECK(s && s.status() == serval::OK && e.why == SERVAL_WAIT_BACKEND);
        e.turn = [](unsigned) {};
        e.take();
        CHECK_EQ(e.accepts.size(), 1);
        // If it has ended, the next call asks again.
        none = sockets.listen(2).accept_until(block, block.now_ns() + 1000);
        e.take();
        CHECK(none.status() == serval::TIMEOUT && e.cancels.size() == 2 && e.accepts.size() == 2);
        CHECK_EQ(e.cancels[1].token, e.accepts[1].token);
        const serval::Status answers[] = {serval::TIMEOUT, serval::NOT_ALLOWED};
        unsigned answered = 0;
        e.turn = [&](unsigned) {
            if (answered < 2 && e.accepts.size() == 2 + answered) e.fail(e.accepts[1 + answered].token, answers[answered]), answered++;
        };
        CHECK(sockets.listen(2).accept(block).status() == serval::NOT_ALLOWED);
        e.take();
        CHECK_EQ(e.accepts.size(), 3);
        CHECK(e.accepts[2].token != e.accepts[1].token && e.accepts[2].message.value == 2);
        e.turn = [](unsigned) {};
        e.accepts.erase(e.accepts.begin() + 1, e.accepts.end());
        // A failure is its result, once.
        CHECK(in.try_accept(block).status() == serval::AGAIN);
        e.take();
        e.fail(e.accepts[1].token, SERVAL_STATUS_NOT_ALLOWED);
        none = in.try_accept(block);
        CHECK(!none && none.status() == serval::NOT_ALLOWED);
        CHECK(in.try_accept(block).status() == serval::AGAIN);
        // No command for a listener that no service can have. Two listeners wait side by side.
        e.take(), e.accepts.clear();
        none = sockets.listen(SERVAL_SOCKET_SPECS_MAX).accept(block);
        CHECK(!none && none.status() == serval::NOT_ALLOWED);
        CHECK(sockets.listen(0).try_accept(block).status() == serval::AGAIN);
        e.take();
        CHECK_EQ(e.accepts.size(), 1);
        e.open(e.accepts[0].token, 0);
        CHECK(in.try_accept(block).status() == serval::AGAIN);
        CHECK(sockets.listen(0).try_accept(block));
    }));
}

TEST(connect) {
    Engine e;
    CHECK(e.run([&](serval::Block& block, Sockets& sockets) {
        const std::pair<unsigned, serval::Status> failures[] = {{SERVAL_STATUS_REFUSED, serval::REFUSED}, {SERVAL_STATUS_EXHAUSTED, serval::EXHAUSTED},
                                                                {SERVAL_STATUS_TIMEOUT, serval::TIMEOUT}, {SERVAL_STATUS_DRAINING, serval::DRAINING},
                                                                {0x100, serval::RESET}};
        for (auto [status, expected] : failures) {
            e.turn = [&, status = status](unsigned) { e.fail(e.connects.back().token, status); };
            Socket none = sockets.connect(block, 5);
            CHECK(!none && none.status() == expected);
            CHECK_EQ(e.connects.back().message.value, 5);
            CHECK(is_end(none.try_recv(block, nullptr, 1), serval::CLOSED));
        }
        e.turn = [&](unsigned) { e.open(e.connects.back().token, 2); };
        Socket s = sockets.connect(block, 0, block.now_ns() + 1000000000);
        CHECK(s && is_end(s.try_recv(block, nullptr, 1), serval::AGAIN));
        // One that comes after the deadline is reset; one that fails then is nothing.
        for (bool fails : {false, true}) {
            e.turn = [](unsigned) {};
            e.take(), e.closes.clear();
            Socket none = sockets.connect(block, 0, block.now_ns() + 1000);
            CHECK(!none && none.status() == serval::TIMEOUT);
            e.take();
            const uint64_t late = e.connects.back().token;
            CHECK(!e.cancels.empty() && e.cancels.back().token == late);
            if (fails) e.fail(late, SERVAL_STATUS_REFUSED);
            else e.open(late, 1);
            uint8_t byte;
            CHECK(is_end(s.try_recv(block, &byte, 1), serval::AGAIN));
            e.take();
            CHECK_EQ(e.closes.size(), fails ? 0 : 1);
            if (fails) continue;
            CHECK_EQ(e.closes[0].message.slot, 1);
            CHECK_EQ(e.closes[0].message.generation, e.generations[1]);
            CHECK_EQ(e.closes[0].message.value, SERVAL_SOCKET_CLOSE_RESET);
        }
        // It does not become the result of the next attempt.
        e.turn = [](unsigned) {};
        CHECK(sockets.connect(block, 0, block.now_ns() + 1000).status() == serval::TIMEOUT);
        e.take();
        const uint64_t late = e.connects.back().token;
        e.turn = [&](unsigned) {
            if (e.connects.back().token == late) return;
            e.open(late, 1);
            e.open(e.connects.back().token, 3);
            e.turn = [](unsigned) {};
        };
        Socket other = sockets.connect(block, 0);
        CHECK(other && e.put(3, "x") == 1);
        uint8_t byte = 0;
        CHECK(is_ok(other.recv(block, &byte, 1), 1) && byte == 'x');
    }));
}

TEST(receive) {
    Engine e;
    CHECK(e.run([&](serval::Block& block, Sockets& sockets) {
        Socket s = e.accepted(block, sockets, 0);
        std::vector<char> memory(8192);
        CHECK(is_end(s.try_recv(block, memory.data(), 8), serval::AGAIN));
        CHECK(is_ok(s.recv(block, memory.data(), 0), 0));
        CHECK(is_end(s.recv_until(block, memory.data(), 8, block.now_ns() + 1000), serval::TIMEOUT));
        // It waits for one byte, and takes what is there.
        e.turn = [&](unsigned turn) { if (turn % 3 == 0) e.put(0, "abc"), e.event(0); };
        CHECK(is_ok(s.recv(block, memory.data(), 100), 3) && std::memcmp(memory.data(), "abc", 3) == 0);
        // Events without bytes do not end a wait.
        e.turn = [&](unsigned turn) { e.event(0); if (turn % 5 == 0) e.put(0, "pieces"); };
        std::string expected;
        for (int i = 0; i < 100; i++) expected += "pieces";
        CHECK(s.recv_all(block, memory.data(), 600) == serval::OK && std::memcmp(memory.data(), expected.data(), 600) == 0);
        e.turn = [](unsigned) {};
        CHECK_EQ(e.put(0, "12345"), 5);
        CHECK(s.recv_all(block, memory.data(), 6, block.now_ns() + 1000) == serval::TIMEOUT);
        // The engine hears of room when half of the ring was read.
        e.take();
        CHECK(e.notifies.empty());
        for (unsigned i = 0; i < 3; i++) {
            CHECK_EQ(e.put(0, std::string(1024, 'n')), 1024);
            CHECK(is_ok(s.recv(block, memory.data(), 8192), 1024));
        }
        e.take();
        CHECK_EQ(e.notifies.size(), 1);
        CHECK_EQ(e.notifies[0].message.generation, e.generations[0]);
    }));
}

TEST(send) {
    Engine e;
    CHECK(e.run([&](serval::Block& block, Sockets& sockets) {
        Socket s = e.accepted(block, sockets, 0);
        const std::string text(10000, 't');
        CHECK(is_ok(s.send(block, text.data(), 0), 0));
        CHECK(is_ok(s.send(block, text.data(), 10000), 4096));
        CHECK(is_end(s.try_send(block, text.data(), 1), serval::AGAIN));
        CHECK(is_end(s.send_until(block, text.data(), 1, block.now_ns() + 1000), serval::TIMEOUT));
        e.take();
        CHECK_EQ(e.notifies.size(), 1);
        CHECK_EQ(e.get(0).size(), 4096);
        size_t taken = 0;
        e.turn = [&](unsigned) { taken += e.get(0, 700).size(), e.event(0); };
        CHECK(s.send_all(block, text.data(), 10000) == serval::OK);
        CHECK_EQ(taken + e.get(0).size(), 10000);
        CHECK(s.send_all(block, text.data(), 0) == serval::OK);
        e.turn = [](unsigned) {};
        CHECK(s.send_all(block, text.data(), 10000, block.now_ns() + 1000) == serval::TIMEOUT);
        // A connection that broke takes nothing, also while a send waits.
        e.turn = [&](unsigned) { *e.region.stream_word(0, true, SERVAL_STREAM_TAIL_END) = SERVAL_STATUS_RESET, e.event(0); };
        CHECK(is_end(s.send(block, text.data(), 1), serval::RESET));
        e.get(0);
        CHECK(s.send_all(block, text.data(), 1) == serval::RESET);
    }));
}

TEST(the_end_comes_after_the_bytes) {
    const std::pair<uint64_t, serval::Status> ends[] = {{SERVAL_STATUS_CLOSED, serval::CLOSED}, {SERVAL_STATUS_RESET, serval::RESET},
                                                        {SERVAL_STATUS_DRAINING, serval::DRAINING}, {0x100, serval::RESET}, {SERVAL_STATUS_AGAIN, serval::RESET},
                                                        {~uint64_t{0}, serval::RESET}};
    for (auto [word, status] : ends) {
        Engine e;
        CHECK(e.run([&, word = word, status = status](serval::Block& block, Sockets& sockets) {
            Socket s = e.accepted(block, sockets, 0);
            char memory[8];
            e.put(0, "last");
            e.end(0, word);
            CHECK(is_ok(s.recv(block, memory, 3), 3) && is_ok(s.recv(block, memory, 8), 1));
            CHECK(is_end(s.recv(block, memory, 8), status) && is_end(s.try_recv(block, memory, 8), status));
            CHECK(s.recv_all(block, memory, 1) == status);
            // The other direction is open.
            CHECK(s.send_all(block, "more", 4) == serval::OK && e.get(0) == "more");
            *e.region.stream_word(0, true, SERVAL_STREAM_TAIL_END) = word;
            CHECK(is_end(s.send(block, "x", 1), status));
        }));
    }
}

TEST(shutdown_close_and_reset) {
    Engine e;
    CHECK(e.run([&](serval::Block& block, Sockets& sockets) {
        char memory[8];
        Socket s = e.accepted(block, sockets, 2);
        CHECK(s.send_all(block, "bye", 3) == serval::OK && s.shutdown(block) == serval::OK);
        CHECK(e.shut(2) == SERVAL_STATUS_CLOSED && e.get(2) == "bye");
        CHECK(is_end(s.send(block, "x", 1), serval::CLOSED) && s.shutdown(block) == serval::CLOSED);
        e.put(2, "in");
        CHECK(is_ok(s.recv(block, memory, 8), 2));
        e.take();
        CHECK_EQ(e.notifies.size(), 2);
        Socket copy = s;
        CHECK(s.close(block) == serval::OK && !s && s.status() == serval::CLOSED);
        e.take();
        CHECK_EQ(e.closes.size(), 1);
        CHECK(e.closes[0].message.slot == 2 && e.closes[0].message.generation == 1 && e.closes[0].message.value == SERVAL_SOCKET_CLOSE_ORDERLY);
        // Old handles have no effect, also when the slot has a new connection.
        for (unsigned again = 0; again < 2; again++) {
            for (Socket* old : {&s, &copy}) {
                CHECK(is_end(old->recv(block, memory, 8), serval::CLOSED) && is_end(old->send(block, "x", 1), serval::CLOSED));
                CHECK(old->shutdown(block) == serval::CLOSED);
                CHECK(sockets.poll(block, old, 1, 1) == -1);
            }
            Socket last = copy;
            CHECK(last.close(block) == serval::CLOSED && last.reset(block) == serval::CLOSED);
            if (again == 0) {
                Socket next = e.accepted(block, sockets, 2);
                CHECK(next && next.send_all(block, "new", 3) == serval::OK && e.get(2) == "new");
            }
        }
        Socket other = e.accepted(block, sockets, 1);
        CHECK(other.reset(block) == serval::OK);
        e.take();
        CHECK_EQ(e.closes.size(), 2);
        CHECK_EQ(e.closes[1].message.value, SERVAL_SOCKET_CLOSE_RESET);
        // A handle that never was a connection.
        Socket none;
        CHECK(!none && is_end(none.recv(block, memory, 8), serval::CLOSED) && is_end(none.try_send(block, "x", 1), serval::CLOSED));
        CHECK(none.shutdown(block) == serval::CLOSED && none.close(block) == serval::CLOSED && none.reset(block) == serval::CLOSED);
    }));
    CHECK(e.others.empty());
}

TEST(poll_takes_turns) {
    Engine e;
    CHECK(e.run([&](serval::Block& block, Sockets& sockets) {
        Socket open[5];
        for (unsigned i = 0; i < 4; i++) open[i] = e.accepted(block, sockets, i);
        CHECK(sockets.poll(block, open, 5, detail::NOT_WAITING) == -1 && sockets.poll(block, open, 5, block.now_ns() + 1000) == -1);
        // Ready ones in turn, although none is read; one that has ended is ready.
        e.put(0, "a"), e.put(2, "b"), e.end(3, SERVAL_STATUS_CLOSED);
        unsigned seen[5] = {};
        for (unsigned i = 0; i < 30; i++) {
            const int ready = sockets.poll(block, open, 5);
            CHECK(ready >= 0 && ready < 5);
            seen[ready]++;
        }
        CHECK(seen[0] == 10 && seen[1] == 0 && seen[2] == 10 && seen[3] == 10 && seen[4] == 0);
        open[3].close(block), open[0].close(block);
        CHECK_EQ(sockets.poll(block, open, 5), 2);
        // `count` if a connection waits, and no socket is ready; with no sockets as well.
        e.turn = [&](unsigned) { e.open(e.accepts.back().token, 0); };
        CHECK(sockets.listen(0).try_accept(block).status() == serval::AGAIN);
        CHECK_EQ(sockets.poll(block, open, 2), 2);
        CHECK_EQ(sockets.poll(block, open, 0), 0);
        CHECK_EQ(sockets.poll(block, open, 3), 2);
        e.turn = [&](unsigned) { e.put(1, "c"), e.event(1); };
        CHECK(sockets.listen(0).try_accept(block));
        // It waits for an event.
        CHECK_EQ(sockets.poll(block, open, 2), 1);
        // An immediate stop ends it, also if one is ready.
        e.stop(SERVAL_STOP_DRAIN);
        CHECK_EQ(sockets.poll(block, open, 2), 1);
        e.stop(SERVAL_STOP_NOW);
        CHECK_EQ(sockets.poll(block, open, 2), -1);
    }, SERVAL_REASON_STOPPED));
}

TEST(drain_and_stop) {
    Engine e;
    CHECK(e.run([&](serval::Block& block, Sockets& sockets) {
        Socket s = e.accepted(block, sockets, 0);
        CHECK(sockets.listen(0).try_accept(block).status() == serval::AGAIN && !sockets.ended(block));
        e.stop(SERVAL_STOP_DRAIN);
        // Accepts end, and open sockets go on; waits have their deadlines.
        char memory[8];
        for (unsigned i = 0; i < 2; i++) {
            CHECK(sockets.listen(0).accept(block).status() == serval::DRAINING && sockets.listen(1).try_accept(block).status() == serval::DRAINING);
            CHECK(sockets.ended(block));
            CHECK(is_end(s.try_recv(block, memory, 8), serval::AGAIN) && is_end(s.recv_until(block, memory, 8, block.now_ns() + 1000), serval::TIMEOUT));
            e.turn = [&](unsigned) { e.put(0, "on"), e.event(0); };
            CHECK(is_ok(s.recv(block, memory, 2), 2));
            CHECK(s.send_all(block, "yes", 3) == serval::OK && e.get(0) == "yes");
            e.turn = [](unsigned) {};
            while (s.try_recv(block, memory, 8)) {}
        }
        // The result of the accept that was in flight ends its poll.
        e.take();
        CHECK_EQ(e.accepts.size(), 1);
        e.fail(e.accepts[0].token, SERVAL_STATUS_DRAINING);
        CHECK_EQ(sockets.poll(block, &s, 1), 1);
        CHECK(sockets.listen(0).try_accept(block).status() == serval::DRAINING);
        CHECK_EQ(sockets.poll(block, &s, 1, block.now_ns() + 1000), -1);
        // The immediate stop ends a wait of any kind.
        e.turn = [&](unsigned) { e.stop(SERVAL_STOP_NOW); };
        CHECK(is_end(s.recv(block, memory, 8), serval::DRAINING));
        CHECK(is_end(s.try_recv(block, memory, 8), serval::DRAINING));
        CHECK(is_end(s.recv_until(block, memory, 8, block.now_ns() + 1000000), serval::DRAINING));
        CHECK(sockets.listen(0).accept(block).status() == serval::DRAINING);
        CHECK(sockets.connect(block, 0, block.now_ns() + 1000000).status() == serval::DRAINING);
        CHECK(s.send_all(block, std::string(10000, 'x').data(), 10000) == serval::DRAINING);
        CHECK_EQ(sockets.poll(block, &s, 1), -1);
        CHECK(s.close(block) == serval::OK);
    }, SERVAL_REASON_STOPPED));
    // Without a drain before.
    for (unsigned call = 0; call < 4; call++) {
        Engine now;
        CHECK(now.run([&](serval::Block& block, Sockets& sockets) {
            Socket s = now.accepted(block, sockets, 0);
            now.turn = [&](unsigned) { now.stop(SERVAL_STOP_NOW); };
            char memory[8];
            const uint64_t late = block.now_ns() + 1000000000;
            if (call == 0) CHECK(is_end(s.recv_until(block, memory, 8, late), serval::DRAINING));
            if (call == 1) CHECK(sockets.listen(0).accept_until(block, late).status() == serval::DRAINING);
            if (call == 2) CHECK(sockets.connect(block, 0, late).status() == serval::DRAINING);
            if (call == 3) CHECK(s.send_all(block, std::string(5000, 'x').data(), 5000, late) == serval::DRAINING);
        }, SERVAL_REASON_STOPPED));
    }
}

// A kernel may return when a receive or a connect returns DRAINING: it has not failed. Its sockets are closed, and it is called again until the
// service stops.
TEST(a_kernel_that_returns_on_a_drain_is_called_again) {
    Engine e;
    repeats = true;
    CHECK(e.run([&](serval::Block& block, Sockets& sockets) {
        char memory[8];
        e.take();
        if (calls == 1) {
            Socket s = e.accepted(block, sockets, 0), other = e.accepted(block, sockets, 2);
            CHECK(s && other && s.send_all(block, "last", 4) == serval::OK);
            e.end(0, SERVAL_STATUS_DRAINING);
            CHECK(is_end(s.recv(block, memory, 8), serval::DRAINING));
            CHECK(e.closes.empty());
            return;
        }
        CHECK_EQ(e.closes.size(), 2);
        for (unsigned i = 0; i < 2; i++) {
            CHECK_EQ(e.closes[i].message.slot, 2 * i);
            CHECK_EQ(e.closes[i].message.generation, e.generations[2 * i]);
            CHECK_EQ(e.closes[i].message.value, SERVAL_SOCKET_CLOSE_ORDERLY);
        }
        if (calls == 2) {
            e.turn = [&](unsigned) { e.fail(e.connects.back().token, SERVAL_STATUS_DRAINING); };
            CHECK(sockets.connect(block, 0).status() == serval::DRAINING);
            e.turn = [](unsigned) {};
            return;
        }
        CHECK_EQ(calls, 3);
        // The restart was put off: it serves.
        Socket s = e.accepted(block, sockets, 0);
        e.put(0, "on");
        CHECK(is_ok(s.recv(block, memory, 8), 2));
        e.turn = [&](unsigned) { e.stop(SERVAL_STOP_DRAIN); };
        CHECK(sockets.listen(0).accept(block).status() == serval::DRAINING);
    }, SERVAL_REASON_STOPPED));
    CHECK_EQ(calls, 3);
    // One that has served another connection since then returns by itself.
    Engine served;
    CHECK(served.run([&](serval::Block& block, Sockets& sockets) {
        char memory[8];
        Socket s = served.accepted(block, sockets, 0);
        served.end(0, SERVAL_STATUS_DRAINING);
        CHECK(is_end(s.recv(block, memory, 8), serval::DRAINING) && s.close(block) == serval::OK);
        CHECK(served.accepted(block, sockets, 1));
    }));
    CHECK_EQ(calls, 1);
    repeats = false;
}

// Impossible words of a stream ring end the block; so does a slot that does not exist or is the block's already.
TEST(hostile_words) {
    for (unsigned kind = 0; kind < 10; kind++) {
        Engine e;
        CHECK(e.run([&](serval::Block& block, Sockets& sockets) {
            Socket s = e.accepted(block, sockets, 0);
            std::vector<char> memory(8192);
            e.put(0, std::string(100, 'x'));
            CHECK(is_ok(s.recv(block, memory.data(), 100), 100));
            CHECK(is_ok(s.send(block, memory.data(), 100), 100) && e.get(0).size() == 100);
            // The block has seen the tail of 100; whole words are written, so four bytes of the ring are not used.
            CHECK(is_ok(s.send(block, memory.data(), 8192), 4092));
            CHECK(sockets.listen(0).try_accept(block).status() == serval::AGAIN);
            e.take();
            uint64_t* const head = e.region.stream_word(0, false, SERVAL_STREAM_HEAD);
            uint64_t* const tail = e.region.stream_word(0, true, SERVAL_STREAM_TAIL);
            const uint64_t token = e.accepts.back().token;
            if (kind == 0) *head += 4097;
            if (kind == 1) *head -= 1;
            if (kind == 2) *head = ~uint64_t{0};
            if (kind == 3) *tail += 4093;
            if (kind == 4) *tail -= 1;
            if (kind == 5) *tail = uint64_t{1} << 63;
            if (kind == 6) e.say(token, {SERVAL_SOCKET_DONE, 4, 1, SERVAL_STATUS_OK});
            if (kind == 7) e.say(token, {SERVAL_SOCKET_DONE, 1, 0, SERVAL_STATUS_OK});
            if (kind == 8) e.say(token, {SERVAL_SOCKET_DONE, 0, 2, SERVAL_STATUS_OK});
            if (kind == 9) e.say(token, {SERVAL_SOCKET_DONE, ~0u, ~0u, SERVAL_STATUS_OK});
            if (kind < 3) {
                CHECK_EQ(sockets.poll(block, &s, 1), 0);
                CHECK(is_end(s.recv(block, memory.data(), 8192), serval::RESET));
            } else if (kind < 6) {
                CHECK(is_end(s.send(block, memory.data(), 8192), serval::RESET));
            } else {
                CHECK(sockets.listen(0).accept(block).status() == serval::DRAINING);
            }
            // After that nothing waits.
            CHECK(sockets.connect(block, 0).status() == serval::DRAINING && sockets.poll(block, &s, 1) == -1);
            CHECK(s.close(block) == serval::DRAINING);
        }, SERVAL_REASON_RING_CORRUPT));
    }
}

// Messages without a meaning, and words that change the amount only.
TEST(nonsense_is_ignored) {
    Engine e;
    CHECK(e.run([&](serval::Block& block, Sockets& sockets) {
        Socket s = e.accepted(block, sockets, 0);
        CHECK(sockets.listen(0).try_accept(block).status() == serval::AGAIN);
        e.take();
        const uint64_t token = e.accepts.back().token;
        e.say(token, {SERVAL_SOCKET_DONE, 1, 1, SERVAL_STATUS_OK}, 15);
        e.say(token, {SERVAL_SOCKET_DONE, 1, 1, SERVAL_STATUS_OK}, 0);
        e.say(token, {SERVAL_SOCKET_DONE, 1, 1, SERVAL_STATUS_OK}, 24);
        e.say(token, {0, 1, 1, SERVAL_STATUS_OK});
        e.say(token, {99, 1, 1, SERVAL_STATUS_OK});
        e.say(token, {SERVAL_SOCKET_EVENT, ~0u, ~0u, ~0u});
        e.fail(0, SERVAL_STATUS_REFUSED);
        e.fail(token + 1000, SERVAL_STATUS_REFUSED);
        CHECK(sockets.listen(0).try_accept(block).status() == serval::AGAIN);
        e.take();
        CHECK(e.accepts.size() == 1 && e.closes.empty());
        // Connections that the block did not ask for are reset, each of them.
        e.open(token + 1000, 1), e.open(0, 2), e.open(~uint64_t{0}, 3);
        CHECK(sockets.listen(0).try_accept(block).status() == serval::AGAIN);
        e.take();
        CHECK_EQ(e.closes.size(), 3);
        for (const Command& c : e.closes) CHECK_EQ(c.message.value, SERVAL_SOCKET_CLOSE_RESET);
        CHECK_EQ(e.closes[2].message.slot, 3);
        // More room than there is: the block writes inside the ring.
        *e.region.stream_word(0, true, SERVAL_STREAM_TAIL) = 0;
        const std::string text(5000, 'x');
        CHECK(is_ok(s.send(block, text.data(), 5000), 4096) && is_end(s.try_send(block, "x", 1), serval::AGAIN));
    }));
    CHECK(e.others.empty());
}

// Regions that a block with sockets refuses, and the kernels that refuse sockets.
TEST(joining) {
    auto end_of = [](unsigned what) {
        Engine e(shape_of(2));
        serval_stream_entry* stream = e.region.stream_entry(1, true);
        if (what == 1) stream->capacity = 4096 + 8;
        if (what == 2) stream->capacity = 2048;
        if (what == 3) stream->capacity = uint64_t{1} << 40;
        if (what == 4) stream->capacity = 0;
        if (what == 5) stream->offset += 8;
        if (what == 6) stream->offset = e.region.bytes - 512;
        if (what == 7) stream->offset = ~uint64_t{127};
        if (what == 8) stream->version = 2;
        if (what == 9) stream->index = 0;
        if (what == 10) stream->kind = SERVAL_RING_STREAM_RX;
        if (what == 11) stream->block = 1;
        if (what == 12) e.region.entry(MQUEUE, true)->kind = SERVAL_RING_STREAM_RX;
        if (what == 13) e.region.entry(MQUEUE, false)->depth = 3;
        if (what == 14) e.runner.args.staging_bytes -= 1;
        if (what == 15) e.runner.args.ring_count = 4;
        bool ran = false;
        body = [&](serval::Block&, Sockets&) { ran = true; };
        e.runner.run(what == 16 ? "t_without" : "t_sockets");
        CHECK_EQ(ran, what == 0);
        CHECK_EQ(e.region.block()->reason, what == 0 ? SERVAL_REASON_RETURNED : SERVAL_REASON_REFUSED);
        CHECK_EQ(e.region.block()->state, SERVAL_STATE_ENDED);
    };
    for (unsigned what = 0; what <= 16; what++) end_of(what);
    // A region without sockets.
    Region region{Shape()};
    Runner runner(region);
    body = [](serval::Block&, Sockets&) { check::fail(__FILE__, __LINE__, "runs without sockets"); };
    CHECK(runner.run("t_sockets"));
    CHECK_EQ(region.block()->reason, SERVAL_REASON_REFUSED);
}

namespace {

// Serves the built-in kernel: gives it this many connections, whose peers send `requests` and end, and drains when all are closed.
// Returns what each peer got.
std::vector<std::string> serve_all(Engine& e, const char* kernel, const std::vector<std::string>& requests) {
    std::vector<std::string> answers(requests.size());
    std::vector<size_t> put(requests.size());
    struct Peer {
        size_t of;
        bool open;
    };
    std::vector<Peer> peers(e.region.shape.sockets, Peer{0, false});
    size_t next = 0, closed = 0;
    check::Random random(11);
    e.turn = [&](unsigned) {
        for (const Command& c : e.closes) {
            Peer& peer = peers[c.message.slot];
            if (!peer.open || c.message.generation != e.generations[c.message.slot]) continue;
            answers[peer.of] += e.get(c.message.slot);
            peer.open = false;
            closed++;
        }
        e.closes.clear();
        for (uint32_t slot = 0; slot < peers.size(); slot++) {
            Peer& peer = peers[slot];
            if (!peer.open && next < requests.size() && !e.accepts.empty()) {
                e.open(e.accepts.back().token, slot);
                e.accepts.pop_back();
                peer = {next++, true};
            }
            if (!peer.open) continue;
            answers[peer.of] += e.get(slot, 1 + random.below(3000));
            put[peer.of] += e.put(slot, requests[peer.of].substr(put[peer.of], 1 + random.below(5000)));
            if (put[peer.of] == requests[peer.of].size()) e.end(slot, SERVAL_STATUS_CLOSED);
            e.event(slot);
        }
        if (closed == requests.size()) e.stop(SERVAL_STOP_DRAIN);
    };
    if (!e.runner.run(kernel)) check::fail(__FILE__, __LINE__, "the kernel is there");
    check::equal(__FILE__, __LINE__, "reason", e.region.block()->reason, SERVAL_REASON_STOPPED);
    return answers;
}

std::string matrix(check::Random& random, unsigned n) {
    std::string bytes;
    for (unsigned i = 0; i < n * n; i++) {
        const float v = static_cast<float>(random.below(2001)) / 1000.0f - 1.0f;
        bytes.append(reinterpret_cast<const char*>(&v), 4);
    }
    return bytes;
}
float entry(const std::string& bytes, size_t i) {
    float v;
    std::memcpy(&v, bytes.data() + 4 * i, 4);
    return v;
}

}  // namespace

TEST(stream_echo_sends_back_every_byte) {
    for (unsigned slots : {1u, 3u, 20u}) {
        Engine e(shape_of(slots));
        check::Random random(slots);
        std::vector<std::string> requests;
        for (unsigned i = 0; i < 40; i++) requests.push_back(noise(random, i % 4 ? random.below(20000) : i));
        const std::vector<std::string> answers = serve_all(e, "stream_echo", requests);
        for (unsigned i = 0; i < 40; i++) CHECK(answers[i] == requests[i]);
    }
}

TEST(matmul_multiplies) {
    Engine e(shape_of(3, 16384));
    check::Random random(5);
    std::vector<std::string> requests;
    const unsigned sizes[] = {1, 2, 3, 31, 32, 33, 64, 100};
    for (unsigned n : sizes) {
        std::string one(reinterpret_cast<const char*>(&n), 4);
        one += matrix(random, n);
        one += matrix(random, n);
        requests.push_back(one + one);  // two requests
    }
    // Those of an impossible size are closed without an answer, and so is a part of one.
    for (uint32_t n : {0u, 513u, ~0u}) requests.push_back(std::string(reinterpret_cast<const char*>(&n), 4) + "rest");
    requests.push_back(requests[5].substr(0, 1000));
    const std::vector<std::string> answers = serve_all(e, "matmul", requests);
    for (unsigned r = 0; r < 8; r++) {
        const unsigned n = sizes[r];
        CHECK_EQ(answers[r].size(), 8 * n * n);
        CHECK(answers[r].substr(0, 4 * n * n) == answers[r].substr(4 * n * n));
        const std::string a = requests[r].substr(4, 4 * n * n), b = requests[r].substr(4 + 4 * n * n, 4 * n * n);
        for (unsigned i = 0; i < n; i++)
            for (unsigned j = 0; j < n; j++) {
                double sum = 0;
                for (unsigned k = 0; k < n; k++) sum += static_cast<double>(entry(a, i * n + k)) * entry(b, k * n + j);
                const double error = entry(answers[r], i * n + j) - sum;
                CHECK(error < 1e-4 && error > -1e-4);
            }
    }
    for (unsigned r = 8; r < requests.size(); r++) CHECK(answers[r].empty());
}

int main(int argc, char** argv) { return check::run_all(argc, argv); }
