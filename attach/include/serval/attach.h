// The attach library of Serval: an accelerator that a program of yours drives, behind the ports of an engine.
//
// A configuration has an accelerator with `launch = "external"` and a path; this program joins there, and gets the region of one
// service by descriptor: a message queue for each block. Blocks run wherever the program likes, for example on threads, or
// as one persistent kernel on a GPU with which it has registered the region. The kernels themselves are written with the
// device library (device/include, also part of `serval kernel build`). No code of the engine runs here, and nothing is called
// for a message.
//
//     serval::Runtime runtime;
//     if (!runtime.join("/run/serval/acc0")) fail(runtime.why());
//     ... start runtime.blocks() blocks with runtime.block_args(n) ...
//     while (runtime.starting()) { ... }              // until each has got to its first receive
//     runtime.ready();
//     while (runtime.look(100) != serval::Step::OVER) // beats; hears the engine
//         ... leave the loop if the blocks have ended: runtime.ended(), or one hangs: runtime.hung(10000) < runtime.blocks() ...
//     ... while look() said SERVING: call it for a second more. Blocks may end before the engine says that it stops ...
//     runtime.stop_blocks();
//     ... wait until no block runs any more, but not for ever: where one does not end, end the process ...
//     runtime.leave();
//
// One Runtime is one life: after leave(), or when the engine is gone, make a new one and join again. Its functions are called by
// one thread at a time, look() at least four times in heartbeat_ms(): a program that does not is taken for lost, and the engine
// goes on with the next who joins.
//
// Blocks that hang are this program's to notice, with hung() or in its own way. The engine sees look() beat, which goes on whatever the
// blocks do, and would give a block that never comes back requests as long as it has room, all of which time out. What cannot be
// ended from outside, like a block on a GPU or on a thread, ends with the process: say why and call _exit(). That frees the GPU, the
// engine gives requests that were with the program their reason, and the next one may join.
//
// Trust. The engine has to be of this process's user or of root. Even so it is not believed: every message and the region are
// checked before they are used, every wait has an end. Errors are values with a sentence; nothing is printed, nothing thrown.
#ifndef SERVAL_ATTACH_H
#define SERVAL_ATTACH_H

#include <serval/pulse.h>

namespace serval {
namespace detail {
struct Layout;
}

// What a program offers to run, in texts of at most 64 bytes (the kernel 1024).
struct Wish {
    // What the blocks run on, in one word for people.
    const char* kind = "own";
    // The service to serve; empty: any that needs a runtime.
    const char* service = "";
    // The only kernel that this program has, as the configuration names it; empty: whichever is asked for.
    const char* kernel = "";
    // How long the engine may take to answer, in milliseconds.
    uint32_t timeout_ms = 10000;
};

// How far a life has come.
enum class Step {
    // Requests come.
    SERVING,
    // What was received is to be answered; the stop word tells the blocks, which end when they have.
    DRAINING,
    // It is over, see why(): end the blocks.
    OVER,
};

class Runtime {
  public:
    Runtime() = default;
    // Leaves, if that has not been done. No block may run any more.
    ~Runtime();
    Runtime(const Runtime&) = delete;
    Runtime& operator=(const Runtime&) = delete;

    // Connects to the engine at `path`, introduces this program, and maps the region it is offered. False: see why(). Once for
    // each Runtime.
    bool join(const char* path, const Wish& wish = {});

    // Why join() failed or the life is over, in one sentence.
    const char* why() const { return why_; }

    // What was offered: the names of the configuration, the number of this life (from 1), the region as it is mapped here.
    const char* service() const { return service_; }
    const char* accelerator() const { return accelerator_; }
    const char* kernel() const { return kernel_; }
    uint64_t generation() const { return generation_; }
    uint32_t blocks() const { return blocks_; }
    uint32_t heartbeat_ms() const { return heartbeat_ms_; }
    uint8_t* region() const { return region_; }
    uint64_t region_bytes() const { return region_bytes_; }
    const serval_param* params() const { return params_; }
    uint32_t param_count() const { return param_count_; }

    // Private memory that each block needs for messages, in bytes; aligned to 64, given by the caller.
    uint64_t staging_bytes() const { return staging_bytes_; }

    // What block `n` is started with, with addresses of this process. The caller adds staging; on the host wait; on a GPU a sink, memory
    // where kernels write replies that are too long to send (a longer one ends its block). Where the blocks see other addresses it replaces
    // those of region and params.
    serval_block_args block_args(uint32_t n) const;

    // Whether a block has not got to its first receive yet. Every block has, or has ended, when this is false.
    bool starting() const;
    // Whether every block has ended.
    bool ended() const;

    // The number of a block that had requests in its ring and did nothing for `limit_ms`, although it had room for its replies and waited for
    // no backend; blocks() if there is none. On host cores the request that a block is at is no longer in the ring: one that hangs is
    // noticed when others lie behind. Call it with each look(): time between two calls counts for at most half of the limit, which is to be
    // several times what the longest message takes, and several seconds: a block may tell what it has done once a second.
    uint32_t hung(uint32_t limit_ms);

    // Tells the engine that the blocks run: requests come from now on. False: the engine is gone.
    bool ready();

    // Beats, and waits for the engine to say something, for at most `timeout_ms` and never as long as a heartbeat may take.
    Step look(uint32_t timeout_ms);

    // Tells the blocks to end now, unless the engine already has.
    void stop_blocks();

    // Says goodbye with a reason (SERVAL_REASON_*) and a sentence, and lets go of the region. No block may run any more.
    void leave(uint64_t reason = SERVAL_REASON_STOPPED, const char* text = "");

    // Readable when the engine has rung, which it does if the accelerator's `parked` word says that the blocks' side sleeps.
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
    serval_param params_[SERVAL_PARAMS_MAX] = {};
    uint32_t param_count_ = 0, blocks_ = 0, heartbeat_ms_ = 0, staging_stride_ = 0;
    uint64_t generation_ = 0, region_bytes_ = 0, mapped_bytes_ = 0, staging_bytes_ = 0, blocks_offset_ = 0;
    uint8_t* region_ = nullptr;
    int socket_ = -1, file_ = -1, bell_ = -1;
    // Joining was tried.
    bool used_ = false;
    Step step_ = Step::OVER;
    // The drain ends here, whatever the blocks do.
    uint64_t drain_until_ns_ = 0;
    uint64_t beats_ = 0;
    // The engine's beat: whether it stands still.
    detail::Pulse engine_pulse_ = {};
    // By block: where it is described, and what was seen of it, when.
    Block* rings_of_ = nullptr;
    Watch* watches_ = nullptr;
    uint64_t watched_ns_ = 0;
    // Where the words of each mqueue are, those of a block together, its server mqueue first.
    Mqueue* mqueues_ = nullptr;
};

}  // namespace serval

#endif
