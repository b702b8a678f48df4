// Batches: recv_many, reply_many, send_many and drop_many, on messages that came alone and in bundles.
#include "../kernels/builtin.cpp"
#include "bundle_bench.h"

namespace {

constexpr uint64_t AREA = 8192;

// What the kernels below ask for.
struct Plan {
    uint32_t max = SERVAL_BUNDLE_MAX, reply_bytes = serval::AS_REQUEST;
    std::vector<uint32_t> counts;  // of the batches
} plan;

void begin(uint32_t max = SERVAL_BUNDLE_MAX, uint32_t reply_bytes = serval::AS_REQUEST) {
    plan = Plan();
    plan.max = max;
    plan.reply_bytes = reply_bytes;
}

}  // namespace

// The first byte of a batch's first message says what to do: (d)rop; (x) replies that are too long, (s)horter ones; answer (o)ne by one, the last one first;
// (t)wice; over(r)un; otherwise echo.
SERVAL_KERNEL(b_many) (serval::Block& block, serval::Mqueue& q) {
    while (auto batch = q.recv_many(block, plan.max, plan.reply_bytes)) {
        const char what = batch.len() ? *batch.as<char>(0) : 'e';
        plan.counts.push_back(batch.count());
        notes.messages += batch.count();
        if (what == 'd') {
            q.drop_many(block, batch, serval::REJECTED);
            continue;
        }
        if (what == 'o') {
            for (uint32_t i = batch.count(); i-- > 0;) {
                auto reply = q.reply(block, batch[i], batch[i].len());
                std::memcpy(reply.as<char>(), batch[i].as<char>(), batch[i].len());
                q.send(block, reply);
            }
            continue;
        }
        const uint32_t len = what == 'x' ? batch.len() + 1 : what == 's' ? batch.len() / 2 : batch.len();
        auto replies = q.reply_many(block, batch, len);
        for (uint32_t i = 0; i < batch.count(); i++) {
            for (uint32_t k = 0; replies && k < len; k++)
                if (replies.as<char>(i)[k] != 0) return notes.sent = false, void();
            std::memcpy(replies.as<char>(i), batch.as<char>(i), batch.len() < len ? batch.len() : len);
        }
        if (what == 'r') replies.as<char>(0)[replies.count() * replies.stride()] = 1;
        notes.sent = q.send_many(block, replies);
        if (what == 't') q.send_many(block, replies);
    }
}

// Takes batches and single messages in turn, and answers the batch before only now.
SERVAL_KERNEL(b_late) (serval::Block& block, serval::Mqueue& q) {
    auto batch = q.recv_many(block);
    auto next = q.recv_many(block);
    auto late = q.reply_many(block, batch, batch.len());
    q.send_many(block, late);
    (void)next;
}

SERVAL_KERNEL(b_mixed) (serval::Block& block, serval::Mqueue& q) {
    for (unsigned turn = 0; !q.ended(block); turn++) {
        if (turn % 2) {
            if (auto msg = q.recv(block)) {
                auto reply = q.reply(block, msg, msg.len());
                std::memcpy(reply.as<char>(), msg.as<char>(), msg.len());
                q.send(block, reply);
            }
        } else if (auto batch = q.recv_many(block, 5)) {
            auto replies = q.reply_many(block, batch, batch.len());
            std::memcpy(replies.as<char>(0), batch.as<char>(0), (batch.count() - 1) * batch.stride() + batch.len());
            q.send_many(block, replies);
        }
    }
}

namespace {

// Runs a kernel on what was pushed.
bool run(Bench& b, const char* kernel = "b_many") {
    b.stop(SERVAL_STOP_DRAIN);
    const bool ran = b.runner.run(kernel);
    b.pop();
    return ran;
}

std::vector<std::string> many(unsigned count, char what, size_t length) {
    check::Random random(count);
    std::vector<std::string> texts;
    for (unsigned i = 0; i < count; i++) texts.push_back(random_text(random, what, length));
    return texts;
}

bool echoed(Bench& b, const std::vector<std::string>& texts, uint64_t first, size_t length = ~size_t{0}) {
    for (size_t i = 0; i < texts.size(); i++)
        if (b.outcomes[first + i].reply != texts[i].substr(0, length)) return false;
    return true;
}

}  // namespace

TEST(a_bundle_is_one_batch_and_one_completion) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        Bench b(Bench::with_pools(s), AREA);
        begin();
        const auto texts = many(64, 'e', 64);
        CHECK(b.push("alone"));
        CHECK(b.push(texts));
        CHECK(run(b));
        CHECK_EQ(b.wrong, 0);
        CHECK_EQ(plan.counts.size(), 2);
        CHECK_EQ(plan.counts[0], 1);
        CHECK_EQ(plan.counts[1], 64);
        CHECK_EQ(b.completions, 1);
        CHECK(echoed(b, texts, b.next_token - 64));
        CHECK_EQ(b.words()->received, 65);
        CHECK_EQ(b.words()->sent, 65);
    }
}

TEST(batches_of_every_shape) {
    for (unsigned protocol : PROTOCOLS) {
        for (uint64_t area : {uint64_t{0}, uint64_t{512}, AREA}) {
            for (const char* kernel : {"b_many", "b_mixed"}) {
                Shape s;
                s.protocol = protocol;
                Bench b(Bench::with_pools(s), area);
                begin();
                check::Random random(protocol + area);
                std::map<uint64_t, std::string> sent;
                unsigned count = 0;
                b.runner.waiting = [&](uint32_t, uint64_t) {
                    b.pop();
                    if (b.outcomes.size() != sent.size()) b.fail("every message is answered before the block waits");
                    if (b.words()->received != sent.size() || b.words()->sent != sent.size()) b.fail("counts");
                    if (count == BUNDLE) return b.stop(SERVAL_STOP_DRAIN);
                    count++;
                    if (random.below(2)) {
                        sent[b.next_token] = random_text(random, 'e', random.below(257));
                        if (!b.push(sent[b.next_token])) b.fail("room");
                    }
                    const uint64_t len = random.below(257), last = random.below(2) ? len : random.below(len + 1);
                    std::vector<std::string> texts;
                    for (unsigned i = 0; i < count; i++) texts.push_back(random_text(random, 'e', i + 1 == count ? last : len));
                    if (count == 1) texts[0].resize(len);
                    if (!b.push(texts, static_cast<uint32_t>(len + random.below(3) * random.below(100)))) b.fail("room");
                    for (unsigned i = 0; i < count; i++) sent[b.next_token - count + i] = texts[i];
                };
                CHECK(b.runner.run(kernel));
                b.pop();
                CHECK_EQ(b.wrong, 0);
                CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
                CHECK_EQ(b.order.size(), sent.size());
                for (const auto& [token, text] : sent) CHECK(b.outcomes[token].reply == text);
                CHECK(b.keeps_replies());
            }
        }
    }
}

TEST(batches_have_at_most_as_many_messages_as_wanted_and_room_for_replies) {
    // The longest batch, and how many completions, depend on both: 256 bytes each, with their replies.
    const struct {
        uint32_t max, reply_bytes;
        uint64_t area;
        std::vector<uint32_t> counts;
    } cases[] = {
        {7, serval::AS_REQUEST, AREA, {7, 7, 6}},
        {0, serval::AS_REQUEST, AREA, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}},
        {64, serval::AS_REQUEST, AREA, {16, 4}},
        {64, 0, AREA, {20}},
        {64, 128, 1536, {4, 4, 4, 4, 4}},
        {64, 100000, AREA, {16, 4}},
    };
    for (const auto& c : cases) {
        Bench b(Bench::with_pools(Shape()), c.area);
        begin(c.max, c.reply_bytes);
        const auto texts = many(20, c.reply_bytes == 128 ? 's' : c.reply_bytes ? 'e' : 'd', 256);
        CHECK(b.push(texts));
        b.runner.waiting = [&](uint32_t, uint64_t) { b.pop(); };
        CHECK(run(b));
        CHECK_EQ(b.wrong, 0);
        CHECK(plan.counts == c.counts);
        CHECK_EQ(b.outcomes.size(), 20);
        if (c.reply_bytes) CHECK(echoed(b, texts, b.next_token - 20, c.reply_bytes));
    }
}

TEST(batches_are_dropped_message_by_message) {
    for (char what : {'d', 'x'}) {
        Shape s;
        s.depth = 32;
        Bench b(Bench::with_pools(s), AREA);
        begin();
        CHECK(b.push(many(20, what, 64)));
        CHECK(b.push(std::string(1, what)));
        CHECK(run(b));
        CHECK_EQ(b.wrong, 0);
        CHECK_EQ(b.outcomes.size(), 21);
        CHECK_EQ(b.words()->dropped, 21);
        for (unsigned i = 0; i < 20; i++) {
            const auto& outcome = b.outcomes[b.next_token - 21 + i];
            CHECK_EQ(outcome.kind, SERVAL_KIND_DROP);
            CHECK_EQ(outcome.status, what == 'd' ? SERVAL_STATUS_REJECTED : SERVAL_STATUS_TOO_LONG);
        }
        // A message that came alone has the same limit.
        CHECK_EQ(plan.counts.size(), 2);
    }
}

TEST(messages_of_a_batch_are_answered_in_any_order) {
    Shape s;
    s.depth = 32;
    Bench b(Bench::with_pools(s), AREA);
    begin();
    const auto texts = many(20, 'o', 64);
    CHECK(b.push(texts));
    CHECK(run(b));
    CHECK_EQ(b.wrong, 0);
    CHECK(echoed(b, texts, b.next_token - 20));
    CHECK(b.keeps_replies());
}

TEST(batches_that_break_the_contract_end_the_block) {
    for (char what : {'t', 'r'}) {
        for (unsigned count : {1u, 20u}) {
            Bench b(Bench::with_pools(Shape()), AREA);
            begin();
            CHECK(b.push(many(count, what, 64)));
            CHECK(run(b));
            CHECK_EQ(b.wrong, 0);
            CHECK_EQ(b.words()->reason, SERVAL_REASON_CONTRACT);
            CHECK_EQ(notes.sent, what == 't');
            CHECK_EQ(b.outcomes.size(), what == 't' ? count : 0);
        }
    }
    Bench b(Bench::with_pools(Shape()), AREA);
    begin();
    CHECK(b.push(many(20, 'e', 64)));
    CHECK(b.push(many(20, 'e', 64)));
    CHECK(run(b, "b_late"));
    CHECK_EQ(b.words()->reason, SERVAL_REASON_CONTRACT);
    CHECK_EQ(b.outcomes.size(), 0);
}

// The built-in kernels answer, or drop, the messages of a bundle as they do each of them alone.
TEST(built_in_kernels_answer_bundles_like_single_messages) {
    const struct {
        const char* kernel;
        std::vector<size_t> lengths;
    } cases[] = {{"echo", {0, 1, 64, 784}}, {"scale", {0, 4, 7, 64, 800}}, {"lenet", {784, 783}}, {"sockperf", {14, 40}}};
    for (const auto& c : cases) {
        for (size_t length : c.lengths) {
            std::vector<Bench::Outcome> outcomes[2];
            for (bool bundled : {false, true}) {
                Shape s;
                s.depth = 32;
                s.inline_bytes = s.len_max = 1024;
                Bench b(Bench::with_pools(s), AREA);
                auto texts = many(20, 'e', length);
                if (length == 40)
                    for (auto& text : texts) text.replace(9, 5, std::string("\3\0\0\0\50", 5));
                if (bundled)
                    CHECK(b.push(texts));
                else
                    for (const auto& text : texts) CHECK(b.push(text));
                CHECK(run(b, c.kernel));
                CHECK_EQ(b.wrong, 0);
                CHECK_EQ(b.outcomes.size(), 20);
                for (const auto& [token, outcome] : b.outcomes) outcomes[bundled].push_back(outcome);
            }
            for (unsigned i = 0; i < 20; i++) {
                const auto &alone = outcomes[0][i], &in_bundle = outcomes[1][i];
                CHECK_EQ(alone.kind == SERVAL_KIND_DROP, in_bundle.kind == SERVAL_KIND_DROP);
                CHECK_EQ(alone.status, in_bundle.status);
                CHECK(alone.reply == in_bundle.reply);
            }
        }
    }
}

int main(int argc, char** argv) { return check::run_all(argc, argv); }
