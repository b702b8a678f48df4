// Two threads at the two ends of a ring, and an engine thread facing a block: every message arrives once, in order and complete.
// Also built with the thread sanitizer, which checks that every access to a region is atomic. Atomic accesses never race,
// so plain witness words beside the ring stand in for the payload: reading one that the other thread wrote is a race unless the
// ring's PUBLISH (doorbell only) or RELEASE edge orders the two. The sanitizer does not see inline assembly, so 16-byte
// granules are left out there.
#include <sched.h>
#include <serval/stream.h>

#include <algorithm>
#include <thread>

#include "region.h"

using namespace testing;
using serval::detail::load_acquire;
using serval::detail::store_release;
using serval::detail::StreamReader;
using serval::detail::StreamRing;
using serval::detail::StreamWriter;

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#else
#define UNDER_TSAN 0
#endif

namespace {

// Buffers of a pool, messages of each, and words of each message.
constexpr unsigned BUFFERS = 3, MESSAGES = 8, WORDS = 5;

constexpr uint64_t COUNT = UNDER_TSAN ? 60000 : 400000;

std::vector<unsigned> protocols() {
    std::vector<unsigned> all = {SERVAL_PROTOCOL_DOORBELL, SERVAL_PROTOCOL_GRANULE8};
    if (!UNDER_TSAN && SERVAL_HAS_GRANULE16) all.push_back(SERVAL_PROTOCOL_GRANULE16);
    return all;
}

// Message n's length and bytes are functions of n.
uint32_t len_of(uint64_t n, uint32_t len_max) { return static_cast<uint32_t>(check::Random(n).below(len_max + 1)); }
uint8_t byte_of(uint64_t n, uint32_t i) { return static_cast<uint8_t>(n * 31 + i * 7 + (n >> 8)); }

void make(uint64_t n, uint32_t len_max, std::vector<uint8_t>& data) {
    data.resize(len_of(n, len_max));
    for (uint32_t i = 0; i < data.size(); i++) data[i] = byte_of(n, i);
}

bool is(uint64_t n, uint32_t len_max, const std::vector<uint8_t>& data) {
    if (data.size() != len_of(n, len_max)) return false;
    for (uint32_t i = 0; i < data.size(); i++)
        if (data[i] != byte_of(n, i)) return false;
    return true;
}

void two_threads(const Shape& shape, uint64_t count) {
    Region region(shape);
    const bool ordered = shape.protocol == SERVAL_PROTOCOL_DOORBELL;
    std::vector<uint64_t> published(count), released(count);
    std::thread writer([&] {
        Producer p = region.producer(0, false);
        std::vector<uint8_t> data;
        uint64_t wrong = 0;
        for (uint64_t n = 0; n < count; n++) {
            make(n, shape.len_max, data);
            p.begin(message(n, static_cast<uint32_t>(data.size())));
            while (p.reserve() != Look::FOUND) sched_yield();
            if (n >= shape.depth && released[n - shape.depth] != n) wrong++;
            published[n] = ~n;
            p.write(data.data());
            p.publish();
        }
        if (wrong) check::fail(__FILE__, __LINE__, "a slot is written only after it was released");
    });
    Consumer c = region.consumer(0, false);
    std::vector<uint8_t> data;
    uint64_t wrong = 0;
    for (uint64_t n = 0; n < count;) {
        data.assign((shape.len_max + 7) / 8 * 8, 0);
        Look look = c.look(data.data());
        if (look == Look::NONE) {
            sched_yield();
            continue;
        }
        c.copy(data.data());
        data.resize(c.message.len);
        if (look != Look::FOUND || c.message.token != n || !is(n, shape.len_max, data)) wrong++;
        if (ordered && published[n] != ~n) wrong++;
        released[n] = n + shape.depth;
        c.advance();
        c.release();
        n++;
    }
    writer.join();
    CHECK_EQ(wrong, 0);
}

}  // namespace

SERVAL_KERNEL(s_echo) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, msg.len());
        std::memcpy(reply.as<uint8_t>(), msg.as<uint8_t>(), msg.len());
        q.send(block, reply);
    }
}

// Data that a block and the engine pass to each other outside the region: plain words, which race unless
// the edge that publishes them orders the two.
uint64_t before_stop[2], before_end[2];

SERVAL_KERNEL(s_witness) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, 0);
        q.send(block, reply);
    }
    before_end[block.index()] = before_stop[block.index()] + 1;
}

// As before_stop: written by the engine before a bundle is published and after it has ended, and by the block before it answers.
uint64_t before_bundle[BUFFERS][MESSAGES], before_answer[BUFFERS][MESSAGES];

// A message: its buffer, its place there, its number, and words that depend on it. The reply is the same. Is it what was sent?
bool is_sent(const uint64_t* word) {
    if (word[0] >= BUFFERS || word[1] >= MESSAGES || before_bundle[word[0]][word[1]] != ~word[2]) return false;
    return word[3] == 3 * word[2] && word[4] == 5 * word[2];
}

SERVAL_KERNEL(s_bundle) (serval::Block& block, serval::Mqueue& q) {
    uint64_t wrong = 0;
    while (auto msg = q.recv(block)) {
        const uint64_t* word = msg.as<uint64_t>();
        if (msg.len() != 8 * WORDS || !is_sent(word)) {
            wrong++;
            break;
        }
        // Every 16th bundle ends in drops.
        if (word[2] / 64 % 16 == 15 && word[1] == MESSAGES - 1) {
            q.drop(block, msg, serval::REJECTED);
            continue;
        }
        before_answer[word[0]][word[1]] = word[2] + 1;
        auto reply = q.reply(block, msg, msg.len());
        std::memcpy(reply.as<uint8_t>(), msg.as<uint8_t>(), msg.len());
        q.send(block, reply);
    }
    if (wrong) check::fail(__FILE__, __LINE__, "a message of a bundle before the writes that it publishes");
}

// The same with batches; every 16th bundle is dropped.
SERVAL_KERNEL(s_batch) (serval::Block& block, serval::Mqueue& q) {
    uint64_t wrong = 0;
    while (auto batch = q.recv_many(block)) {
        for (uint32_t i = 0; i < batch.count(); i++) wrong += batch.len() != 8 * WORDS || !is_sent(batch.as<uint64_t>(i));
        if (wrong) break;
        if (batch.as<uint64_t>(0)[2] / 64 % 16 == 15) {
            q.drop_many(block, batch, serval::REJECTED);
            continue;
        }
        auto replies = q.reply_many(block, batch, batch.len());
        for (uint32_t i = 0; i < batch.count(); i++) {
            const uint64_t* word = batch.as<uint64_t>(i);
            before_answer[word[0]][word[1]] = word[2] + 1;
            std::memcpy(replies.as<uint8_t>(i), word, batch.len());
        }
        q.send_many(block, replies);
    }
    if (wrong) check::fail(__FILE__, __LINE__, "a message of a batch before the writes that it publishes");
}

// An engine with few buffers, each of which is used again as soon as its messages have ended.
void exchange_bundles(const char* kernel, uint64_t area, uint64_t bundles) {
    for (unsigned protocol : protocols()) {
        const bool doorbell = protocol == SERVAL_PROTOCOL_DOORBELL;
        if (UNDER_TSAN && !doorbell) continue;  // the order comes from fences
        Shape s;
        s.protocol = protocol;
        s.inline_bytes = s.len_max = 64;
        s.pools = 1;
        s.pool_bytes = BUFFERS * 4096;
        Region region(s);
        Runner runner(region, 0, area);
        runner.waiting = [](uint32_t, uint64_t) { sched_yield(); };
        std::thread block([&] { runner.run(kernel); });
        Producer rx = region.producer(0, false);
        Consumer tx = region.consumer(0, true);
        const uint64_t pool = region.pool_entry(0)->offset;
        struct Buffer {
            uint64_t number = 0;
            uint64_t left = 0;  // messages that have not ended
        } buffers[BUFFERS];
        uint64_t sent = 0, ended = 0, wrong = 0;
        std::vector<uint8_t> data;
        auto end = [&](uint64_t token) -> Buffer* {
            for (Buffer& buffer : buffers) {
                if (buffer.number != token / SERVAL_BUNDLE_MAX || !(buffer.left >> token % SERVAL_BUNDLE_MAX & 1)) continue;
                buffer.left &= ~(uint64_t{1} << token % SERVAL_BUNDLE_MAX);
                if (buffer.left == 0) ended++;
                return &buffer;
            }
            wrong++;
            return nullptr;
        };
        // EDGE STATE (acquire half): a block that ended early is a failure, not a hang.
        while (ended < bundles && !wrong && load_acquire(&region.block()->state) != SERVAL_STATE_ENDED) {
            bool idle = true;
            for (unsigned at = 0; at < BUFFERS && sent < bundles; at++) {
                if (buffers[at].left) continue;
                // Also unaligned.
                const uint32_t count = static_cast<uint32_t>(1 + sent % MESSAGES), stride = static_cast<uint32_t>(8 * WORDS + sent / 8 % 2 * 8);
                const serval_bundle d = {pool + 4096 * at, pool + 4096 * at + 2048, stride, count, 8 * WORDS, 8 * WORDS, count * 64, 0};
                const uint64_t number = sent + 1;
                for (uint32_t i = 0; i < count; i++) {
                    const uint64_t n = number * SERVAL_BUNDLE_MAX + i, words[WORDS] = {at, i, n, 3 * n, 5 * n};
                    before_bundle[at][i] = ~n;
                    serval::detail::copy_words_in(reinterpret_cast<uint64_t*>(region.base + d.offset + i * stride),
                                                  reinterpret_cast<const uint8_t*>(words), WORDS);
                }
                if (!doorbell) serval::detail::fence_release();
                if (!send(rx, message(number * SERVAL_BUNDLE_MAX, sizeof d, SERVAL_KIND_BUNDLE), &d)) break;
                buffers[at] = {number, (uint64_t{1} << count) - 1};
                sent++;
                idle = false;
            }
            if (recv(tx, data) == Look::FOUND) {
                idle = false;
                if (!doorbell) serval::detail::fence_acquire();
                const uint64_t token = tx.message.token;
                serval_bundle_reply r = {};
                if (tx.message.kind == SERVAL_KIND_DROP) end(token);
                if (tx.message.kind == SERVAL_KIND_BUNDLE && data.size() == sizeof r) std::memcpy(&r, data.data(), sizeof r);
                for (uint64_t i = 0, at = r.offset; r.answered >> i; i++) {
                    if (!(r.answered >> i & 1)) continue;
                    const Buffer* buffer = end(token + i);
                    uint64_t words[WORDS] = {};
                    if (buffer) serval::detail::copy_bytes_out(reinterpret_cast<uint8_t*>(words), region.base + at, sizeof words);
                    const uint64_t n = token + i, place = buffer ? static_cast<uint64_t>(buffer - buffers) : 0;
                    if (words[0] != place || words[1] != i || words[2] != n || words[3] != 3 * n || words[4] != 5 * n) wrong++;
                    if (before_answer[place][i] != n + 1) wrong++;
                    at += r.stride;
                }
            }
            if (idle) sched_yield();
            // EDGE HEARTBEAT (release half)
            store_release(&region.engine()->heartbeat, ended);
        }
        // EDGE STOP (release half)
        store_release(&region.engine()->stop, SERVAL_STOP_DRAIN);
        block.join();
        CHECK_EQ(wrong, 0);
        CHECK_EQ(ended, bundles);
        CHECK_EQ(region.block()->reason, SERVAL_REASON_STOPPED);
    }
}

TEST(two_threads_one_bundle) {
    exchange_bundles("s_bundle", 0, COUNT / 40);
    // One message at a time, and many.
    for (uint64_t area : {uint64_t{0}, uint64_t{2048}}) exchange_bundles("s_batch", area, COUNT / 80);
}

TEST(words_publish) {
    for (unsigned protocol : protocols()) {
        Shape s;
        s.protocol = protocol;
        s.blocks = 2;
        Region region(s);
        std::memset(before_stop, 0, sizeof before_stop);
        std::memset(before_end, 0, sizeof before_end);
        uint64_t before_beat = 0;
        std::vector<std::thread> blocks;
        for (unsigned b = 0; b < s.blocks; b++) {
            blocks.emplace_back([&region, b] {
                Runner runner(region, b);
                runner.waiting = [](uint32_t, uint64_t) { sched_yield(); };
                runner.run("s_witness");
            });
        }
        std::thread listener([&] {
            while (load_acquire(&region.engine()->heartbeat) == 0) sched_yield();
            if (before_beat != 7) check::fail(__FILE__, __LINE__, "a heartbeat before the writes it publishes");
        });
        before_beat = 7;
        // EDGE HEARTBEAT (release half)
        store_release(&region.engine()->heartbeat, 1);
        for (uint64_t& word : before_stop) word = 41;
        // EDGE STOP (release half)
        store_release(&region.engine()->stop, SERVAL_STOP_DRAIN);
        uint64_t found = 0;
        for (unsigned b = 0; b < s.blocks; b++) {
            // EDGE STATE (acquire half): before the thread is joined, which would order everything.
            while (load_acquire(&region.block(b)->state) != SERVAL_STATE_ENDED) sched_yield();
            found += before_end[b];
        }
        for (std::thread& block : blocks) block.join();
        listener.join();
        CHECK_EQ(found, 84);
    }
}

TEST(two_threads_one_ring) {
    for (unsigned protocol : protocols()) {
        for (uint64_t start : {uint64_t{0}, (uint64_t{1} << 32) - COUNT / 2}) {
            Shape s;
            s.protocol = protocol;
            s.depth = 16;
            s.inline_bytes = s.len_max = 120;
            s.start = start;
            two_threads(s, COUNT);
        }
    }
}

TEST(two_threads_one_slot) {
    for (unsigned protocol : protocols()) {
        Shape s;
        s.protocol = protocol;
        s.depth = 1;
        s.inline_bytes = s.len_max = 64;
        two_threads(s, COUNT / 20);
    }
}

TEST(two_threads_one_arena) {
    Shape s;
    s.depth = 32;
    s.inline_bytes = 16;
    s.len_max = 700;
    s.arena_bytes = 2000;
    two_threads(s, COUNT / 4);
}

// Pieces of any length, so that words are written in parts while the reader reads them.
TEST(two_threads_one_stream) {
    constexpr uint64_t CAPACITY = 64, BYTES = 4 * COUNT;
    alignas(128) static uint64_t memory[(SERVAL_STREAM_DATA + CAPACITY) / 8];
    const StreamRing ring = {reinterpret_cast<uint8_t*>(memory), CAPACITY};
    std::vector<uint64_t> written(BYTES / 8), taken(BYTES / 8);
    std::thread writer([&] {
        StreamWriter w = {ring, 0, 0, 0};
        uint8_t piece[CAPACITY];
        uint64_t wrong = 0;
        for (uint64_t n = 0; w.head < BYTES; n++) {
            uint64_t refused;
            while (w.reserve(CAPACITY, refused) != Look::FOUND) sched_yield();
            const uint64_t room = std::min(w.known_room(), BYTES - w.head);
            const uint64_t count = std::min(room, uint64_t{1} + len_of(n, CAPACITY - 1));
            for (uint64_t i = 0; i < count; i++) piece[i] = byte_of(w.head + i, 0);
            for (uint64_t word = (w.head + 7) / 8; word < (w.head + count + 7) / 8; word++) {
                if (word >= CAPACITY / 8 && taken[word - CAPACITY / 8] != word) wrong++;
                written[word] = ~word;
            }
            w.publish(count, w.write(piece, count));
        }
        w.end(SERVAL_STATUS_CLOSED);
        if (wrong) check::fail(__FILE__, __LINE__, "a word is written again only after it was released");
    });
    StreamReader r = {ring, 0, 0, 0};
    uint8_t piece[CAPACITY];
    uint64_t wrong = 0, end = 0;
    for (uint64_t n = 0; end == 0; n++) {
        if (r.look(end) != Look::FOUND) {
            sched_yield();
            continue;
        }
        const uint64_t count = std::min(r.head - r.tail, uint64_t{1} + len_of(~n, CAPACITY - 1));
        r.copy(piece, count);
        for (uint64_t i = 0; i < count; i++) wrong += piece[i] != byte_of(r.tail + i, 0);
        for (uint64_t word = r.tail / 8; word < (r.tail + count + 7) / 8; word++) wrong += written[word] != ~word;
        for (uint64_t word = r.tail / 8; word < (r.tail + count) / 8; word++) taken[word] = word + CAPACITY / 8;
        r.take(count);
        r.release();
    }
    writer.join();
    CHECK_EQ(wrong, 0);
    CHECK_EQ(end, SERVAL_STATUS_CLOSED);
    CHECK_EQ(r.tail, BYTES);
}

TEST(engine_thread_and_block_thread) {
    for (unsigned protocol : protocols()) {
        Shape s;
        s.protocol = protocol;
        s.depth = 16;
        s.inline_bytes = s.len_max = 120;
        Region region(s);
        Runner runner(region);
        runner.args.budget = 64;
        runner.waiting = [](uint32_t, uint64_t) { sched_yield(); };
        std::thread block([&] { runner.run("s_echo"); });
        Producer rx = region.producer(0, false);
        Consumer tx = region.consumer(0, true);
        std::vector<uint8_t> data;
        const uint64_t count = COUNT / 4;
        uint64_t pushed = 0, popped = 0, wrong = 0;
        // EDGE STATE (acquire half): a block that ended early is a failure, not a hang.
        while (popped < count && load_acquire(&region.block()->state) != SERVAL_STATE_ENDED) {
            bool idle = true;
            make(pushed, s.len_max, data);
            if (pushed < count && send(rx, message(pushed, static_cast<uint32_t>(data.size())), data.data())) {
                pushed++;
                idle = false;
            }
            if (recv(tx, data) == Look::FOUND) {
                if (tx.message.token != popped || !is(popped, s.len_max, data)) wrong++;
                popped++;
                idle = false;
            }
            if (idle) sched_yield();
            // EDGE HEARTBEAT (release half)
            store_release(&region.engine()->heartbeat, popped);
        }
        // EDGE STOP (release half)
        store_release(&region.engine()->stop, SERVAL_STOP_DRAIN);
        block.join();
        CHECK_EQ(wrong, 0);
        CHECK_EQ(region.block()->reason, SERVAL_REASON_STOPPED);
        CHECK_EQ(popped, count);
        CHECK_EQ(region.block()->received, count);
        CHECK_EQ(region.block()->sent, count);
    }
}

int main(int argc, char** argv) { return check::run_all(argc, argv); }
