// The herald of a region on CUDA: one warp that looks at the RX heads for all blocks that wait.
//
// A look at a ring is a read over the bus. Hundreds of blocks that look without a pause have more reads under way than the bus takes,
// and the few blocks that have work wait behind them. The heads stand densely in the region, so one warp sees those of 264 mqueues
// with some seventy sectors in one trip. It writes what it sees into the GPU's memory (serval_herald_post), where blocks look without
// the bus. It looks only at the heads of mqueues whose blocks say that they wait; while nobody waits it leaves the bus alone.
//
// What it writes is a hint and orders nothing: a block that is told of a message looks at its ring as ever. A herald that stands still,
// has ended or never came (nothing else starts or ends with it) costs latency alone, because a block relies on it for RELIES_NS and
// then looks once by itself. The two words of a post have one writer each, and nothing is told by a change: the herald copies a count,
// again and again, so no wake-up can be lost.
#ifndef SERVAL_HERALD_H
#define SERVAL_HERALD_H

#include "abi.h"
#include "memory.h"

namespace serval {
namespace detail {

// The engine is lost when its heartbeat stood still for this long.
constexpr uint64_t ENGINE_LOST_NS = 5000000000u;
// Most silence that one check adds. A machine that was suspended, or a debugger, stops both sides: it must not look lost.
constexpr uint64_t SILENCE_STEP_NS = 1000000000u;
// How long a block relies on the herald before it looks by itself. 264 of them then look 13 million times a second, of the two
// hundred million looks that they would make otherwise.
constexpr uint64_t RELIES_NS = 20000;
// How long the herald rests when nobody waits. What comes meanwhile is for blocks that still look by themselves.
constexpr unsigned HERALD_REST_NS = 500;
// Turns of the herald between two looks at the engine's words.
constexpr unsigned HERALD_TURNS = 64;

// The engine's heartbeat, as one of those who watch it knows it.
struct Pulse {
    uint64_t beat;       // as last seen
    uint64_t at;         // time of the last check; 0 before the first that found it unchanged
    uint64_t silent_ns;  // how long it has not moved

    // Is the engine lost? `now` tells nanoseconds, and is asked only when the heart did not beat.
    template <class Now>
    SERVAL_INLINE bool is_lost(const serval_engine_words* engine, Now now) {
        // EDGE HEARTBEAT (acquire half)
        const uint64_t seen = load_acquire(&engine->heartbeat);
        if (seen != beat) {
            beat = seen;
            at = silent_ns = 0;
            return false;
        }
        const uint64_t time = now();
        if (at && time > at) silent_ns += time - at < SILENCE_STEP_NS ? time - at : SILENCE_STEP_NS;
        at = time;
        return silent_ns >= ENGINE_LOST_NS;
    }
};

// Is there a message beyond the first `next`, as far as the herald knows? What it knows may be old: then it is less than `next`.
SERVAL_INLINE bool is_told(const serval_herald_post* post, uint64_t next) {
    return static_cast<int64_t>(load_relaxed(&post->head) - next) > 0;
}

// By the leader of a block that has looked at its ring in vain for a while: waits until the herald tells of a message beyond the first
// `next`, or until the block should look by itself. The mqueue stays among those that wait until the herald has told of it.
inline SERVAL_DEVICE void rely(serval_herald_post* post, uint64_t next, uint64_t deadline_ns) {
    store_relaxed(&post->waits, 1);
    const uint64_t relied = clock_ns() + RELIES_NS, until = relied < deadline_ns ? relied : deadline_ns;
    while (!is_told(post, next)) {
        if (clock_ns() >= until) return;
        rest_ns(50);
    }
    store_relaxed(&post->waits, 0);
}

// By the herald: copies the heads of the mqueues that wait. False when none does.
SERVAL_INLINE bool announce(const serval_herald_args& args) {
    constexpr unsigned BATCH = 4;  // loads of a thread that are under way at once
    const uint64_t* heads = reinterpret_cast<const uint64_t*>(args.heads);
    serval_herald_post* posts = reinterpret_cast<serval_herald_post*>(args.posts);
    bool any = false;
    for (unsigned first = crew_rank(); first < args.mqueue_count; first += BATCH * CREW_SIZE) {
        bool waits[BATCH];
        uint64_t head[BATCH] = {};
#if SERVAL_CUDA
#pragma unroll
#endif
        for (unsigned k = 0; k < BATCH; k++) {
            const unsigned i = first + k * CREW_SIZE;
            waits[k] = i < args.mqueue_count && load_relaxed(&posts[i].waits) != 0;
        }
#if SERVAL_CUDA
#pragma unroll
#endif
        for (unsigned k = 0; k < BATCH; k++)
            if (waits[k]) head[k] = load_relaxed(heads + first + k * CREW_SIZE);
#if SERVAL_CUDA
#pragma unroll
#endif
        for (unsigned k = 0; k < BATCH; k++) {
            if (waits[k]) store_relaxed(&posts[first + k * CREW_SIZE].head, head[k]);
            any = any || waits[k];
        }
    }
    return !crew_all(!any);
}

// The herald, until the service stops or the engine is lost. A block that waits longer, because it drains, looks by itself.
inline SERVAL_DEVICE void run_herald(const serval_herald_args* given) {
    const serval_herald_args args = *given;
    if (args.abi_version != SERVAL_ABI_VERSION) return;
    const serval_engine_words* engine = reinterpret_cast<const serval_engine_words*>(args.engine);
    Pulse pulse = {};
    for (unsigned turn = 0;; turn++) {
        // A hint like all it says: nothing is read because of the stop word.
        if (turn % HERALD_TURNS == 0 &&
            crew_first(leader() && (load_relaxed(&engine->stop) != SERVAL_STOP_RUN || pulse.is_lost(engine, clock_ns))))
            return;
        if (!announce(args)) rest_ns(HERALD_REST_NS);
    }
}

}  // namespace detail
}  // namespace serval

#endif
