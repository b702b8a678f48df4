// Bundles: runs of requests in a pool that travel as one slot (crates/mqueue/src/abi.rs). A block hands out their messages one by
// one, or many as a *batch*, and collects the replies to one bundle in a *completion*, one slot as well.
//
// The descriptor is checked once, in a private copy. Messages are copied to staging before the kernel sees them: a
// pool can be written by the other side at any time. On CUDA as many messages are fetched as staging has room for, with many loads in flight
// at once, and the following receives find them there.
//
// Where replies go. The area of a bundle has room for a reply of the maximum length to each message: message `i` owns the i-th part. A reply
// that comes in the order of the messages is appended to the one before, so that replies are close together; one that skips messages
// continues at its own part. Since a reply is never longer than a part, the parts of skipped messages stay free, and a late
// reply goes into its own part. So replies never overlap, and a message needs no state but its part, however many bundles are open.
//
// Ordering edges:
// - RX_BUNDLE: the engine's writes to the pool happen before the block's reads. `doorbell`: as RX_PUBLISH. `granule`: fences.
// - TX_BUNDLE: the block's writes to the area happen before the engine's reads. Likewise.
// - BUNDLE_RETURN: the block's reads of a message happen before the engine's next write there, which follows the end of the message.
#ifndef SERVAL_BUNDLE_H
#define SERVAL_BUNDLE_H

#include "join.h"

namespace serval {
namespace detail {

// Instead of a ring's protocol: a bundle is open, or its completion is in progress.
constexpr uint8_t PATH_BUNDLE = 255;

#if SERVAL_CUDA
// A reply waits no longer than this for the rest of its bundle, in cycles: about 8 us. Each completion waits for the bus for a microsecond.
constexpr uint32_t BUNDLE_PATIENCE_CYCLES = 14000;
#else
// A reply waits for the rest of its bundle if a message takes less than this on average.
constexpr uint64_t BUNDLE_PATIENCE_NS = 4000;
#endif

enum class Found : uint8_t { NOTHING, MESSAGE, RING };

// The messages that a receive asks for: at most `max`, with room for a reply of `reply_bytes` to each.
struct Wish {
    uint32_t max, reply_bytes;
};

// Parts of an area are counted in this many bytes.
constexpr unsigned PART_UNIT = 16;
SERVAL_INLINE uint32_t round16(uint32_t bytes) { return (bytes + 15) & ~15u; }

// A block's bundles: the one received last, and the completion in progress, which need not be of the same bundle.
struct Bundles {
    Pools pools;
    // Staging for many messages and the replies to them. On the host there may be none.
    uint8_t* area;
    uint32_t area_bytes;
    // The messages from `staged_first` on and below `staged_end` are at `staged`, pitch() bytes apart, and `replies` has `reply_room` bytes for each.
    uint32_t staged_first, staged_end, reply_room;
    uint8_t *staged, *replies;
#if SERVAL_CUDA
    // What is fetched: units from `source` on, to `raw`; the first message begins `skew` bytes later.
    const uint8_t* source;
    uint8_t* raw;
    uint32_t units, skew, stride;
#endif

    serval_bundle it;
    uint64_t token;
    uint32_t given;     // messages handed out
    uint32_t expected;  // the message whose reply is appended at `cursor`
    uint64_t cursor;
    uint64_t done;  // messages that were answered or dropped
#if !SERVAL_CUDA
    uint64_t since_ns;
    bool slow;  // replies are published at once
#endif

    serval_bundle_reply answers;  // the completion; it has no answers if there is none
    uint64_t answers_token;
    uint32_t answers_count;
    uint32_t answers_since;  // CUDA: the clock at its first answer

    SERVAL_INLINE uint32_t pitch() const { return round16(it.len); }
    SERVAL_INLINE bool has_more() const { return given != it.count; }
    SERVAL_INLINE uint32_t len_of(uint32_t i) const { return i + 1 == it.count ? it.last_len : it.len; }
    SERVAL_INLINE uint64_t place_of(uint32_t i) const { return it.offset + static_cast<uint64_t>(i) * it.stride; }
    // The message's part of the area, in units.
    SERVAL_INLINE uint32_t part_of(uint32_t i, const Ring& tx) const {
        return static_cast<uint32_t>((it.reply_offset + static_cast<uint64_t>(i) * round16(tx.len_max)) / PART_UNIT);
    }
    // The bits of `count` messages from `i` on; at least one.
    static SERVAL_INLINE uint64_t bits(uint32_t i, uint32_t count) { return ~uint64_t{0} >> (SERVAL_BUNDLE_MAX - count) << i; }
    SERVAL_INLINE bool is_current(uint64_t first_token) const { return it.count != 0 && first_token == token; }

    // By the leader, when the block starts. False if the region has no pool.
    inline SERVAL_DEVICE bool open(const Layout& layout) {
        it = {};
        answers = {};
        given = answers_count = 0;
        area_bytes = 0;
        return pools.open(layout);
    }

    // By the leader: takes the bundle of this token and descriptor. False if it is impossible.
    inline SERVAL_DEVICE bool accept(uint64_t first_token, const uint8_t* descriptor, const Ring& rx, const Ring& tx) {
        serval_bundle d;
        for (unsigned at = 0; at < sizeof d; at += 8)
            private_store(reinterpret_cast<uint8_t*>(&d) + at, private_load<uint64_t>(descriptor + at));
        const uint64_t last = static_cast<uint64_t>(d.count - 1u) * d.stride, room = round16(tx.len_max);
        if (d.count - 1u >= SERVAL_BUNDLE_MAX || first_token % SERVAL_BUNDLE_MAX) return false;
        if (d.len > rx.len_max || d.last_len > d.len || d.stride < d.len) return false;
        if (d.reply_offset % PART_UNIT || d.reply_bytes < d.count * room) return false;
        if (tx.inline_bytes < sizeof answers || tx.len_max < sizeof answers) return false;
        if (!pools.hold(d.offset, last + d.len, d.reply_offset, d.reply_bytes)) return false;
        if ((d.reply_offset + d.reply_bytes) / PART_UNIT >> 32) return false;
        it = d;
        token = first_token;
        given = expected = 0;
        cursor = d.reply_offset;
        done = 0;
        staged_first = staged_end = 0;
#if !SERVAL_CUDA
        slow = false;
#endif
        return true;
    }

#if SERVAL_CUDA
    SERVAL_CALL void plan(uint32_t i, uint32_t room, uint8_t* in);
    SERVAL_CALL void fetch() const;
#endif

    // By the leader: `count` messages of the bundle received last, from `i` on, are answered or dropped.
    SERVAL_INLINE void finish(uint32_t i, uint32_t count) {
        done |= bits(i, count);
        while (expected < it.count && (done >> expected & 1)) expected++;
    }
};

}  // namespace detail
}  // namespace serval

#endif
