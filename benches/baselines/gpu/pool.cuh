// Launches in flight on a GPU, oldest first. The three ways in which host applications pass requests to a GPU:
//
// - COPY (A): each request is copied in, a kernel is launched for it, its reply is copied out, all on one stream; the
//   host queries the oldest stream for completion.
// - GRAPH (B): requests and replies are in host memory mapped into the GPU; the kernel is launched as a prebuilt graph and
//   ends by writing a word that the host polls.
// - BATCH (C): the same for several requests per launch, one block each; there is a graph for 1, 2, 4... of them.
#ifndef SERVAL_BASELINES_GPU_POOL_CUH
#define SERVAL_BASELINES_GPU_POOL_CUH

#include <cuda_runtime.h>

#include <mutex>

#include "../contract.h"
#include "functions.cuh"

namespace gpu {

enum Mode { COPY, GRAPH, BATCH };

inline void check(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
    std::exit(1);
}

struct PoolOptions {
    Mode mode;
    // Maximum number of launches in flight, each on a stream of its own.
    unsigned streams;
    // Maximum number of requests per launch.
    unsigned batch;
    // A launch waits this long for more requests, unless the GPU is idle.
    uint64_t wait_ns;
    uint32_t bytes_max;
    // Messages are not copied: they are in memory that is mapped into the GPU, until their launch is released.
    bool in_place;
};

// `Peer` is the host's data about a request, returned with its reply.
template <class Function, class Peer>
class Pool {
  public:
    Pool(const PoolOptions& options, Function function)
        : options(options), function(function), staged_bytes((sizeof(Header) + options.bytes_max + 63) / 64 * 64),
          request_stride(options.in_place ? sizeof(Header) : staged_bytes), reply_stride((options.bytes_max + 63) / 64 * 64), slots(options.streams) {
        // No allocation or synchronisation is allowed while another thread captures a graph.
        static std::mutex one_at_a_time;
        const std::lock_guard<std::mutex> guard(one_at_a_time);
        const size_t room = (64 + size_t(options.batch) * (request_stride + reply_stride) + 63) / 64 * 64;
        check(cudaHostAlloc(reinterpret_cast<void**>(&host), room * options.streams, cudaHostAllocMapped), "allocate host memory");
        memset(host, 0, room * options.streams);
        check(cudaMalloc(reinterpret_cast<void**>(&device), room * options.streams), "allocate GPU memory");
        check(cudaMemset(device, 0, room * options.streams), "clear GPU memory");
        for (unsigned i = 0; i < options.streams; i++) prepare(slots[i], host + room * i, device + room * i);
        check(cudaDeviceSynchronize(), "prepare the GPU");
    }
    ~Pool() {
        for (auto& slot : slots) {
            cudaStreamSynchronize(slot.stream);
            for (auto graph : slot.graphs) cudaGraphExecDestroy(graph);
            cudaStreamDestroy(slot.stream);
        }
        cudaFree(device);
        cudaFreeHost(host);
    }
    Pool(const Pool&) = delete;

    // Whether `add` may be called.
    bool room() const { return opened - released < slots.size(); }
    // The number of the launch that `add` adds to, and of the first that is not released.
    uint64_t filling() const { return opened; }
    uint64_t unreleased() const { return released; }

    // Adds a request to the launch that is being filled; false: the function has no reply to it.
    bool add(const Peer& peer, const uint8_t* message, uint32_t bytes) {
        const uint32_t reply = bytes > options.bytes_max ? NOTHING : function.reply_bytes(bytes);
        if (reply == NOTHING) return false;
        Slot& slot = slots[opened % slots.size()];
        if (slot.count == 0) slot.opened_ns = options.wait_ns ? now_ns() : 0;
        uint8_t* to = slot.requests + size_t(slot.count) * request_stride;
        *reinterpret_cast<Header*>(to) = {bytes, slot.launch + 1, options.in_place ? message : nullptr};
        if (!options.in_place) memcpy(to + sizeof(Header), message, bytes);
        slot.asked[slot.count++] = {peer, reply};
        if (slot.count == options.batch) launch();
        return true;
    }

    // Launches the batch unless it should wait for more. `more`: the caller has more to add immediately.
    void launch_due(bool more) {
        if (more || !room()) return;
        const Slot& slot = slots[opened % slots.size()];
        if (slot.count == 0) return;
        if (options.wait_ns && opened != collected && now_ns() - slot.opened_ns < options.wait_ns) return;
        launch();
    }

    // Calls `reply(peer, at, bytes)` for each reply of the finished launches, up to the first unfinished one. The memory
    // stays valid until `release`. Returns whether there were any.
    template <class Give>
    bool collect(Give give) {
        const uint64_t before = collected;
        for (; collected != opened && is_done(slots[collected % slots.size()]); collected++) {
            Slot& slot = slots[collected % slots.size()];
            for (unsigned i = 0; i < slot.count; i++) give(slot.asked[i].peer, slot.replies + size_t(i) * reply_stride, slot.asked[i].reply);
            slot.count = 0;
        }
        return collected != before;
    }
    void release() { released = collected; }

  private:
    struct Asked {
        Peer peer;
        uint32_t reply;
    };
    struct Slot {
        cudaStream_t stream;
        uint8_t *requests, *replies;
        uint8_t *device_requests, *device_replies;
        volatile uint32_t* done;
        std::vector<cudaGraphExec_t> graphs;  // of 1, 2, 4... requests
        std::vector<Asked> asked;
        unsigned count = 0;
        uint32_t launch = 0;
        uint64_t opened_ns = 0;
    };

    void prepare(Slot& slot, uint8_t* at, uint8_t* device_at) {
        check(cudaStreamCreateWithFlags(&slot.stream, cudaStreamNonBlocking), "create a stream");
        slot.done = reinterpret_cast<uint32_t*>(at);
        slot.requests = at + 64;
        slot.replies = slot.requests + size_t(options.batch) * request_stride;
        slot.device_requests = device_at + 64;
        slot.device_replies = slot.device_requests + size_t(options.batch) * request_stride;
        slot.asked.resize(options.batch);
        if (options.mode == COPY) return;
        uint8_t* seen;
        check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&seen), at, 0), "map host memory");
        const Work work = {seen + 64, seen + 64 + size_t(options.batch) * request_stride, request_stride, reply_stride, options.in_place,
                           reinterpret_cast<uint32_t*>(seen), reinterpret_cast<uint32_t*>(device_at)};
        for (unsigned blocks = 1; blocks < 2 * options.batch; blocks *= 2) {
            cudaGraph_t graph;
            cudaGraphExec_t executable;
            check(cudaStreamBeginCapture(slot.stream, cudaStreamCaptureModeThreadLocal), "capture a graph");
            serve<<<std::min(blocks, options.batch), Function::THREADS, staged_bytes, slot.stream>>>(function, work);
            check(cudaStreamEndCapture(slot.stream, &graph), "capture a graph");
            check(cudaGraphInstantiate(&executable, graph, 0), "make a graph");
            check(cudaGraphUpload(executable, slot.stream), "upload a graph");
            check(cudaGraphDestroy(graph), "destroy a graph");
            slot.graphs.push_back(executable);
        }
    }

    void launch() {
        Slot& slot = slots[opened % slots.size()];
        slot.launch++;
        if (options.mode == COPY) {
            const uint32_t bytes = reinterpret_cast<const Header*>(slot.requests)->bytes, reply = slot.asked[0].reply;
            const Work work = {slot.device_requests, slot.device_replies, request_stride, reply_stride, false, nullptr, nullptr};
            check(cudaMemcpyAsync(slot.device_requests, slot.requests, sizeof(Header) + bytes, cudaMemcpyHostToDevice, slot.stream), "copy in");
            serve<<<1, Function::THREADS, staged_bytes, slot.stream>>>(function, work);
            check(cudaGetLastError(), "launch");
            if (reply) check(cudaMemcpyAsync(slot.replies, slot.device_replies, reply, cudaMemcpyDeviceToHost, slot.stream), "copy out");
        } else {
            unsigned which = 0;
            while (1u << which < slot.count) which++;
            // The graph may be for more requests than are present.
            for (unsigned i = slot.count; i < std::min(1u << which, options.batch); i++)
                *reinterpret_cast<Header*>(slot.requests + size_t(i) * request_stride) = {NOTHING, slot.launch, nullptr};
            check(cudaGraphLaunch(slot.graphs[which], slot.stream), "launch a graph");
        }
        opened++;
    }

    bool is_done(const Slot& slot) const {
        if (options.mode != COPY) {
            const bool done = *slot.done == slot.launch;
            std::atomic_thread_fence(std::memory_order_acquire);
            return done;
        }
        const cudaError_t state = cudaStreamQuery(slot.stream);
        if (state == cudaErrorNotReady) return false;
        check(state, "run the kernel");
        return true;
    }

    const PoolOptions options;
    const Function function;
    const uint32_t staged_bytes, request_stride, reply_stride;
    std::vector<Slot> slots;
    uint8_t *host, *device;
    // Total launches: started, replies collected, slots released. One more may be being filled.
    uint64_t opened = 0, collected = 0, released = 0;
};

}  // namespace gpu

#endif
