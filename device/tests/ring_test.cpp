// Rings: messages arrive unchanged, and a hostile peer cannot cause an access outside the ring.
#include "region.h"

using namespace testing;

namespace {

// Passes `count` messages of random sizes through RX, in random bursts, and compares each with its model.
void round_trip(const Shape& shape, uint64_t count, uint64_t seed) {
    Region region(shape);
    Producer p = region.producer(0, false);
    Consumer c = region.consumer(0, false);
    check::Random random(seed);
    struct Sent {
        Header h;
        std::vector<uint8_t> data;
    };
    std::vector<Sent> sent;
    uint64_t received = 0, refused = 0;
    std::vector<uint8_t> data;
    while (received < count) {
        for (uint64_t burst = random.below(2 * shape.depth); burst > 0 && sent.size() < count; burst--) {
            Sent s;
            // Often short, sometimes long.
            uint32_t len = static_cast<uint32_t>(random.below(random.below(4) ? 100 : shape.len_max + 1));
            if (len > shape.len_max) len = shape.len_max;
            s.data.resize(len);
            random.fill(s.data.data(), len);
            s.h = {random.next(), random.next(), 0, len, SERVAL_KIND_MESSAGE, static_cast<uint8_t>(random.below(20)), 0};
            if (!send(p, s.h, s.data.data())) {
                refused++;
                CHECK(sent.size() > received);  // an empty ring has room for any message
                break;
            }
            sent.push_back(s);
        }
        CHECK(sent.size() - received <= shape.depth);
        for (uint64_t burst = random.below(2 * shape.depth); burst > 0; burst--) {
            Look look = recv(c, data);
            if (look == Look::NONE) break;
            CHECK(look == Look::FOUND);
            CHECK(received < sent.size());
            const Sent& want = sent[received++];
            CHECK_EQ(c.message.token, want.h.token);
            CHECK_EQ(c.message.tag, want.h.tag);
            CHECK_EQ(c.message.len, want.h.len);
            CHECK_EQ(c.message.kind, want.h.kind);
            CHECK_EQ(c.message.status, want.h.status);
            CHECK(data == want.data);
            CHECK_EQ(*region.tail(0, false), shape.start + received);
        }
    }
    CHECK(refused > 0);
    CHECK_EQ(*region.head(0, false), shape.start + count);
    CHECK(recv(c, data) == Look::NONE);
}

Shape shape_of(unsigned protocol) {
    Shape s;
    s.protocol = protocol;
    return s;
}

}  // namespace

TEST(random_messages_round_trip) {
    for (unsigned protocol : PROTOCOLS) {
        for (unsigned depth : {1u, 2u, 8u, 64u}) {
            for (unsigned inline_bytes : {8u, 64u, 256u, 1024u, SERVAL_INLINE_BYTES_MAX}) {
                Shape s = shape_of(protocol);
                s.depth = depth;
                s.inline_bytes = inline_bytes;
                s.len_max = inline_bytes - (inline_bytes > 8 ? 3 : 0);
                round_trip(s, 2000, depth * inline_bytes + protocol);
            }
        }
    }
}

TEST(counts_and_sequences_wrap) {
    const uint64_t starts[] = {(1ull << 32) - 3, (1ull << 32) - 1, 1ull << 32, 1ull << 31, (1ull << 31) - 5,
                               (1ull << 63) - 2, 5 * (1ull << 32) - 9, 65536ull * 8 - 4};
    for (unsigned protocol : PROTOCOLS) {
        for (uint64_t start : starts) {
            Shape s = shape_of(protocol);
            s.start = start;
            round_trip(s, 300, start + protocol);
        }
    }
}

TEST(arena_wraps_and_skips) {
    // Arenas from barely one message to several; the longest message fills the smallest arena.
    for (uint64_t arena : {1000u, 1008u, 1504u, 4096u, 40000u}) {
        Shape s;
        s.depth = 32;
        s.inline_bytes = 64;
        s.len_max = 1000;
        s.arena_bytes = arena;
        round_trip(s, 5000, arena);
        s.depth = 128;  // more payloads in flight than the producer tracks separately
        s.len_max = 200;
        round_trip(s, 5000, arena + 1);
    }
}

TEST(arena_payloads_in_flight_do_not_overlap) {
    Shape s;
    s.depth = 64;
    s.inline_bytes = 8;
    s.len_max = 300;
    s.arena_bytes = 2048;
    Region region(s);
    Producer p = region.producer(0, true);
    Consumer c = region.consumer(0, true);
    check::Random random(7);
    uint8_t data[300] = {};
    struct Span {
        uint64_t from, to;
    };
    std::vector<Span> flying;
    for (int i = 0; i < 20000; i++) {
        uint32_t len = 9 + static_cast<uint32_t>(random.below(292));
        if (random.below(3) && room(p, len) == Look::FOUND) {
            p.write(data);
            Span span = {p.message.arena_offset, p.message.arena_offset + len};
            CHECK_EQ(span.from % 8, 0);
            CHECK(span.to <= s.arena_bytes);
            for (const Span& other : flying) CHECK(span.to <= other.from || other.to <= span.from);
            p.publish();
            flying.push_back(span);
        } else if (!flying.empty()) {
            std::vector<uint8_t> out;
            CHECK(recv(c, out) == Look::FOUND);
            flying.erase(flying.begin());
        }
    }
    CHECK(p.next > 5000);
}

TEST(arena_space_comes_back_however_late_it_is_asked_for) {
    Shape s;
    s.inline_bytes = 8;
    s.len_max = 1000;
    s.arena_bytes = 1000;
    Region region(s);
    Producer p = region.producer(0, true);
    Consumer c = region.consumer(0, true);
    std::vector<uint8_t> big(1000), data;
    for (int round = 0; round < 3; round++) {
        CHECK(send(p, message(1, 1000), big.data()));
        CHECK(room(p, 9) == Look::NONE);
        CHECK(recv(c, data) == Look::FOUND);
        // Many laps without an arena payload in between.
        for (int i = 0; i < 50; i++) {
            CHECK(send(p, message(2, 1), "x"));
            CHECK(recv(c, data) == Look::FOUND);
        }
    }
}

// If 16-byte units can tear, their rings are refused when they are opened.
TEST(granule16_is_refused_where_units_could_tear) {
    const bool opened = serval::detail::slot_bytes(SERVAL_PROTOCOL_GRANULE16, 64) != 0;
    CHECK(opened == serval::detail::granule16_supported());
}

TEST(credit_runs_out_and_comes_back) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s = shape_of(protocol);
        s.depth = 4;
        Region region(s);
        Producer p = region.producer(0, true);
        Consumer c = region.consumer(0, true);
        std::vector<uint8_t> data;
        for (int lap = 0; lap < 3; lap++) {
            for (unsigned i = 0; i < 4; i++) CHECK(send(p, message(i, 1), "x"));
            CHECK(room(p, 1) == Look::NONE);
            CHECK(recv(c, data) == Look::FOUND);
            CHECK(room(p, 1) == Look::FOUND);
            for (unsigned i = 0; i < 3; i++) CHECK(recv(c, data) == Look::FOUND);
        }
    }
}

TEST(padding_never_carries_old_bytes) {
    for (unsigned protocol : PROTOCOLS) {
        Shape s = shape_of(protocol);
        s.depth = 1;
        s.inline_bytes = s.len_max = 64;
        Region region(s);
        Producer p = region.producer(0, true);
        Consumer c = region.consumer(0, true);
        uint8_t secret[64];
        std::memset(secret, 0x5c, sizeof secret);
        for (uint32_t len = 0; len <= 9; len++) {
            CHECK(send(p, message(1, len), secret));
            alignas(8) uint8_t raw[64];
            std::memset(raw, 0, sizeof raw);
            CHECK(c.look(raw) == Look::FOUND);
            c.copy(raw);
            for (uint32_t i = 0; i < 64; i++) CHECK_EQ(raw[i], i < len ? 0x5c : 0);
            c.advance();
            c.release();
        }
    }
}

TEST(nothing_is_read_beyond_the_payload) {
    // The payload ends at the end of its allocation: the address sanitizer build would report an overrun.
    for (unsigned protocol : PROTOCOLS) {
        Shape s = shape_of(protocol);
        Region region(s);
        Producer p = region.producer(0, true);
        Consumer c = region.consumer(0, true);
        std::vector<uint8_t> out;
        for (uint32_t len = 1; len < 40; len++) {
            std::vector<uint8_t> data(len, static_cast<uint8_t>(len));
            CHECK(send(p, message(len, len), data.data()));
            CHECK(recv(c, out) == Look::FOUND);
            CHECK(out == data);
        }
    }
}

TEST(restamp_laps_stamp_every_unit) {
    for (unsigned protocol : GRANULES) {
        const unsigned unit = protocol == SERVAL_PROTOCOL_GRANULE8 ? 8 : 16;
        Shape s = shape_of(protocol);
        s.depth = 4;
        const uint64_t lap = 4ull * SERVAL_RESTAMP_LAPS;
        s.start = 3 * lap - 2;
        Region region(s);
        Producer p = region.producer(0, true);
        Consumer c = region.consumer(0, true);
        const unsigned units = static_cast<unsigned>(serval::detail::slot_bytes(protocol, s.inline_bytes)) / unit;
        for (uint64_t n = s.start; n < s.start + 8; n++) {
            CHECK(send(p, message(n, 3), "abc"));
            uint32_t last;
            std::memcpy(&last, region.slot(0, true, n) + units * unit - 4, 4);
            bool restamped = n / 4 % SERVAL_RESTAMP_LAPS == 0;
            CHECK_EQ(last, static_cast<uint32_t>(restamped ? n + 1 : n - 4 + 1));
            std::vector<uint8_t> data;
            CHECK(recv(c, data) == Look::FOUND);
            CHECK_EQ(data.size(), 3);
        }
    }
}

TEST(half_written_granules_are_not_ready) {
    for (unsigned protocol : GRANULES) {
        const unsigned unit = protocol == SERVAL_PROTOCOL_GRANULE8 ? 8 : 16;
        Region region(shape_of(protocol));
        Producer p = region.producer(0, false);
        Consumer c = region.consumer(0, false);
        uint8_t payload[100];
        std::memset(payload, 1, sizeof payload);
        CHECK(send(p, message(9, sizeof payload), payload));
        uint8_t* slot = region.slot(0, false, 0);
        const unsigned units = static_cast<unsigned>(serval::detail::slot_bytes(protocol, sizeof payload)) / unit;
        std::vector<uint8_t> data;
        for (unsigned i = 0; i < units; i++) {
            // One unit is late: an old sequence.
            uint8_t saved[16];
            std::memcpy(saved, slot + i * unit, unit);
            std::memset(slot + i * unit, 0, unit);
            CHECK(recv(c, data) == Look::NONE);
            CHECK_EQ(*region.tail(0, false), 0);
            std::memcpy(slot + i * unit, saved, unit);
        }
        CHECK(recv(c, data) == Look::FOUND);
        CHECK_EQ(data.size(), sizeof payload);
    }
}

TEST(zeroed_slots_hold_no_message) {
    // Sequence 0 is that of message 2^32 - 1; zeroed memory has it too.
    for (unsigned protocol : GRANULES) {
        Shape s = shape_of(protocol);
        s.start = (1ull << 32) - 1;
        Region region(s);
        std::memset(region.slot(0, false, s.start), 0, region.entry(0, false)->slot_stride);
        Consumer c = region.consumer(0, false);
        std::vector<uint8_t> data;
        CHECK(recv(c, data) == Look::NONE);
    }
}

TEST(impossible_heads_and_tails_are_corrupt) {
    Shape s;
    s.start = 100;
    for (uint64_t head : {100 + 9ull, 99ull, 0ull, ~0ull, 1ull << 63}) {
        Region region(s);
        Producer p = region.producer(0, false);
        Consumer c = region.consumer(0, false);
        CHECK(send(p, message(1, 1), "x"));  // so that only the head is wrong
        *region.head(0, false) = head;
        std::vector<uint8_t> data;
        CHECK(recv(c, data) == Look::CORRUPT);
    }
    for (unsigned protocol : PROTOCOLS) {
        s.protocol = protocol;
        for (uint64_t tail : {109ull, 99ull, 0ull, ~0ull}) {
            Region region(s);
            Producer p = region.producer(0, true);
            for (int i = 0; i < 8; i++) CHECK(send(p, message(i, 0), nullptr));
            *region.tail(0, true) = tail;
            CHECK(room(p, 1) == Look::CORRUPT);
        }
    }
}

TEST(impossible_headers_are_corrupt) {
    struct Case {
        uint32_t len;
        uint8_t kind;
        uint16_t flags;
        uint64_t arena_offset;
        bool arena;  // does the ring have one (of 4096 bytes)?
        bool good;
    };
    const Case cases[] = {
        {256, 1, 0, 0, false, true},
        {256, 2, 0, 0, false, true},
        {257, 1, 0, 0, false, false},
        {~0u, 1, 0, 0, false, false},
        {10, 0, 0, 0, false, false},
        {10, 3, 0, 0, false, true},
        {10, 4, 0, 0, false, false},
        {10, 255, 0, 0, false, false},
        {10, 1, 2, 0, false, false},
        {10, 1, 0xffff, 0, false, false},
        {10, 1, SERVAL_FLAG_ARENA, 0, false, false},
        {0, 1, SERVAL_FLAG_ARENA, 0, false, false},  // without an arena, even an empty arena payload is invalid
        {10, 1, SERVAL_FLAG_ARENA, 0, true, true},
        {1000, 1, SERVAL_FLAG_ARENA, 3096, true, true},
        {1000, 1, SERVAL_FLAG_ARENA, 3104, true, false},
        {1001, 1, SERVAL_FLAG_ARENA, 3088, true, true},  // in the arena, and within the ring's maximum of 2000
        {1000, 1, SERVAL_FLAG_ARENA, 4, true, false},
        {1000, 1, SERVAL_FLAG_ARENA, ~7ull, true, false},
        {1000, 1, SERVAL_FLAG_ARENA, 1ull << 63, true, false},
        {2001, 1, SERVAL_FLAG_ARENA, 0, true, false},
        {1000, 1, 0, 0, true, false},  // longer than a slot
    };
    for (const Case& k : cases) {
        Shape s;
        s.len_max = k.arena ? 2000 : 256;
        s.arena_bytes = k.arena ? 4096 : 0;
        Region region(s);
        Consumer c = region.consumer(0, false);
        serval_slot_header h = {7, 0, k.arena_offset, k.len, k.kind, 0, k.flags};
        std::memcpy(region.slot(0, false, 0), &h, sizeof h);
        *region.head(0, false) = 1;
        std::vector<uint8_t> data;
        Look look = recv(c, data);
        CHECK(look == (k.good ? Look::FOUND : Look::CORRUPT));
        CHECK_EQ(*region.tail(0, false), k.good ? 1 : 0);
    }
}

TEST(impossible_granule_headers_are_corrupt) {
    for (unsigned protocol : GRANULES) {
        for (int what = 0; what < 3; what++) {
            Region region(shape_of(protocol));
            // A producer configured for longer messages than the ring's maximum.
            Producer p = region.producer(0, false);
            Consumer c = region.consumer(0, false);
            uint8_t payload[256] = {};
            Header h = message(1, 16);
            if (what == 0) h.kind = 9;
            if (what == 1) c.ring.len_max = 15;
            if (what == 2) c.ring.inline_bytes = 8;
            CHECK(send(p, h, payload));
            std::vector<uint8_t> data(256);
            CHECK(c.look(data.data()) == Look::CORRUPT);
        }
    }
}

TEST(random_ring_contents_are_contained) {
    // The sanitizer build checks that no access is outside the region or the buffer.
    check::Random random(99);
    unsigned found = 0;
    for (int round = 0; round < 3000; round++) {
        Shape s = shape_of(PROTOCOLS[static_cast<unsigned>(round) % std::size(PROTOCOLS)]);
        s.inline_bytes = 64;
        s.len_max = s.protocol == SERVAL_PROTOCOL_DOORBELL ? 500 : 64;
        s.arena_bytes = s.protocol == SERVAL_PROTOCOL_DOORBELL ? 1024 : 0;
        Region region(s);
        Consumer c = region.consumer(0, false);
        for (unsigned n = 0; n < s.depth; n++) {
            uint8_t* slot = region.slot(0, false, n);
            random.fill(slot, region.entry(0, false)->slot_stride);
            // Make some of it plausible, otherwise nothing passes the first check.
            if (s.protocol == SERVAL_PROTOCOL_DOORBELL && random.below(2)) {
                serval_slot_header h = {random.next(), random.next(), random.below(1200), static_cast<uint32_t>(random.below(600)),
                                        static_cast<uint8_t>(random.below(3)), 0, static_cast<uint16_t>(random.below(2))};
                std::memcpy(slot, &h, sizeof h);
            }
            if (s.protocol != SERVAL_PROTOCOL_DOORBELL) {
                const unsigned unit = s.protocol == SERVAL_PROTOCOL_GRANULE8 ? 8 : 16;
                uint32_t sequence = n + 1;
                for (unsigned at = 0; at + unit <= region.entry(0, false)->slot_stride; at += unit)
                    std::memcpy(slot + at + unit - 4, &sequence, 4);
                uint32_t len = static_cast<uint32_t>(random.below(100)), kind = static_cast<uint32_t>(random.below(4));
                const unsigned words = unit / 4 - 1;  // header words 6 and 7 are len and kind
                std::memcpy(slot + 6 / words * unit + 6 % words * 4, &len, 4);
                std::memcpy(slot + 7 / words * unit + 7 % words * 4, &kind, 4);
            }
        }
        *region.head(0, false) = random.below(10);
        std::vector<uint8_t> data;
        for (unsigned n = 0; n < s.depth && recv(c, data) == Look::FOUND; n++) found++;
    }
    CHECK(found > 100);
}

int main(int argc, char** argv) { return check::run_all(argc, argv); }
