// Monitors the engine's heartbeat: blocks end when it stops, because nothing may spin on an accelerator for a process that is gone.
#ifndef SERVAL_HEARTBEAT_H
#define SERVAL_HEARTBEAT_H

#include "abi.h"
#include "memory.h"

namespace serval {
namespace detail {

// The engine counts as lost if its heartbeat did not change for this long.
constexpr uint64_t ENGINE_LOST_NS = 5000000000u;
// Maximum silence added by one check. After a suspend, or in a debugger, both sides were stopped: that must not count as loss.
constexpr uint64_t SILENCE_STEP_NS = 1000000000u;

// One block's view of the heartbeat.
struct HeartbeatMonitor {
    uint64_t beat;       // as last seen
    uint64_t at;         // time of the last check; 0 before the first check that found it unchanged
    uint64_t silent_ns;  // time without a change

    // Is the engine lost? `now` returns nanoseconds, and is called only if the heartbeat did not change.
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
