// The engine's heartbeat, watched: blocks end when it stands still, because nothing may spin on an accelerator for a process that is gone.
#ifndef SERVAL_PULSE_H
#define SERVAL_PULSE_H

#include "abi.h"
#include "memory.h"

namespace serval {
namespace detail {

// The engine is lost when its heartbeat stood still for this long.
constexpr uint64_t ENGINE_LOST_NS = 5000000000u;
// Most silence that one check adds. A machine that was suspended, or a debugger, stops both sides: it must not look lost.
constexpr uint64_t SILENCE_STEP_NS = 1000000000u;

// The heartbeat as one block knows it.
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

}  // namespace detail
}  // namespace serval

#endif
