// A region with pools and one block, for tests of bundles: the engine's side, and what the kernels of a test note. The wait callback acts as the
// engine, on the same thread, so that every step is deterministic.
#ifndef SERVAL_TESTS_BUNDLE_BENCH_H
#define SERVAL_TESTS_BUNDLE_BENCH_H

#include <map>
#include <string>

#include "region.h"

using namespace testing;

namespace {

constexpr uint64_t BUNDLE = SERVAL_BUNDLE_MAX;

uint64_t fake_now;
uint64_t fake_clock(void*) { return fake_now; }

struct Notes {
    unsigned messages = 0, held = 0;
    bool sent = true;
    std::function<void(const std::string&)> on_message;
} notes;

// A region with one block, its runner and an engine that sends bundles and remembers each message's outcome.
struct Bench {
    struct Sent {
        unsigned count;
        uint64_t area, area_bytes;
        std::vector<std::pair<uint64_t, uint64_t>> replies;  // published ranges
    };
    struct Outcome {
        uint8_t kind = 0, status = 0;
        std::string reply;
        uint64_t at = 0;  // of a bundle: where the reply is
    };
    Region region;
    Runner runner;
    Producer rx;
    Consumer tx;
    std::vector<uint8_t> data;
    uint64_t used = 0, next_token = BUNDLE * 1000;
    std::map<uint64_t, Sent> bundles;     // by token
    std::map<uint64_t, Outcome> outcomes; // by token
    std::vector<uint64_t> order;          // of outcomes
    unsigned completions = 0, wrong = 0;

    static Shape with_pools(Shape s, unsigned pools = 1) {
        s.pools = pools;
        s.pool_bytes = 4 << 20;
        return s;
    }
    explicit Bench(const Shape& s = with_pools(Shape()), uint64_t area = 0) : region(s), runner(region, 0, area), rx(region.producer(0, false)), tx(region.consumer(0, true)) {
        notes = Notes();
        fake_now = 1;
        runner.args.now = reinterpret_cast<uint64_t>(&fake_clock);
        runner.waiting = [this](uint32_t, uint64_t) { stop(SERVAL_STOP_NOW); };
    }
    void stop(uint64_t how) { region.engine()->stop = how; }
    serval_block_words* words() { return region.block(); }
    void fail(const char* what) {
        wrong++;
        check::fail(__FILE__, __LINE__, what);
    }

    bool push(const std::string& text) { return send(rx, message(next_token++, static_cast<uint32_t>(text.size())), text.data()); }

    // Room in the pool, never used twice: `bytes` at a multiple of 64.
    uint64_t take(uint64_t bytes) {
        const uint64_t at = region.pool_entry(0)->offset + used;
        used += align(bytes, SERVAL_BUNDLE_ALIGN);
        if (used > region.pool_entry(0)->bytes) std::abort();
        return at;
    }
    // Writes the messages into the pool; all but the last have the length of the first.
    serval_bundle describe(const std::vector<std::string>& texts, uint32_t stride) {
        serval_bundle b = {};
        b.count = static_cast<uint32_t>(texts.size());
        b.len = static_cast<uint32_t>(texts[0].size());
        b.last_len = static_cast<uint32_t>(texts.back().size());
        b.stride = stride;
        b.offset = take(uint64_t{b.count - 1} * stride + b.len);
        b.reply_bytes = static_cast<uint32_t>(b.count * align(region.shape.len_max, 16));
        b.reply_offset = take(b.reply_bytes);
        for (uint32_t i = 0; i < b.count; i++) std::memcpy(region.base + b.offset + uint64_t{i} * stride, texts[i].data(), texts[i].size());
        return b;
    }
    bool push(const serval_bundle& b) {
        next_token = align(next_token, BUNDLE);
        if (!send(rx, message(next_token, sizeof b, SERVAL_KIND_BUNDLE), &b)) return false;
        bundles[next_token] = {b.count, b.reply_offset, b.reply_bytes, {}};
        next_token += b.count;
        return true;
    }
    bool push(const std::vector<std::string>& texts, uint32_t stride) { return push(describe(texts, stride)); }
    bool push(const std::vector<std::string>& texts) { return push(texts, static_cast<uint32_t>(texts[0].size())); }

    void end(uint64_t token, const Outcome& outcome) {
        if (outcomes.count(token)) fail("one outcome");
        outcomes[token] = outcome;
        order.push_back(token);
    }
    // Takes what the block has published, and checks it.
    unsigned pop() {
        unsigned slots = 0;
        Look look;
        for (; (look = recv(tx, data)) == Look::FOUND; slots++) {
            const Header& h = tx.message;
            if (h.kind == SERVAL_KIND_BUNDLE) {
                take_completion();
                continue;
            }
            end(h.token, {h.kind, h.status, std::string(data.begin(), data.end()), 0});
        }
        if (look == Look::CORRUPT) fail("slots that the ring may carry");
        return slots;
    }
    void take_completion() {
        const Header h = tx.message;
        serval_bundle_reply r;
        if (h.len != sizeof r || !bundles.count(h.token)) return fail("the completion of a bundle");
        std::memcpy(&r, data.data(), sizeof r);
        completions++;
        Sent& sent = bundles[h.token];
        if (r.answered == 0 || r.stride < r.len || (sent.count < 64 && r.answered >> sent.count)) return fail("answers to its messages");
        uint64_t at = r.offset;
        for (unsigned i = 0; i < sent.count; i++) {
            if (!(r.answered >> i & 1)) continue;
            if (at < sent.area || at + r.len > sent.area + sent.area_bytes) return fail("replies in the area");
            for (const auto& other : sent.replies)
                if (r.len && at < other.second && other.first < at + r.len) return fail("replies that do not overlap");
            sent.replies.emplace_back(at, at + r.len);
            end(h.token + i, {SERVAL_KIND_BUNDLE, 0, std::string(region.base + at, region.base + at + r.len), at});
            at += r.stride;
        }
    }
    // Does every reply still have the bytes with which it was published?
    bool keeps_replies() {
        for (const auto& [token, outcome] : outcomes)
            if (outcome.at && outcome.reply != std::string(region.base + outcome.at, region.base + outcome.at + outcome.reply.size())) return false;
        return true;
    }
};

std::string random_text(check::Random& random, char what, size_t length) {
    std::string text(length, '\0');
    random.fill(&text[0], length);
    if (length) text[0] = what;
    return text;
}

}  // namespace

#endif
