// Bundles: runs of requests in a pool that travel as one slot (crates/mqueue/src/abi.rs). A block hands out their messages one by
// one, and collects the replies to one bundle in a *completion*, one slot as well.
//
// The descriptor is checked once, in a private copy. Messages are copied to staging before the kernel sees them: a
// pool can be written by the other side at any time.
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

// Instead of a ring's protocol: a slot was found that is no message, which is left to code apart: on CUDA a call costs its caller the registers that
// it uses. And: a bundle is open, or its completion is in progress.
constexpr uint8_t PATH_SLOT = 254, PATH_BUNDLE = 255;

// A reply waits for the rest of its bundle if a message takes less than this on average.
constexpr uint64_t BUNDLE_PATIENCE_NS = 4000;

// Parts of an area are counted in this many bytes.
constexpr unsigned PART_UNIT = 16;
SERVAL_INLINE uint32_t round16(uint32_t bytes) { return (bytes + 15) & ~15u; }

// A block's bundles: the one received last, and the completion in progress, which need not be of the same bundle.
struct Bundles {
    Pools pools;
#if SERVAL_CUDA
    // Staging of a part of the bundle: the bytes of the region from `staged_from` on, with the messages below `staged`.
    uint8_t* area;
    uint32_t area_bytes;
    uint32_t staged;
    uint64_t staged_from;
#endif
    serval_bundle it;
    uint64_t token;
    uint64_t since_ns;
    uint32_t given;     // messages handed out; of the last one:
    uint32_t given_len, given_part;
    uint64_t given_token;
    uint32_t expected;  // the message whose reply is appended at `cursor`
    uint64_t cursor;
    uint64_t done;  // messages that were answered or dropped
    bool slow;      // replies are published at once

    serval_bundle_reply answers;  // the completion; it has no answers if there is none
    uint64_t answers_token;
    uint32_t answers_count;

    SERVAL_INLINE bool has_more() const { return given != it.count; }
    SERVAL_INLINE uint32_t len_of(uint32_t i) const { return i + 1 == it.count ? it.last_len : it.len; }
    SERVAL_INLINE uint64_t place_of(uint32_t i) const { return it.offset + static_cast<uint64_t>(i) * it.stride; }
    // The message's part of the area, in units.
    SERVAL_INLINE uint32_t part_of(uint32_t i, const Ring& tx) const {
        return static_cast<uint32_t>((it.reply_offset + static_cast<uint64_t>(i) * round16(tx.len_max)) / PART_UNIT);
    }
    SERVAL_INLINE bool is_current(uint64_t first_token) const { return it.count != 0 && first_token == token; }

    // By the leader, when the block starts. False if the region has no pool.
    inline SERVAL_DEVICE bool open(const Layout& layout) {
        it = {};
        answers = {};
        given = answers_count = 0;
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
        slow = false;
#if SERVAL_CUDA
        staged = 0;
#endif
        return true;
    }

    // By the leader: the message of the bundle received last is answered or dropped.
    SERVAL_INLINE void finish(uint32_t i) {
        done |= uint64_t{1} << i;
        while (expected < it.count && (done >> expected & 1)) expected++;
    }
};

}  // namespace detail
}  // namespace serval

#endif
