// The attach library of Serval: a program of yours drives an accelerator behind the ports of an
// engine.
//
// The configuration has an accelerator with `launch = "external"` and a path. The program joins
// there, and receives the region of one service as a file descriptor: a message queue for each
// block. The program chooses where blocks run, for example on threads, or as one persistent kernel
// on a GPU with which it has registered the region. The kernels are written with the device library
// (device/include, also part of `serval kernel build`). No code of the engine runs in the program,
// and no function is called per message.
//
//     serval::Runtime runtime;
//     if (!runtime.join("/run/serval/acc0")) fail(runtime.why());
//     ... start runtime.blocks() blocks with runtime.block_args(n) ...
//     while (runtime.starting()) { ... }              // until each has reached its first receive
//     runtime.ready();
//     while (runtime.look(100) != serval::Step::OVER) // sends the heartbeat, reads from the engine
//         ... leave the loop if the blocks have ended, runtime.ended(),
//             or one hangs: runtime.hung(10000) < runtime.blocks() ...
//     ... if look() returned SERVING: call it for another second. Blocks may end
//         before the engine's message that it stops arrives ...
//     runtime.stop_blocks();
//     ... wait until no block runs any more, with a deadline:
//         if a block does not end, end the process ...
//     runtime.leave();
//
// One Runtime object is one generation: after leave(), or when the engine is gone, create a new one
// and join again. Call its functions from one thread at a time, and look() at least four times per
// heartbeat_ms(): otherwise the engine considers the program lost, and accepts the next program
// that joins.
//
// The program must detect blocks that hang, with hung() or in its own way. The engine sees only the
// heartbeat of look(), which does not depend on the blocks, and would send requests to a block that
// hangs as long as its ring has room; all of them would time out. A block that cannot be ended from
// outside, such as a block on a GPU or on a thread, ends with the process: print the reason and
// call _exit(). This frees the GPU, the engine drops the requests in flight there with a reason,
// and the next program may join.
//
// Trust. The engine must run as the user of this process or as root. Even so it is not trusted:
// every message and the region are checked before they are used, and every wait has a deadline.
// Errors are return values with a sentence; the library prints nothing and throws nothing.
#ifndef SERVAL_ATTACH_H
#define SERVAL_ATTACH_H

#include <serval/heartbeat.h>

namespace serval {
namespace detail {
struct Layout;
}

// What a program offers to run. Texts have at most 64 bytes (the kernel 1024).
struct Wish {
    // What the blocks run on, in one word, for logs.
    const char* kind = "own";
    // The service to serve; empty: any that needs a runtime.
    const char* service = "";
    // The only kernel that this program has, as the configuration names it; empty: any kernel that
    // the engine names.
    const char* kernel = "";
    // Time limit for answers of the engine, in milliseconds.
    uint32_t timeout_ms = 10000;
};

// The state of a generation.
enum class Step {
    // Requests arrive.
    SERVING,
    // The blocks answer the requests they have received, then end, because the stop word is set.
    DRAINING,
    // The generation has ended, see why(): end the blocks.
    OVER,
};

class Runtime {
public:
    Runtime() = default;
    // Calls leave() if the program has not. No block may run any more.
    ~Runtime();
    Runtime(const Runtime&) = delete;
    Runtime& operator=(const Runtime&) = delete;

    // Connects to the engine at `path`, sends `wish`, and maps the region that the engine offers.
    // False: see why(). Call it once per Runtime.
    bool join(const char* path, const Wish& wish = {});

    // Why join() failed or the generation ended, in one sentence.
    const char* why() const { return why_; }

    // The offer: names of the configuration, the number of this generation (from 1), the region as
    // mapped in this process.
    const char* service() const { return service_; }
    const char* accelerator() const { return accelerator_; }
    const char* kernel() const { return kernel_; }
    uint64_t generation() const { return generation_; }
    uint32_t blocks() const { return blocks_; }
    uint32_t heartbeat_ms() const { return heartbeat_ms_; }
    uint8_t* region() const { return region_; }
    uint64_t region_bytes() const { return region_bytes_; }
    const serval_param* params() const { return reinterpret_cast<const serval_param*>(params_); }
    uint32_t param_count() const { return param_count_; }
    // Bytes of the parameters with their texts, which lie behind the table: copy as many where
    // blocks see other addresses.
    uint64_t params_bytes() const { return params_bytes_; }

    // Private memory that each block needs for messages, in bytes. The caller provides it, aligned
    // to 64.
    uint64_t staging_bytes() const { return staging_bytes_; }

    // The arguments of block `n`, with addresses of this process. The caller adds staging; on the
    // host `wait`; on a GPU a sink, memory into which kernels write replies that are too long to
    // send (a reply longer than the sink ends its block). If blocks see other addresses, the caller
    // replaces those of region and params.
    serval_block_args block_args(uint32_t n) const;

    // True while a block has not reached its first receive and has not ended.
    bool starting() const;
    // True when every block has ended.
    bool ended() const;

    // The number of a block that had requests in its ring and made no progress for `limit_ms`,
    // although it had room for its replies and waited for no backend; blocks() if there is none. On
    // host cores the request that a block works on is no longer in the ring, so a block that hangs
    // is detected only if further requests wait. Call it with each look(): time between two calls
    // counts for at most half of the limit. The limit must be several times the duration of the
    // longest message, and several seconds, because a block may publish its progress only once a
    // second.
    uint32_t hung(uint32_t limit_ms);

    // Reports to the engine that the blocks run: requests arrive from now on. False: the engine is
    // gone.
    bool ready();

    // Sends the heartbeat, and waits for a message of the engine, for at most `timeout_ms` and less
    // than the heartbeat period.
    Step look(uint32_t timeout_ms);

    // Makes the blocks end now, unless the engine already has.
    void stop_blocks();

    // Sends a reason (SERVAL_REASON_*) and a sentence to the engine, disconnects and unmaps the
    // region. No block may run any more.
    void leave(uint64_t reason = SERVAL_REASON_STOPPED, const char* text = "");

    // Readable when the engine has sent a wake-up, which it does while the accelerator's `parked`
    // word is set.
    int bell() const { return bell_; }

private:
    bool meet(const char* path, uint64_t deadline_ns);
    bool introduce(const Wish& wish);
    bool receive_offer(uint64_t deadline_ns, uint32_t timeout_ms);
    bool read_offer(const uint8_t* bytes, uint64_t len);
    bool map(uint64_t region_bytes_said);
    bool take_region(uint64_t mapped_bytes);
    bool fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
    bool send(const void* bytes, uint64_t len);
    Step hear();
    Step over(const char* why);
    uint64_t* own_word(uint64_t field) const;
    uint64_t* engine_word(uint64_t field) const;
    uint64_t block_word(uint32_t block, uint64_t field) const;
    struct Ring;
    struct Mqueue;
    struct Block;
    struct Watch;
    bool read_directory(const detail::Layout& layout);
    Ring read_ring(const Mqueue& mqueue, bool tx) const;
    bool could_work(uint32_t block, Watch& now) const;

    char why_[512] = "";
    char service_[65] = "", accelerator_[65] = "", kernel_[1025] = "";
    // The table, then the texts, each with a zero byte.
    uint64_t params_[SERVAL_PARAMS_MAX * (sizeof(serval_param) + SERVAL_PARAM_TEXT_BYTES_MAX + 1) /
                     8] = {};
    uint64_t params_bytes_ = 0;
    uint32_t param_count_ = 0, blocks_ = 0, heartbeat_ms_ = 0, staging_stride_ = 0;
    uint64_t generation_ = 0, region_bytes_ = 0, mapped_bytes_ = 0, staging_bytes_ = 0,
             blocks_offset_ = 0;
    uint8_t* region_ = nullptr;
    int socket_ = -1, file_ = -1, bell_ = -1;
    // join() was called.
    bool used_ = false;
    Step step_ = Step::OVER;
    // The drain ends at this time, even if blocks still run.
    uint64_t drain_until_ns_ = 0;
    uint64_t beats_ = 0;
    // Detects that the engine's heartbeat has stopped.
    detail::HeartbeatMonitor engine_heartbeat_ = {};
    // By block: where its rings are described, and its last observed progress with the time.
    Block* rings_of_ = nullptr;
    Watch* watches_ = nullptr;
    uint64_t watched_ns_ = 0;
    // Where the words of each mqueue are, those of a block together, its server mqueue first.
    Mqueue* mqueues_ = nullptr;
};

}  // namespace serval

#endif
