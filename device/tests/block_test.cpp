// Blocks: what a kernel sees of an mqueue, and how it starts, waits, stops and ends. The wait callback acts as the engine,
// on the same thread, so that every step is deterministic.
#include <string>

#include "param_text.cpp"
#include "region.h"

using namespace testing;

namespace {
// Recorded by the kernels below for their test.
struct Notes {
    unsigned messages = 0, attempts = 0, timeouts = 0;
    bool ended = false, sent = true;
    std::vector<uint64_t> tags;
    std::vector<uint8_t> statuses;
} notes;
}  // namespace

SERVAL_KERNEL(t_echo) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, msg.len());
        std::memcpy(reply.as<uint8_t>(), msg.as<uint8_t>(), msg.len());
        notes.sent = q.send(block, reply);
        notes.messages++;
    }
    notes.ended = q.ended(block);
}

SERVAL_KERNEL(t_return) (serval::Block&, serval::Mqueue&) {}

SERVAL_KERNEL(t_empty_reply) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, static_cast<uint32_t>(block.param("len", 8)));
        if (!reply) notes.attempts++;
        q.send(block, reply);
    }
}

// Fills in the reply without checking it.
SERVAL_KERNEL(t_fill) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, static_cast<uint32_t>(block.param("len", 8)));
        if (reply) notes.attempts++;
        for (uint64_t i = 0; i < reply.len(); i += 4096) reply.as<uint8_t>()[i] = 's';
        if (reply.len()) reply.as<uint8_t>()[reply.len() - 1] = 's';
        q.send(block, reply);
    }
}

SERVAL_KERNEL(t_drop) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) q.drop(block, msg, msg.len() ? serval::REJECTED : serval::BAD_LENGTH);
}

SERVAL_KERNEL(t_send_twice) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, 4);
        q.send(block, reply);
        notes.sent = q.send(block, reply);
        notes.messages++;
    }
}

SERVAL_KERNEL(t_overrun) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, 4);
        reply.as<uint8_t>()[8] = 1;
        notes.sent = q.send(block, reply);
    }
}

SERVAL_KERNEL(t_try) (serval::Block& block, serval::Mqueue& q) {
    while (!q.ended(block)) {
        notes.attempts++;
        if (auto msg = q.try_recv(block)) notes.messages++;
    }
}

SERVAL_KERNEL(t_until) (serval::Block& block, serval::Mqueue& q) {
    while (!q.ended(block)) {
        if (q.recv_until(block, block.now_ns() + 1000))
            notes.messages++;
        else
            notes.timeouts++;
    }
}

// Deadlines that have already passed: every receive is a try.
SERVAL_KERNEL(t_past) (serval::Block& block, serval::Mqueue& q) {
    while (!q.ended(block)) q.recv_until(block, block.now_ns());
}

SERVAL_KERNEL(t_past_backend) (serval::Block& block, serval::Mqueue& q) {
    while (!q.ended(block)) q.backend(0).recv_until(block, block.now_ns());
}

SERVAL_KERNEL(t_sleep) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        block.sleep_until(block.now_ns() + 5000);
        q.drop(block, msg, serval::REJECTED);
    }
}

// Forwards each request to backend 0 and replies with its answer.
SERVAL_KERNEL(t_forward) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        serval::Backend& db = q.backend(0);
        notes.sent = db.send(block, msg.as<uint8_t>(), msg.len(), 1000 + notes.messages++);
        auto answer = db.recv(block);
        notes.statuses.push_back(answer ? answer.status() : 255);
        if (answer) notes.tags.push_back(answer.tag());
        auto reply = q.reply(block, msg, answer.len());
        if (answer) std::memcpy(reply.as<uint8_t>(), answer.as<uint8_t>(), answer.len());
        q.send(block, reply);
    }
}

// Sends to backend 0 without end and receives no answer.
SERVAL_KERNEL(t_flood) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block))
        while ((notes.sent = q.backend(0).send(block, msg.as<uint8_t>(), msg.len(), 0))) notes.attempts++;
}

// Polls a backend without an outstanding request before it polls for requests.
SERVAL_KERNEL(t_try_both) (serval::Block& block, serval::Mqueue& q) {
    while (!q.ended(block)) {
        if (q.backend(0).try_recv(block) || q.backend(0).recv_until(block, block.now_ns())) notes.timeouts++;
        if (auto msg = q.try_recv(block)) {
            notes.messages++;
            q.drop(block, msg, serval::REJECTED);
        }
    }
}

namespace {

// A region with one block, its runner and the engine's ends of the server mqueue.
struct Bench {
    Region region;
    Runner runner;
    Producer rx;
    Consumer tx;
    std::vector<uint8_t> data;
    explicit Bench(const Shape& s = Shape()) : region(s), runner(region), rx(region.producer(0, false)), tx(region.consumer(0, true)) {
        notes = Notes();
        runner.waiting = [this](uint32_t, uint64_t) { stop(SERVAL_STOP_NOW); };
    }
    void stop(uint64_t how) { region.engine()->stop = how; }
    bool push(uint64_t token, const std::string& text) {
        return send(rx, message(token, static_cast<uint32_t>(text.size())), text.data());
    }
    bool pop() { return recv(tx, data) == Look::FOUND; }
    std::string text() const { return std::string(data.begin(), data.end()); }
    serval_block_words* words() { return region.block(); }
};

}  // namespace

TEST(echo_answers_every_message) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        s.start = (1ull << 32) - 5;
        Bench b(s);
        check::Random random(protocol);
        std::vector<std::string> sent;
        unsigned answered = 0;
        b.runner.waiting = [&](uint32_t why, uint64_t deadline) {
            if (why != SERVAL_WAIT_RX || deadline != SERVAL_NO_DEADLINE) check::fail(__FILE__, __LINE__, "waits for RX");
            if (b.words()->state != SERVAL_STATE_READY) check::fail(__FILE__, __LINE__, "ready while it runs");
            while (b.pop()) {
                if (b.tx.message.token != 77 + answered || b.text() != sent[answered] || b.tx.message.kind != SERVAL_KIND_MESSAGE)
                    check::fail(__FILE__, __LINE__, "the reply is the request, with its token");
                answered++;
            }
            if (b.words()->received != sent.size() || b.words()->sent != answered) check::fail(__FILE__, __LINE__, "counts");
            if (answered >= 500) return b.stop(SERVAL_STOP_DRAIN);
            for (uint64_t n = 1 + random.below(8); n > 0; n--) {
                std::string text(random.below(257), '\0');
                random.fill(&text[0], text.size());
                if (b.push(77 + sent.size(), text)) sent.push_back(text);
            }
        };
        CHECK(b.runner.run("t_echo"));
        CHECK(answered >= 500);
        CHECK_EQ(answered, sent.size());
        CHECK_EQ(notes.messages, answered);
        CHECK(notes.ended);
        CHECK_EQ(b.words()->state, SERVAL_STATE_ENDED);
        CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
        CHECK_EQ(b.words()->dropped, 0);
    }
}

TEST(drain_answers_what_is_in_the_ring) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        Bench b(s);
        for (int i = 0; i < 5; i++) CHECK(b.push(i, "hello"));
        b.stop(SERVAL_STOP_DRAIN);
        CHECK(b.runner.run("t_echo"));
        for (int i = 0; i < 5; i++) CHECK(b.pop());
        CHECK(!b.pop());
        CHECK_EQ(b.runner.waits[SERVAL_WAIT_RX], 0);
        CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
    }
}

TEST(stop_now_leaves_the_ring_alone) {
    for (uint64_t how : {uint64_t{SERVAL_STOP_NOW}, uint64_t{3}, ~uint64_t{0}}) {
        Bench b;
        CHECK(b.push(1, "hello"));
        b.stop(how);
        CHECK(b.runner.run("t_echo"));
        CHECK_EQ(notes.messages, 0);
        CHECK(notes.ended);
        CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
        CHECK_EQ(b.words()->received, 0);
    }
}

TEST(a_kernel_that_returns_says_so) {
    Bench b;
    CHECK(b.runner.run("t_return"));
    CHECK_EQ(b.words()->state, SERVAL_STATE_ENDED);
    CHECK_EQ(b.words()->reason, SERVAL_REASON_RETURNED);
    Bench c;
    c.stop(SERVAL_STOP_DRAIN);
    CHECK(c.runner.run("t_return"));
    CHECK_EQ(c.words()->reason, SERVAL_REASON_STOPPED);
}

TEST(send_waits_for_credit) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        s.depth = 2;
        Bench b(s);
        unsigned pushed = 0, popped = 0;
        b.runner.waiting = [&](uint32_t why, uint64_t) {
            if (why == SERVAL_WAIT_TX) {
                if (b.pop()) popped++;
                return;
            }
            while (pushed < 20 && b.push(pushed, "x")) pushed++;
            if (pushed == 20 && room(b.rx, 1) == Look::FOUND && *b.region.tail(0, false) == 20) b.stop(SERVAL_STOP_DRAIN);
        };
        CHECK(b.runner.run("t_echo"));
        while (b.pop()) popped++;
        CHECK_EQ(popped, 20);
        CHECK(b.runner.waits[SERVAL_WAIT_TX] > 0);
    }
}

TEST(send_gives_up_when_stopped_now) {
    Shape s;
    s.depth = 1;
    Bench b(s);
    CHECK(b.push(1, "a"));
    b.runner.waiting = [&](uint32_t why, uint64_t) {
        if (why == SERVAL_WAIT_RX) b.push(2, "b");
        if (why == SERVAL_WAIT_TX) b.stop(SERVAL_STOP_NOW);
    };
    CHECK(b.runner.run("t_echo"));
    CHECK_EQ(b.runner.waits[SERVAL_WAIT_TX], 1);
    CHECK_EQ(notes.messages, 2);
    CHECK(!notes.sent);
    CHECK_EQ(b.words()->sent, 1);
    CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
}

TEST(send_still_works_while_draining) {
    Shape s;
    s.depth = 1;
    Bench b(s);
    CHECK(b.push(1, "a"));
    b.runner.waiting = [&](uint32_t why, uint64_t) {
        if (why == SERVAL_WAIT_RX) {
            b.push(2, "b");
            b.stop(SERVAL_STOP_DRAIN);
        }
        if (why == SERVAL_WAIT_TX) b.pop();
    };
    CHECK(b.runner.run("t_echo"));
    CHECK(notes.sent);
    CHECK_EQ(b.words()->sent, 2);
}

TEST(budget_makes_a_busy_block_wait) {
    Shape s;
    s.depth = 32;
    Bench b(s);
    b.runner.args.budget = 8;
    for (int i = 0; i < 20; i++) CHECK(b.push(i, "x"));
    std::vector<uint64_t> at;
    b.runner.waiting = [&](uint32_t why, uint64_t) {
        if (why == SERVAL_WAIT_BUDGET) at.push_back(notes.messages);
        if (why == SERVAL_WAIT_RX) b.stop(SERVAL_STOP_NOW);
    };
    CHECK(b.runner.run("t_echo"));
    CHECK_EQ(at.size(), 2);
    CHECK_EQ(at[0], 8);
    CHECK_EQ(at[1], 16);
    CHECK_EQ(notes.messages, 20);
    CHECK_EQ(b.runner.waits[SERVAL_WAIT_RX], 1);
}

TEST(try_recv_yields_and_notices_the_stop) {
    Bench b;
    b.runner.args.budget = 10;
    unsigned rounds = 0;
    b.runner.waiting = [&](uint32_t why, uint64_t) {
        if (why != SERVAL_WAIT_BUDGET) check::fail(__FILE__, __LINE__, "try_recv does not wait");
        if (rounds == 1) b.push(1, "x");
        if (rounds++ == 3) b.stop(SERVAL_STOP_DRAIN);
    };
    CHECK(b.runner.run("t_try"));
    CHECK_EQ(notes.messages, 1);
    CHECK_EQ(notes.attempts, 41);
    CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
}

namespace {
uint64_t fake_now = 1;
uint64_t fake_clock(void*) { return fake_now; }
}  // namespace

TEST(recv_until_ends_at_its_deadline) {
    Bench b;
    fake_now = 50000;
    b.runner.args.now = reinterpret_cast<uint64_t>(&fake_clock);
    unsigned rounds = 0;
    b.runner.waiting = [&](uint32_t why, uint64_t deadline) {
        if (why != SERVAL_WAIT_RX || deadline < fake_now || deadline > fake_now + 1000)
            check::fail(__FILE__, __LINE__, "the wait gets the deadline");
        fake_now += 600;  // wakes once before and once after it
        if (++rounds == 6) b.push(1, "x");
        if (rounds == 9) b.stop(SERVAL_STOP_NOW);
    };
    CHECK(b.runner.run("t_until"));
    CHECK_EQ(notes.messages, 1);
    CHECK_EQ(notes.timeouts, 4);  // two before the message, one after, one for the stop
}

TEST(sleep_waits_for_the_time) {
    Bench b;
    fake_now = 1000;
    b.runner.args.now = reinterpret_cast<uint64_t>(&fake_clock);
    CHECK(b.push(1, "x"));
    b.runner.waiting = [&](uint32_t why, uint64_t deadline) {
        if (why == SERVAL_WAIT_TIME) {
            if (deadline != 6000) check::fail(__FILE__, __LINE__, "the wait gets the deadline");
            fake_now += 2000;
        } else {
            b.stop(SERVAL_STOP_NOW);
        }
    };
    CHECK(b.runner.run("t_sleep"));
    CHECK_EQ(b.runner.waits[SERVAL_WAIT_TIME], 3);
    CHECK_EQ(b.words()->dropped, 1);
}

TEST(a_silent_engine_ends_the_block) {
    Bench b;
    fake_now = 1;
    b.runner.args.now = reinterpret_cast<uint64_t>(&fake_clock);
    b.region.engine()->heartbeat = 5;
    unsigned rounds = 0;
    b.runner.waiting = [&](uint32_t, uint64_t) {
        fake_now += 500000000;
        if (rounds++ < 100) b.region.engine()->heartbeat++;
        if (rounds == 1000) b.stop(SERVAL_STOP_NOW);
    };
    CHECK(b.runner.run("t_echo"));
    CHECK_EQ(b.words()->reason, SERVAL_REASON_ENGINE_LOST);
    // Half a second per round: lost after five seconds of silence, not before.
    CHECK(rounds > 100 + 9 && rounds < 100 + 14);
}

TEST(a_suspended_machine_is_not_a_lost_engine) {
    Bench b;
    fake_now = 1;
    b.runner.args.now = reinterpret_cast<uint64_t>(&fake_clock);
    unsigned rounds = 0;
    b.runner.waiting = [&](uint32_t, uint64_t) {
        rounds++;
        fake_now += rounds % 4 == 0 ? 3600000000000u : 1000;  // asleep for an hour
        if (rounds % 4 == 2) b.region.engine()->heartbeat++;
        if (rounds == 40) b.stop(SERVAL_STOP_NOW);
    };
    CHECK(b.runner.run("t_echo"));
    CHECK_EQ(rounds, 40);
    CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
}

// No single wait of these kernels is long enough to notice the loss.
TEST(a_lost_engine_ends_kernels_that_never_wait_long) {
    for (const char* kernel : {"t_try", "t_until", "t_past", "t_past_backend"}) {
        Shape s;
        s.backends = 1;
        Bench b(s);
        b.runner.args.budget = 4;
        fake_now = 1;
        b.runner.args.now = reinterpret_cast<uint64_t>(&fake_clock);
        unsigned rounds = 0;
        b.runner.waiting = [&](uint32_t, uint64_t) {
            fake_now += 500000000;
            if (rounds++ < 100) b.region.engine()->heartbeat++;
            if (rounds == 1000) b.stop(SERVAL_STOP_NOW);
        };
        CHECK(b.runner.run(kernel));
        CHECK_EQ(b.words()->reason, SERVAL_REASON_ENGINE_LOST);
        CHECK(rounds > 100 + 9 && rounds < 100 + 14);
    }
}

TEST(a_lost_engine_ends_a_wait_for_credit) {
    Shape s;
    s.depth = 1;
    Bench b(s);
    fake_now = 1;
    b.runner.args.now = reinterpret_cast<uint64_t>(&fake_clock);
    CHECK(b.push(1, "a"));
    b.runner.waiting = [&](uint32_t why, uint64_t) {
        if (why == SERVAL_WAIT_RX) b.push(2, "b");
        fake_now += 900000000;
    };
    CHECK(b.runner.run("t_echo"));
    CHECK_EQ(b.words()->reason, SERVAL_REASON_ENGINE_LOST);
    CHECK(!notes.sent);
}

TEST(corrupt_rings_end_the_block) {
    for (bool tx : {false, true}) {
        Shape s;
        s.depth = 2;
        Bench b(s);
        CHECK(b.push(1, "a"));
        CHECK(b.push(2, "b"));
        b.runner.waiting = [&](uint32_t, uint64_t) {
            if (tx) {
                *b.region.tail(0, true) = 1000;
                b.push(3, "c");
            } else {
                *b.region.head(0, false) = 1000;
            }
        };
        CHECK(b.runner.run("t_echo"));
        CHECK_EQ(b.words()->state, SERVAL_STATE_ENDED);
        CHECK_EQ(b.words()->reason, SERVAL_REASON_RING_CORRUPT);
    }
    // A kind that is invalid in an RX ring.
    Bench b;
    CHECK(send(b.rx, message(1, 0, SERVAL_KIND_DROP), nullptr));
    CHECK(b.runner.run("t_echo"));
    CHECK_EQ(b.words()->reason, SERVAL_REASON_RING_CORRUPT);
}

TEST(contract_breaches_end_the_block) {
    for (const char* kernel : {"t_send_twice", "t_overrun"}) {
        Bench b;
        CHECK(b.push(1, "a"));
        CHECK(b.push(2, "b"));
        CHECK(b.runner.run(kernel));
        CHECK(!notes.sent);
        CHECK(notes.messages < 2);
        CHECK_EQ(b.words()->reason, SERVAL_REASON_CONTRACT);
        CHECK_EQ(b.runner.waits[SERVAL_WAIT_RX], 0);
    }
}

TEST(replies_are_zeroed) {
    Bench b;
    CHECK(b.push(1, "a"));
    b.runner.param("len", 256);
    CHECK(b.runner.run("t_empty_reply"));
    CHECK(b.pop());
    CHECK(b.text() == std::string(256, '\0'));
}

TEST(replies_that_are_too_long_are_drops) {
    Bench b;
    CHECK(b.push(1, "a"));
    b.runner.param("len", 257);
    CHECK(b.runner.run("t_empty_reply"));
    CHECK_EQ(notes.attempts, 1);
    CHECK(b.pop());
    CHECK_EQ(b.tx.message.kind, SERVAL_KIND_DROP);
    CHECK_EQ(b.tx.message.status, SERVAL_STATUS_TOO_LONG);
    CHECK_EQ(b.tx.message.token, 1);
    CHECK_EQ(b.words()->dropped, 1);
    CHECK_EQ(b.words()->sent, 0);
    CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
}

TEST(writing_to_a_reply_that_is_too_long_is_harmless) {
    for (double len : {257.0, 1e6, 4294967295.0}) {
        Bench b;
        CHECK(b.push(1, "a"));
        b.runner.param("len", len);
        CHECK(b.runner.run("t_fill"));
        CHECK_EQ(notes.attempts, 0);
        CHECK(b.pop());
        CHECK_EQ(b.tx.message.kind, SERVAL_KIND_DROP);
        CHECK_EQ(b.tx.message.status, SERVAL_STATUS_TOO_LONG);
        CHECK_EQ(b.data.size(), 0);
        CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
        // None of it is in a reply.
        Bench c;
        CHECK(c.push(2, "b"));
        c.runner.param("len", 256);
        CHECK(c.runner.run("t_empty_reply"));
        CHECK(c.pop());
        CHECK(c.text() == std::string(256, '\0'));
    }
}

TEST(a_sink_that_the_runtime_gives_is_used_if_it_is_long_enough) {
    alignas(16) static uint8_t small[4096];
    for (uint64_t bytes : {uint64_t{0}, uint64_t{sizeof small}, serval::detail::SINK_BYTES}) {
        Bench b;
        CHECK(b.push(1, "a"));
        b.runner.param("len", 1e6);
        b.runner.args.sink = reinterpret_cast<uint64_t>(small);
        b.runner.args.sink_bytes = bytes;
        if (bytes == serval::detail::SINK_BYTES) b.runner.args.sink = reinterpret_cast<uint64_t>(serval::detail::map_sink());
        CHECK(b.runner.run("t_fill"));
        CHECK(b.pop());
        CHECK_EQ(b.tx.message.status, SERVAL_STATUS_TOO_LONG);
        CHECK_EQ(small[0], 0);
        if (bytes == serval::detail::SINK_BYTES) {
            void* const sink = reinterpret_cast<void*>(b.runner.args.sink);
            CHECK_EQ(*static_cast<uint8_t*>(sink), 's');
            munmap(sink, bytes);
        }
    }
}

TEST(drops_carry_token_and_reason) {
    Bench b;
    CHECK(b.push(11, ""));
    CHECK(b.push(12, "x"));
    CHECK(b.runner.run("t_drop"));
    for (uint64_t token : {11, 12}) {
        CHECK(b.pop());
        CHECK_EQ(b.tx.message.kind, SERVAL_KIND_DROP);
        CHECK_EQ(b.tx.message.token, token);
        CHECK_EQ(b.tx.message.len, 0);
        CHECK_EQ(b.tx.message.status, token == 11 ? SERVAL_STATUS_BAD_LENGTH : SERVAL_STATUS_REJECTED);
    }
    CHECK_EQ(b.words()->dropped, 2);
}

TEST(backends_answer_with_tag_and_status) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        s.blocks = 2;
        s.backends = 2;
        Bench b(s);
        // The block under test is the second: its mqueues are 3, 4 and 5.
        Runner second(b.region, 1);
        Producer rx = b.region.producer(3, false), db_rx = b.region.producer(4, false);
        Consumer tx = b.region.consumer(3, true), db_tx = b.region.consumer(4, true);
        for (int i = 0; i < 3; i++) CHECK(send(rx, message(i, 2), "rq"));
        const uint8_t statuses[] = {serval::OK, serval::TIMEOUT, serval::REFUSED};
        unsigned step = 0;
        std::vector<uint8_t> data;
        second.waiting = [&](uint32_t why, uint64_t) {
            if (why == SERVAL_WAIT_RX) return b.stop(SERVAL_STOP_DRAIN);
            if (recv(db_tx, data) != Look::FOUND || data.size() != 2 || db_tx.message.tag != 1000 + step)
                check::fail(__FILE__, __LINE__, "the request is in the backend's ring");
            Header h = message(0, 3, SERVAL_KIND_MESSAGE, statuses[step]);
            h.tag = db_tx.message.tag;
            send(db_rx, h, "ans");
            step++;
        };
        CHECK(second.run("t_forward"));
        CHECK_EQ(step, 3);
        CHECK_EQ(notes.tags.size(), 3);
        for (unsigned i = 0; i < 3; i++) {
            CHECK_EQ(notes.tags[i], 1000 + i);
            CHECK_EQ(notes.statuses[i], statuses[i]);
            CHECK(recv(tx, data) == Look::FOUND);
            CHECK_EQ(tx.message.token, i);
            CHECK_EQ(data.size(), 3);
        }
        CHECK_EQ(b.region.block(1)->reason, SERVAL_REASON_STOPPED);
        CHECK_EQ(b.region.block(0)->state, SERVAL_STATE_ABSENT);
    }
}

TEST(draining_waits_for_backend_answers) {
    Shape s;
    s.backends = 1;
    Bench b(s);
    Producer db_rx = b.region.producer(1, false);
    CHECK(b.push(5, "rq"));
    unsigned rounds = 0;
    b.runner.waiting = [&](uint32_t why, uint64_t) {
        if (why != SERVAL_WAIT_BACKEND) return b.stop(SERVAL_STOP_NOW);
        b.stop(SERVAL_STOP_DRAIN);
        if (++rounds == 3) send(db_rx, message(0, 2), "ok");
    };
    CHECK(b.runner.run("t_forward"));
    CHECK_EQ(rounds, 3);
    CHECK(b.pop());
    CHECK(b.text() == "ok");
    CHECK_EQ(b.runner.waits[SERVAL_WAIT_RX], 0);
}

TEST(stop_now_ends_a_wait_for_a_backend) {
    Shape s;
    s.backends = 1;
    Bench b(s);
    CHECK(b.push(5, "rq"));
    CHECK(b.runner.run("t_forward"));
    CHECK_EQ(notes.statuses.size(), 1);
    CHECK_EQ(notes.statuses[0], 255);
    CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
}

// A request that was not sent has no answer: a wait for it would never end.
TEST(a_wait_for_an_answer_to_nothing_breaks_the_contract) {
    for (bool drains : {false, true}) {
        Shape s;
        s.backends = 1;
        Bench b(s);
        // The request is longer than the backend's maximum, and the kernel ignores the error.
        b.region.entry(1, true)->inline_bytes = 8;
        b.region.entry(1, true)->message_bytes_max = 4;
        CHECK(b.push(5, "longer than four"));
        if (drains) b.stop(SERVAL_STOP_DRAIN);
        CHECK(b.runner.run("t_forward"));
        CHECK(!notes.sent);
        CHECK_EQ(*b.region.head(1, true), 0);
        CHECK_EQ(notes.statuses.size(), 1);
        CHECK_EQ(b.runner.waits[SERVAL_WAIT_BACKEND], 0);
        CHECK_EQ(b.words()->reason, drains ? SERVAL_REASON_STOPPED : SERVAL_REASON_CONTRACT);
    }
}

TEST(a_look_at_an_idle_backend_does_not_cut_a_drain_short) {
    Shape s;
    s.backends = 1;
    Bench b(s);
    for (int i = 0; i < 3; i++) CHECK(b.push(i, "rq"));
    b.stop(SERVAL_STOP_DRAIN);
    b.runner.waiting = [](uint32_t, uint64_t) {};
    CHECK(b.runner.run("t_try_both"));
    CHECK_EQ(notes.messages, 3);
    CHECK_EQ(notes.timeouts, 0);
    CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
}

TEST(a_block_that_asks_on_and_takes_no_answers_breaks_the_contract) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        s.depth = 2;
        s.backends = 1;
        Bench b(s);
        Producer db_rx = b.region.producer(1, false);
        Consumer db_tx = b.region.consumer(1, true);
        CHECK(b.push(5, "rq"));
        unsigned answered = 0;
        b.runner.waiting = [&](uint32_t why, uint64_t) {
            if (why != SERVAL_WAIT_TX) check::fail(__FILE__, __LINE__, "waits for room");
            // As the engine: takes requests that have room for their answer.
            while (room(db_rx, 2) == Look::FOUND && recv(db_tx, b.data) == Look::FOUND) answered += send(db_rx, message(0, 2), "ok");
        };
        CHECK(b.runner.run("t_flood"));
        CHECK_EQ(answered, s.depth);
        CHECK_EQ(notes.attempts, 2 * s.depth);
        CHECK(b.runner.waits[SERVAL_WAIT_TX] < 100);
        CHECK_EQ(b.words()->reason, SERVAL_REASON_CONTRACT);
    }
}

// Answers in an arena: only the engine knows how many have room, so the block detects the wait by a time without progress.
TEST(a_block_that_fills_an_arena_with_answers_breaks_the_contract) {
    for (bool answers : {true, false}) {
        Shape s;
        s.len_max = 512;
        s.arena_bytes = 1024;
        s.backends = 1;
        Bench b(s);
        Producer db_rx = b.region.producer(1, false);
        Consumer db_tx = b.region.consumer(1, true);
        fake_now = 1;
        b.runner.args.now = reinterpret_cast<uint64_t>(&fake_clock);
        CHECK(b.push(5, "rq"));
        const std::string answer(512, 'a');
        unsigned taken = 0;
        b.runner.waiting = [&](uint32_t, uint64_t) {
            fake_now += 100000000;
            b.region.engine()->heartbeat++;
            // If a request that was taken has no answer, the engine waits for a slow backend, which is not the block's fault.
            for (; taken < 2 && recv(db_tx, b.data) == Look::FOUND; taken++)
                if (answers || taken == 0) send(db_rx, message(0, 512), answer.data());
            if (fake_now > 100000000000) b.stop(SERVAL_STOP_NOW);
        };
        CHECK(b.runner.run("t_flood"));
        CHECK_EQ(notes.attempts, 2 + s.depth);
        CHECK(!notes.sent);
        CHECK_EQ(b.words()->reason, answers ? SERVAL_REASON_CONTRACT : SERVAL_REASON_STOPPED);
        CHECK_EQ(fake_now > 10000000000 && fake_now < 30000000000, answers);
    }
}

TEST(unsuitable_arguments_are_refused) {
    using Change = void (*)(Bench&);
    const Change changes[] = {
        [](Bench& b) { b.runner.args.abi_version++; },
        [](Bench& b) { b.runner.args.staging = 0; },
        [](Bench& b) { b.runner.args.staging += 8; },
        [](Bench& b) { b.runner.args.staging_stride = 192; },
        [](Bench& b) { b.runner.args.staging_stride += 8; },
        [](Bench& b) { b.runner.args.staging_bytes--; },
        [](Bench& b) { b.runner.args.param_count = 33; },
        [](Bench& b) { b.runner.args.param_count = 1; },
        [](Bench& b) { b.runner.args.wait = 0; },
        [](Bench& b) { b.region.entry(0, false)->kind = SERVAL_RING_CLIENT_RX; },
        [](Bench& b) { b.region.entry(0, true)->kind = SERVAL_RING_SERVER_RX; },
        [](Bench& b) { b.region.entry(0, false)->kind = 0; },
        [](Bench& b) { b.region.entry(0, false)->kind = 77; },
        [](Bench& b) { b.region.entry(0, false)->version++; },
        [](Bench& b) { b.region.entry(0, true)->block++; },
        [](Bench& b) { b.region.entry(0, true)->index++; },
        [](Bench& b) { b.runner.args.ring_first = 1; },
        [](Bench& b) { b.runner.args.ring_first = ~0u; },
        [](Bench& b) { b.runner.args.ring_count = 0; },
        [](Bench& b) { b.runner.args.ring_count = 1; },
        [](Bench& b) { b.runner.args.ring_count = 3; },
        [](Bench& b) { b.runner.args.ring_count = ~0u; },
        [](Bench& b) { b.region.entry(0, false)->protocol = 0; },
        [](Bench& b) { b.region.entry(0, false)->protocol = 4; },
        [](Bench& b) { b.region.entry(0, false)->depth = 0; },
        [](Bench& b) { b.region.entry(0, false)->depth = 6; },
        [](Bench& b) { b.region.entry(0, false)->depth = 2 * SERVAL_DEPTH_MAX; },
        [](Bench& b) { b.region.entry(0, false)->depth = SERVAL_DEPTH_MAX; },
        [](Bench& b) { b.region.entry(0, false)->slot_stride -= 64; },
        [](Bench& b) { b.region.entry(0, false)->slot_stride += 8; },
        [](Bench& b) { b.region.entry(0, false)->inline_bytes = 0; },
        [](Bench& b) { b.region.entry(0, false)->inline_bytes = 12; },
        [](Bench& b) { b.region.entry(0, false)->inline_bytes = 2048; },
        [](Bench& b) { b.region.entry(0, false)->message_bytes_max = 248; },
        [](Bench& b) { b.region.entry(0, true)->message_bytes_max = 0; },
        [](Bench& b) { b.region.entry(0, true)->message_bytes_max = 257; },
        [](Bench& b) { b.region.entry(0, true)->message_bytes_max = ~0u; },
        [](Bench& b) { b.region.entry(0, true)->slots_offset = b.region.bytes; },
        [](Bench& b) { b.region.entry(0, true)->slots_offset = ~uint64_t{63}; },
        [](Bench& b) { b.region.entry(0, true)->slots_offset += 4; },
        [](Bench& b) { b.region.entry(0, true)->head_offset += 4; },
        [](Bench& b) { b.region.entry(0, true)->head_offset = b.region.bytes; },
        [](Bench& b) { b.region.entry(0, true)->tail_offset = ~uint64_t{7}; },
        [](Bench& b) { b.region.entry(0, true)->arena_bytes = b.region.bytes + 8; },
        [](Bench& b) { b.region.entry(0, true)->arena_offset = 4; },
        [](Bench& b) { *b.region.head(0, true) = 9; },
        [](Bench& b) { *b.region.tail(0, true) = 1; },
    };
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        Bench b;
        CHECK(b.push(1, "a"));
        changes[i](b);
        CHECK(b.runner.run("t_echo"));
        if (b.words()->reason != SERVAL_REASON_REFUSED || b.words()->state != SERVAL_STATE_ENDED || notes.messages) {
            check::fail(__FILE__, __LINE__, "refused");
            std::printf("    change %zu\n", i);
        }
    }
}

TEST(unknown_regions_are_left_alone) {
    using Change = void (*)(Bench&);
    const Change changes[] = {
        [](Bench& b) { b.region.header()->magic++; },
        [](Bench& b) { b.region.header()->abi_version++; },
        [](Bench& b) { b.region.header()->block_count = 0; },
        [](Bench& b) { b.region.header()->block_count = ~0u; },
        [](Bench& b) { b.region.header()->ring_count = 0; },
        [](Bench& b) { b.region.header()->ring_count = ~0u; },
        [](Bench& b) { b.region.header()->ring_count = SERVAL_RINGS_MAX; },
        [](Bench& b) { b.region.header()->blocks_offset = b.region.bytes - 64; },
        [](Bench& b) { b.region.header()->directory_offset = ~uint64_t{127}; },
        [](Bench& b) { b.region.header()->region_bytes++; },
        [](Bench& b) { b.runner.args.region_bytes = 511; },
        [](Bench& b) { b.runner.args.region_bytes--; },
        [](Bench& b) { b.runner.args.block = 1; },
        [](Bench& b) { b.runner.args.region += 8; },
        [](Bench& b) { b.runner.args.region = 0; },
    };
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        Bench b;
        changes[i](b);
        std::vector<uint8_t> before(b.region.base, b.region.base + b.region.bytes);
        CHECK(b.runner.run("t_echo"));
        CHECK(std::memcmp(before.data(), b.region.base, b.region.bytes) == 0);
        CHECK_EQ(notes.messages, 0);
    }
}

// The entries identify the rings; their order does not matter.
TEST(rings_are_found_wherever_their_entries_stand) {
    Shape s;
    s.backends = 2;
    Bench b(s);
    CHECK(b.push(1, "a"));
    serval_ring_entry* first = b.region.entry(0, false);
    std::reverse(first, first + 6);
    CHECK(b.runner.run("t_echo"));
    CHECK(b.pop());
    CHECK_EQ(b.tx.message.token, 1);
    CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
}

// The entries of the second block stand for those of kinds that came later.
TEST(entries_of_unknown_kinds_are_skipped_unless_they_must_be_known) {
    Shape s;
    s.blocks = 2;
    for (const uint32_t flags : {0u, ~SERVAL_RING_REQUIRED, SERVAL_RING_REQUIRED, ~0u}) {
        const bool is_required = flags & SERVAL_RING_REQUIRED;
        Bench b(s);
        CHECK(b.push(1, "a"));
        b.runner.args.ring_count = 4;
        b.region.entry(1, false)->kind = 77;
        b.region.entry(1, false)->flags = flags;
        b.region.entry(1, true)->version++;
        b.region.entry(1, true)->flags = 0;
        CHECK(b.runner.run("t_echo"));
        CHECK_EQ(b.pop(), !is_required);
        CHECK_EQ(b.words()->reason, is_required ? SERVAL_REASON_REFUSED : SERVAL_REASON_STOPPED);
    }
}

TEST(a_producer_with_an_arena_needs_an_empty_ring) {
    Shape s;
    s.len_max = 1000;
    s.arena_bytes = 4096;
    Bench b(s);
    *b.region.head(0, true) = 1;
    CHECK(b.runner.run("t_echo"));
    CHECK_EQ(b.words()->reason, SERVAL_REASON_REFUSED);
}

TEST(parameters_are_found_by_name) {
    Bench b;
    b.runner.param("le", 1);
    b.runner.param("length", 2);
    b.runner.param("twenty-three-characters", 7);
    b.runner.param("len", 3);
    Bench* out = &b;
    CHECK(b.push(1, ""));
    CHECK(b.runner.run("t_empty_reply"));
    CHECK(out->pop());
    CHECK_EQ(b.tx.message.len, 3);
}

// The text lies behind the table, and a zero byte follows it.
TEST(texts_are_found_by_name) {
    Bench b;
    struct {
        serval_param table[3];
        char text[8];
    } given = {};
    std::strcpy(reinterpret_cast<char*>(given.table[0].name), "n");
    given.table[0].value = 3;
    std::strcpy(reinterpret_cast<char*>(given.table[1].name), "other");
    given.table[1].value = 0;
    std::strcpy(reinterpret_cast<char*>(given.table[2].name), "text");
    std::strcpy(given.text, "abc");
    const uint64_t bits = SERVAL_PARAM_TEXT | uint64_t{3} << 32 | offsetof(decltype(given), text);
    std::memcpy(&given.table[2].value, &bits, sizeof bits);
    b.runner.args.params = reinterpret_cast<uint64_t>(&given);
    b.runner.args.param_count = 3;
    CHECK(b.push(1, ""));
    CHECK(b.runner.run("param_text"));
    CHECK(b.pop());
    CHECK_EQ(b.tx.message.len, 4);
    CHECK(b.text() == "abc3");
    Bench none;
    none.runner.param("text", 1);
    CHECK(none.push(1, ""));
    CHECK(none.runner.run("param_text"));
    CHECK(none.pop());
    CHECK(none.text() == "-0");
}

TEST(the_library_lists_its_kernels) {
    CHECK_EQ(serval_kernel_abi_version(), SERVAL_ABI_VERSION);
    unsigned count = 0;
    for (const serval_kernel_entry* e = serval_kernel_list(); e; e = reinterpret_cast<const serval_kernel_entry*>(e->next)) count++;
    CHECK_EQ(count, 16);
}

int main(int argc, char** argv) { return check::run_all(argc, argv); }
