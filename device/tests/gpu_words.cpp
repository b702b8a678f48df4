// gpu_words: checks on a GPU the ordering edges of words, while this machine's engine stores as fast as it can
// (gpu_test.cpp has its half). All accesses under test are the library's own. `mode`:
//
//   0 STOP       the data stored before a stop word is visible once the stop word is
//   1 HEARTBEAT  the same for a heartbeat
//   2 STATE      reason and counts are visible once the engine sees the state
//
// With `control` the orders are reversed intentionally: the watching side must detect it. `data` is the offset of four words in four
// lines of the region that the engine stores before each stop word or heartbeat. Numbers increase; LAST ends the test.
#include <serval/kernel.h>

namespace serval {
namespace detail {

constexpr uint64_t LAST = uint64_t{1} << 62;
constexpr uint64_t PATIENCE_NS = 60000000000u;

struct Inspector {
    Block& block;
    Mqueue& q;
    bool control;
    uint64_t give_up_at;

    // The counts are this kernel's own, not those of the rings.
    SERVAL_DEVICE void count_by_hand() {
        if (leader()) block.received_of_ = nullptr;
        block_sync();
    }

    // By the crew. Counts polls in sent_, and in dropped_ those that saw a word before its data.
    SERVAL_DEVICE void watch(bool beats, uint64_t data_offset) {
        const uint64_t* data = reinterpret_cast<const uint64_t*>(block.args_.region + data_offset) + crew_rank() % 4 * 16;
        uint64_t looks = 0, early = 0;
        while (crew_first(block.now_ns()) < give_up_at) {
            const uint64_t before = load_relaxed(data);
            const uint64_t word = beats ? beat() : block.stop_word();
            const uint64_t stored = control ? before : load_relaxed(data);
            if (crew_first(word) >= LAST) break;
            looks++;
            early += !crew_all(stored >= word);
        }
        if (leader()) block.sent_ = looks, block.dropped_ = early;
    }

    SERVAL_DEVICE uint64_t beat() {
        if (leader()) block.check_heartbeat();
        return crew_first(block.heartbeat_.beat);
    }

    // By the leader. The engine acknowledges each state in the mqueue's first slot by a counter.
    SERVAL_DEVICE void end_again_and_again() {
        const uint64_t* noted = reinterpret_cast<const uint64_t*>(q.channel_.rx_.ring.slots);
        auto await = [&](uint64_t n) {
            uint64_t seen = 0;
            while ((seen = load_relaxed(noted)) < n && block.now_ns() < give_up_at) {
            }
            return seen < LAST && seen >= n;
        };
        for (uint64_t n = 1;; n++) {
            block.ready();
            if (!await(2 * n - 1)) break;
            block.reason_ = block.sent_ = block.dropped_ = n;
            if (control) {
                store_relaxed(&block.words_->state, SERVAL_STATE_ENDED);
                block.publish_counts();
                store_relaxed(&block.words_->reason, n);
            } else {
                block.finish();
            }
            if (!await(2 * n)) break;
        }
        block.reason_ = SERVAL_REASON_STOPPED;
    }
};

}  // namespace detail
}  // namespace serval

SERVAL_KERNEL(gpu_words) (serval::Block& block, serval::Mqueue& q) {
    const unsigned mode = static_cast<unsigned>(block.param("mode", 0));
    const uint64_t data = static_cast<uint64_t>(block.param("data", 0));
    serval::detail::Inspector inspector = {block, q, block.param("control", 0) != 0, block.now_ns() + serval::detail::PATIENCE_NS};
    inspector.count_by_hand();
    if (mode == 2) {
        if (serval::detail::leader()) inspector.end_again_and_again();
    } else if (serval::detail::in_crew()) {
        inspector.watch(mode == 1, data);
    }
    block.sync();
    while (auto msg = q.recv(block)) q.drop(block, msg, serval::REJECTED);
}
