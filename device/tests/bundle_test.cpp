// Bundles: what a block makes of a run of messages in a pool, and the completions that it publishes. A message says what the kernel is to do
// with it.
#include "bundle_bench.h"

namespace {

// The reply that the kernel below sends to a message: `length` bytes that depend on the message.
std::string reply_to(const std::string& text, size_t length) {
    std::string reply(length, '\0');
    for (size_t i = 0; i < length; i++) reply[i] = static_cast<char>(text[i % text.size()] + static_cast<char>(i));
    return reply;
}

}  // namespace

// The first byte says what to do: (e)cho; (d)rop, (c)onsume; (l)onger or shorter reply; (x) a reply that is too long; (h)old, and answer
// with the next (a)nswer, in random order; (t)wice; (w)ait for a time; (b)ackend; (r)eturn; (o)verrun.
SERVAL_KERNEL(b_obey) (serval::Block& block, serval::Mqueue& q) {
    std::vector<std::pair<serval::Message, std::string>> held;
    check::Random random(5);
    auto answer = [&](const serval::Message& msg, const std::string& text) {
        auto reply = q.reply(block, msg, static_cast<uint32_t>(text.size()));
        std::memcpy(reply.as<char>(), text.data(), text.size());
        notes.sent = q.send(block, reply);
    };
    while (auto msg = q.recv(block)) {
        const std::string text(msg.as<char>(), msg.len());
        notes.messages++;
        if (notes.on_message) notes.on_message(text);
        switch (text.empty() ? 'e' : text[0]) {
            case 'd': q.drop(block, msg, serval::REJECTED); break;
            case 'c': q.drop(block, msg, serval::OK); break;
            case 'l': answer(msg, reply_to(text, static_cast<uint8_t>(text.back()))); break;
            case 'x': {
                auto reply = q.reply(block, msg, 100000);
                q.send(block, reply);
                break;
            }
            case 'h': held.emplace_back(msg, text); break;
            case 'a': {
                held.emplace_back(msg, text);
                while (!held.empty()) {
                    std::swap(held[random.below(held.size())], held.back());
                    answer(held.back().first, reply_to(held.back().second, random.below(3) ? 48 : random.below(257)));
                    held.pop_back();
                    notes.held++;
                }
                break;
            }
            case 't':
                answer(msg, text);
                answer(msg, text + "again");
                break;
            case 'w':
                block.sleep_until(block.now_ns() + 1000);
                answer(msg, text);
                break;
            case 'b':
                q.backend(0).send(block, msg.as<char>(), 1, 0);
                q.backend(0).recv(block);
                answer(msg, text);
                break;
            case 'r': return;
            case 'o': {
                auto reply = q.reply(block, msg, 4);
                reply.as<uint8_t>()[8] = 1;
                q.send(block, reply);
                break;
            }
            default: answer(msg, text);
        }
    }
}

SERVAL_KERNEL(b_try) (serval::Block& block, serval::Mqueue& q) {
    while (!q.ended(block)) {
        auto msg = notes.messages % 2 ? q.try_recv(block) : q.recv_until(block, block.now_ns() + 1000);
        if (!msg) continue;
        notes.messages++;
        auto reply = q.reply(block, msg, msg.len());
        std::memcpy(reply.as<char>(), msg.as<char>(), msg.len());
        q.send(block, reply);
    }
}

namespace {

std::vector<std::string> texts_of(const char* commands) {
    std::vector<std::string> texts;
    for (; *commands; commands++) texts.push_back(std::string(1, *commands) + "message");
    return texts;
}

// Runs the kernel on one bundle, whose messages have these commands, until nothing is left to do.
bool obey(Bench& b, const char* commands, uint64_t how = SERVAL_STOP_DRAIN) {
    if (!b.push(texts_of(commands))) return false;
    b.stop(how);
    const bool ran = b.runner.run("b_obey");
    b.pop();
    return ran;
}

}  // namespace

TEST(bundles_of_every_shape_between_single_messages) {
    for (unsigned protocol : PROTOCOLS) {
        for (unsigned arena : {0, 1}) {
            if (arena && protocol != SERVAL_PROTOCOL_DOORBELL) continue;
            Shape s;
            s.protocol = protocol;
            s.start = (1ull << 32) - 20;
            if (arena) s.inline_bytes = 64, s.arena_bytes = 4096;
            Bench b(Bench::with_pools(s));
            check::Random random(protocol);
            std::map<uint64_t, std::string> sent;
            unsigned count = 0;
            b.runner.waiting = [&](uint32_t why, uint64_t) {
                if (why != SERVAL_WAIT_RX) b.fail("waits for RX");
                b.pop();
                if (b.outcomes.size() != sent.size()) b.fail("every message is answered before the block waits");
                if (b.words()->received != sent.size() || b.words()->sent != sent.size()) b.fail("counts");
                if (count == BUNDLE) return b.stop(SERVAL_STOP_DRAIN);
                // Every count once, between single messages.
                count++;
                for (uint64_t singles = random.below(3); singles > 0; singles--) {
                    sent[b.next_token] = random_text(random, 'e', random.below(257));
                    if (!b.push(sent[b.next_token])) b.fail("room");
                }
                const uint64_t len = random.below(257), last = random.below(2) ? len : random.below(len + 1);
                std::vector<std::string> texts;
                for (unsigned i = 0; i < count; i++) texts.push_back(random_text(random, 'e', i + 1 == count ? last : len));
                if (count == 1) texts[0].resize(len);
                if (!b.push(texts, static_cast<uint32_t>(len + random.below(3) * random.below(100)))) b.fail("room");
                for (unsigned i = 0; i < count; i++) sent[b.next_token - count + i] = texts[i];
                if (random.below(2)) {
                    sent[b.next_token] = "every other";
                    if (!b.push("every other")) b.fail("room");
                }
            };
            CHECK(b.runner.run("b_obey"));
            CHECK_EQ(b.wrong, 0);
            CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
            CHECK_EQ(count, BUNDLE);
            CHECK_EQ(b.order.size(), sent.size());
            CHECK(std::is_sorted(b.order.begin(), b.order.end()));
            for (const auto& [token, text] : sent) CHECK(b.outcomes[token].reply == text);
            // One completion, and one more for a last message of another length.
            CHECK(b.completions <= 2 * BUNDLE);
            CHECK(b.keeps_replies());
        }
    }
}

TEST(the_replies_of_a_bundle_are_contiguous_in_one_completion) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        Bench b(Bench::with_pools(s));
        std::vector<std::string> texts(BUNDLE, std::string(64, 'e'));
        CHECK(b.push(texts));
        b.stop(SERVAL_STOP_DRAIN);
        CHECK(b.runner.run("b_obey"));
        CHECK_EQ(b.pop(), 1);
        CHECK_EQ(b.wrong, 0);
        CHECK_EQ(b.outcomes.size(), BUNDLE);
        const uint64_t first = b.outcomes.begin()->second.at;
        for (uint64_t i = 0; i < BUNDLE; i++) CHECK_EQ(b.outcomes[b.next_token - BUNDLE + i].at, first + 64 * i);
        CHECK_EQ(*b.region.tail(0, false), 1);
        CHECK_EQ(b.words()->received, BUNDLE);
        CHECK_EQ(b.words()->sent, BUNDLE);
    }
}

// The last byte of a message is the length of its reply.
TEST(replies_of_changing_length) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        Bench b(Bench::with_pools(s));
        check::Random random(3);
        std::vector<std::string> texts;
        for (unsigned i = 0; i < 40; i++) texts.push_back(random_text(random, 'l', 32));
        for (unsigned i = 10; i < 20; i++) texts[i].back() = 17;
        texts[20].back() = 0;
        CHECK(b.push(texts, 45));
        b.runner.waiting = [&](uint32_t, uint64_t) { b.pop(); };
        b.stop(SERVAL_STOP_DRAIN);
        CHECK(b.runner.run("b_obey"));
        b.pop();
        CHECK_EQ(b.wrong, 0);
        CHECK_EQ(b.outcomes.size(), 40);
        for (unsigned i = 0; i < 40; i++)
            CHECK(b.outcomes[b.next_token - 40 + i].reply == reply_to(texts[i], static_cast<uint8_t>(texts[i].back())));
        CHECK_EQ(b.completions, 10 + 1 + 1 + 19);
        CHECK(b.keeps_replies());
    }
}

TEST(drops_have_slots_of_their_own) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        s.depth = 16;
        Bench b(Bench::with_pools(s));
        CHECK(obey(b, "eedecxe"));
        CHECK_EQ(b.wrong, 0);
        const uint64_t first = b.next_token - 7;
        for (unsigned i = 0; i < 7; i++) CHECK_EQ(b.order[i], first + i);
        for (unsigned i : {0, 1, 3, 6}) CHECK_EQ(b.outcomes[first + i].kind, SERVAL_KIND_BUNDLE);
        for (unsigned i : {2, 4, 5}) CHECK_EQ(b.outcomes[first + i].kind, SERVAL_KIND_DROP);
        CHECK_EQ(b.outcomes[first + 2].status, SERVAL_STATUS_REJECTED);
        CHECK_EQ(b.outcomes[first + 4].status, SERVAL_STATUS_OK);
        CHECK_EQ(b.outcomes[first + 5].status, SERVAL_STATUS_TOO_LONG);
        // A drop in order leaves no gap between replies.
        CHECK_EQ(b.outcomes[first + 3].at, b.outcomes[first].at + 32);
        CHECK_EQ(b.words()->received, 7);
        CHECK_EQ(b.words()->sent, 4);
        CHECK_EQ(b.words()->dropped, 3);
    }
}

TEST(messages_of_many_bundles_are_answered_in_any_order) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        s.depth = 16;
        Bench b(Bench::with_pools(s));
        check::Random random(protocol + 7);
        std::map<uint64_t, char> sent;
        unsigned rounds = 0;
        b.runner.waiting = [&](uint32_t why, uint64_t) {
            b.pop();
            if (why == SERVAL_WAIT_TX) return;
            if (rounds++ == 60) return b.stop(SERVAL_STOP_DRAIN);
            for (uint64_t bundles = 1 + random.below(4); bundles > 0; bundles--) {
                std::vector<std::string> texts;
                const uint64_t count = 1 + random.below(20);
                for (uint64_t i = 0; i < count; i++) texts.push_back(random_text(random, "hhheelda"[random.below(8)], 40));
                if (!b.push(texts, 56)) b.fail("room");
                for (uint64_t i = 0; i < count; i++) sent[b.next_token - count + i] = texts[i][0];
                if (random.below(3) == 0) {
                    sent[b.next_token] = 'h';
                    if (!b.push("held")) b.fail("room");
                }
            }
            if (rounds == 60) b.push("answer all"), sent[b.next_token - 1] = 'a';
        };
        CHECK(b.runner.run("b_obey"));
        b.pop();
        CHECK_EQ(b.wrong, 0);
        CHECK(notes.held > 300);
        CHECK_EQ(b.outcomes.size(), sent.size());
        for (const auto& [token, what] : sent) CHECK_EQ(b.outcomes[token].kind == SERVAL_KIND_DROP, what == 'd');
        CHECK(b.keeps_replies());
        CHECK_EQ(b.words()->received, sent.size());
        CHECK_EQ(b.words()->sent + b.words()->dropped, sent.size());
    }
}

// The engine counts the second answer; the block must not write over another reply.
TEST(a_message_that_is_answered_twice_harms_no_other) {
    Bench b;
    CHECK(b.push({"eone", "tone", "eone"}));
    b.stop(SERVAL_STOP_DRAIN);
    CHECK(b.runner.run("b_obey"));
    const uint64_t first = b.next_token - 3;
    std::vector<uint64_t> answered;
    while (recv(b.tx, b.data) == Look::FOUND) {
        serval_bundle_reply r;
        CHECK_EQ(b.tx.message.kind, SERVAL_KIND_BUNDLE);
        CHECK_EQ(b.tx.message.token, first);
        std::memcpy(&r, b.data.data(), sizeof r);
        answered.push_back(r.answered);
        CHECK_EQ(r.len, r.answered == 2 ? 0 : 4);
        if (r.len)
            for (unsigned k = 0; k < static_cast<unsigned>(__builtin_popcountll(r.answered)); k++)
                CHECK(std::memcmp(b.region.base + r.offset + k * r.stride, k || r.answered == 4 ? (r.answered == 4 ? "eone" : "tone") : "eone", 4) == 0);
    }
    CHECK(answered == (std::vector<uint64_t>{3, 2, 4}));
    CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
}

TEST(impossible_descriptors_end_the_block) {
    using Change = void (*)(Bench&, serval_bundle&);
    const Change changes[] = {
        [](Bench&, serval_bundle&) {},  // this one is possible
        [](Bench&, serval_bundle& d) { d.count = 0; },
        [](Bench&, serval_bundle& d) { d.count = BUNDLE + 1; },
        [](Bench&, serval_bundle& d) { d.count = ~0u; },
        [](Bench&, serval_bundle& d) { d.stride = d.len - 1; },
        [](Bench&, serval_bundle& d) { d.stride = ~0u; },
        [](Bench&, serval_bundle& d) { d.len = d.stride = 257; },
        [](Bench&, serval_bundle& d) { d.len = d.last_len = ~0u; },
        [](Bench&, serval_bundle& d) { d.last_len = d.len + 1; },
        [](Bench&, serval_bundle& d) { d.offset = 0; },
        [](Bench& b, serval_bundle& d) { d.offset = b.region.pool_entry(0)->offset - 64; },
        [](Bench& b, serval_bundle& d) { d.offset = b.region.pool_entry(1)->offset - 64; },
        [](Bench& b, serval_bundle& d) { d.offset = b.region.bytes - 64; },
        [](Bench&, serval_bundle& d) { d.offset = ~uint64_t{63}; },
        [](Bench& b, serval_bundle& d) { d.offset += b.region.pool_entry(0)->bytes; },  // the replies are in the other pool
        [](Bench&, serval_bundle& d) { d.reply_offset = 0; },
        [](Bench&, serval_bundle& d) { d.reply_offset += 8; },
        [](Bench& b, serval_bundle& d) { d.reply_offset = b.region.bytes; },
        [](Bench& b, serval_bundle& d) { d.reply_offset = b.region.bytes - 4 * 256 + 64; },
        [](Bench&, serval_bundle& d) { d.reply_offset = ~uint64_t{63}; },
        [](Bench&, serval_bundle& d) { d.reply_bytes--; },
        [](Bench&, serval_bundle& d) { d.reply_bytes = ~0u; },
        [](Bench& b, serval_bundle&) { b.region.pool_entry(0)->kind = 77; },
        [](Bench& b, serval_bundle&) { b.region.pool_entry(0)->version++; },
        [](Bench& b, serval_bundle&) { b.region.pool_entry(0)->offset = b.region.bytes; },
        [](Bench& b, serval_bundle&) { b.region.pool_entry(0)->bytes = ~0ull; },
        [](Bench& b, serval_bundle&) { b.region.pool_entry(0)->bytes = 64; },
        [](Bench& b, serval_bundle&) { b.region.pool_entry(0)->offset = 0; },
        [](Bench& b, serval_bundle&) { b.next_token++; },  // below, the token of message 0 is no multiple of 64
    };
    for (unsigned protocol : PROTOCOLS) {
        for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
            Shape s;
            s.protocol = protocol;
            Bench b(Bench::with_pools(s, 2));
            serval_bundle d = b.describe(texts_of("eeee"), 70);
            changes[i](b, d);
            CHECK(send(b.rx, message(b.next_token, sizeof d, SERVAL_KIND_BUNDLE), &d));
            b.bundles[b.next_token] = {d.count, d.reply_offset, d.reply_bytes, {}};
            b.stop(SERVAL_STOP_DRAIN);
            CHECK(b.runner.run("b_obey"));
            const bool good = i == 0;
            const uint64_t reason = good ? SERVAL_REASON_STOPPED : SERVAL_REASON_RING_CORRUPT;
            if (b.words()->reason != reason || b.pop() != good || notes.messages != (good ? 4 : 0) || b.wrong) {
                check::fail(__FILE__, __LINE__, "only the first is possible");
                std::printf("    change %zu, reason %" PRIu64 "\n", i, b.words()->reason);
            }
        }
    }
}

TEST(slots_that_are_no_bundles_end_the_block) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        for (unsigned what = 0; what < 4; what++) {
            Shape shape = Bench::with_pools(s);
            if (what == 1) shape.pools = 0;
            if (what == 2) shape.backends = 1;
            Bench b(shape);
            serval_bundle d = {};
            if (what != 1) d = b.describe({"b"}, 64);
            Producer p = what == 2 ? b.region.producer(1, false) : b.rx;
            const uint32_t len = what == 3 ? 32 : sizeof d;
            CHECK(send(p, message(BUNDLE, len, what ? SERVAL_KIND_BUNDLE : SERVAL_KIND_DROP), &d));
            if (what == 2) CHECK(b.push("b"));
            CHECK(b.runner.run("b_obey"));
            CHECK_EQ(b.words()->reason, SERVAL_REASON_RING_CORRUPT);
            CHECK_EQ(notes.messages, what == 2);
        }
    }
}

// Replies must not be longer than an inline payload of TX for its completion to fit.
TEST(rings_too_small_for_completions_take_no_bundles) {
    Shape s;
    Bench b(Bench::with_pools(s));
    b.region.entry(0, true)->inline_bytes = b.region.entry(0, true)->message_bytes_max = 16;
    CHECK(b.push(texts_of("e")));
    CHECK(b.runner.run("b_obey"));
    CHECK_EQ(b.words()->reason, SERVAL_REASON_RING_CORRUPT);
}

// What the other side writes after a message was handed out is not seen, nor is anything outside the region read.
TEST(messages_are_copied_once_from_the_end_of_the_region) {
    for (uint32_t len : {1u, 7u, 8u, 31u, 33u, 64u, 255u}) {
        Bench b;
        const serval_pool_entry pool = *b.region.pool_entry(0);
        serval_bundle d = b.describe({"e"}, 1);
        d.count = 5;
        d.len = d.last_len = d.stride = len;
        d.offset = pool.offset + pool.bytes - 5 * len;
        d.reply_bytes = 5 * 256;
        d.reply_offset = b.take(d.reply_bytes);
        std::memset(b.region.base + d.offset, 'e', 5 * len);
        notes.on_message = [&](const std::string& text) {
            if (text != std::string(len, 'e')) b.fail("what was published");
            std::memset(b.region.base + d.offset + (notes.messages - 1) * len, 'X', len);
        };
        CHECK(b.push(d));
        b.stop(SERVAL_STOP_DRAIN);
        CHECK(b.runner.run("b_obey"));
        b.pop();
        CHECK_EQ(b.wrong, 0);
        CHECK_EQ(b.outcomes.size(), 5);
        for (const auto& [token, outcome] : b.outcomes) CHECK(outcome.reply == std::string(len, 'e'));
    }
}

TEST(bundles_in_every_pool) {
    Bench b(Bench::with_pools(Shape(), 3));
    for (unsigned pool : {2, 0, 1, 1, 0, 2}) {
        serval_bundle d = b.describe(texts_of("eee"), 8);
        const uint64_t by = b.region.pool_entry(pool)->offset - b.region.pool_entry(0)->offset;
        std::memmove(b.region.base + d.offset + by, b.region.base + d.offset, 24);
        d.offset += by;
        d.reply_offset += by;
        CHECK(b.push(d));
    }
    b.stop(SERVAL_STOP_DRAIN);
    CHECK(b.runner.run("b_obey"));
    b.pop();
    CHECK_EQ(b.outcomes.size(), 18);
    CHECK_EQ(b.wrong, 0);
}

TEST(draining_hands_out_the_rest_of_a_bundle) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        Bench b(Bench::with_pools(s));
        notes.on_message = [&](const std::string&) {
            if (notes.messages == 3) b.stop(SERVAL_STOP_DRAIN);
        };
        CHECK(b.push(texts_of("eeeeeee")));
        CHECK(b.push("single"));
        CHECK(b.push(texts_of("ee")));
        CHECK(b.runner.run("b_obey"));
        b.pop();
        CHECK_EQ(b.outcomes.size(), 10);
        CHECK_EQ(b.wrong, 0);
        CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
        CHECK_EQ(b.runner.waits[SERVAL_WAIT_RX], 0);
    }
}

TEST(a_stop_publishes_what_was_answered_and_nothing_else) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        Bench b(Bench::with_pools(s));
        notes.on_message = [&](const std::string&) {
            if (notes.messages == 3) b.stop(SERVAL_STOP_NOW);
        };
        CHECK(obey(b, "eeeeeee", SERVAL_STOP_RUN));
        CHECK_EQ(b.outcomes.size(), 3);
        CHECK_EQ(b.completions, 1);
        CHECK_EQ(b.wrong, 0);
        CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
        CHECK_EQ(b.words()->received, 3);
        CHECK_EQ(b.words()->sent, 3);
    }
}

TEST(a_kernel_that_ends_in_a_bundle_has_published_its_answers) {
    for (const char* commands : {"eere", "eeoe"}) {
        Bench b;
        CHECK(obey(b, commands, SERVAL_STOP_RUN));
        CHECK_EQ(b.outcomes.size(), 2);
        CHECK_EQ(b.wrong, 0);
        CHECK_EQ(b.words()->reason, commands[2] == 'r' ? SERVAL_REASON_RETURNED : SERVAL_REASON_CONTRACT);
        CHECK_EQ(b.words()->received, 3);
        CHECK_EQ(b.words()->sent, 2);
    }
}

TEST(answers_are_published_before_a_block_waits) {
    for (const char* commands : {"eewe", "eebe", "eeee"}) {
        Shape s;
        s.backends = 1;
        Bench b(Bench::with_pools(s));
        Producer db_rx = b.region.producer(1, false);
        Consumer db_tx = b.region.consumer(1, true);
        if (commands[2] == 'e') b.runner.args.budget = 2;
        unsigned waits = 0;
        b.runner.waiting = [&](uint32_t why, uint64_t) {
            b.pop();
            if (waits++ == 0 && (b.outcomes.size() != 2 || b.completions != 1)) b.fail("published before the wait");
            fake_now += 1000;
            b.region.engine()->heartbeat++;
            if (why == SERVAL_WAIT_BACKEND && recv(db_tx, b.data) == Look::FOUND) send(db_rx, message(0, 1), "!");
        };
        CHECK(obey(b, commands));
        CHECK(waits > 0);
        CHECK_EQ(b.outcomes.size(), 4);
        CHECK_EQ(b.wrong, 0);
    }
}

// No reply waits for messages behind it that take long.
TEST(answers_of_a_slow_bundle_are_published_at_once) {
    Bench b;
    unsigned published = 0;
    notes.on_message = [&](const std::string&) {
        b.pop();
        if (notes.messages > 1 && b.outcomes.size() == notes.messages - 1) published++;
        fake_now += notes.messages <= 4 ? 2 * serval::detail::BUNDLE_PATIENCE_NS : 1;
    };
    std::vector<std::string> texts(BUNDLE, "e");
    CHECK(b.push(texts, 64));
    b.stop(SERVAL_STOP_DRAIN);
    CHECK(b.runner.run("b_obey"));
    b.pop();
    CHECK_EQ(b.outcomes.size(), BUNDLE);
    // The average is computed again at messages 1, 2, 4, 8 and so on: at 16 it is good enough.
    CHECK_EQ(published, 15);
    CHECK_EQ(b.completions, 16);
    CHECK_EQ(b.wrong, 0);
}

TEST(completions_wait_for_credit_and_give_up) {
    for (unsigned protocol : PROTOCOLS) {
        for (bool gives_up : {false, true}) {
            Shape s;
            s.protocol = protocol;
            s.depth = 2;
            Bench b(Bench::with_pools(s));
            unsigned waits = 0;
            b.runner.waiting = [&](uint32_t why, uint64_t) {
                if (why != SERVAL_WAIT_TX) return b.stop(SERVAL_STOP_DRAIN);
                waits++;
                if (gives_up) return b.stop(SERVAL_STOP_NOW);
                b.pop();
            };
            CHECK(b.push({"l1111\5", "l1111\6", "l1111\7", "l1111\10", "l1111\5"}));
            CHECK(b.runner.run("b_obey"));
            CHECK(waits > 0);
            if (gives_up) CHECK(!notes.sent);
            b.pop();
            CHECK_EQ(b.outcomes.size(), gives_up ? 2 : 5);
            CHECK_EQ(b.words()->sent, gives_up ? 2 : 5);
            CHECK_EQ(b.words()->reason, SERVAL_REASON_STOPPED);
            CHECK_EQ(b.wrong, 0);
        }
    }
}

TEST(receives_with_a_time_limit_take_bundles) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s;
        s.protocol = protocol;
        Bench b(Bench::with_pools(s));
        unsigned rounds = 0;
        b.runner.waiting = [&](uint32_t, uint64_t) {
            fake_now += 500;
            b.region.engine()->heartbeat++;
            b.pop();
            if (rounds++ == 10) return b.stop(SERVAL_STOP_DRAIN);
            if (!b.push(texts_of("eeeee")) || !b.push("single")) b.fail("room");
        };
        CHECK(b.runner.run("b_try"));
        b.pop();
        CHECK_EQ(b.outcomes.size(), 60);
        CHECK_EQ(notes.messages, 60);
        CHECK_EQ(b.wrong, 0);
    }
}

// Descriptors with random numbers, some of them plausible: whatever they say, only pools are read and written.
TEST(random_descriptors_are_contained) {
    check::Random random(11);
    unsigned taken = 0;
    for (unsigned round = 0; round < 2000; round++) {
        Shape s;
        s.protocol = PROTOCOLS[round % std::size(PROTOCOLS)];
        s.pool_bytes = 8192;
        s.pools = 2;
        Bench b(s);
        serval_bundle d;
        random.fill(&d, sizeof d);
        const uint64_t pool = b.region.pool_entry(static_cast<unsigned>(random.below(2)))->offset;
        if (random.below(8)) d.offset = pool + random.below(8192);
        if (random.below(8)) d.reply_offset = (pool + random.below(8192)) / 16 * 16;
        if (random.below(8)) d.count = static_cast<uint32_t>(random.below(12));
        if (random.below(8)) d.len = static_cast<uint32_t>(random.below(260));
        if (random.below(8)) d.last_len = d.len / 2;
        if (random.below(8)) d.stride = d.len + static_cast<uint32_t>(random.below(20));
        if (random.below(8)) d.reply_bytes = d.count * 256 + static_cast<uint32_t>(random.below(20));
        for (uint64_t at = b.region.pool_entry(0)->offset; at < b.region.bytes; at++) b.region.base[at] = "eehdlxat"[random.below(8)];
        std::vector<uint8_t> before(b.region.base + b.region.entry(0, false)->slots_offset, b.region.base + b.region.entry(0, true)->slots_offset);
        CHECK(send(b.rx, message(BUNDLE * random.below(5), sizeof d, SERVAL_KIND_BUNDLE), &d));
        b.runner.waiting = [&](uint32_t why, uint64_t) {
            if (why == SERVAL_WAIT_TX) while (recv(b.tx, b.data) == Look::FOUND) {}
            else b.stop(SERVAL_STOP_DRAIN);
        };
        std::memcpy(before.data(), b.region.base + b.region.entry(0, false)->slots_offset, before.size());
        CHECK(b.runner.run("b_obey"));
        CHECK(std::memcmp(before.data(), b.region.base + b.region.entry(0, false)->slots_offset, before.size()) == 0);
        CHECK(b.words()->reason != SERVAL_REASON_CONTRACT);
        taken += notes.messages != 0;
    }
    CHECK(taken > 100);
}

int main(int argc, char** argv) { return check::run_all(argc, argv); }
