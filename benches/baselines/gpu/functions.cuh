// The functions on the GPU: those of Serval's kernels as ordinary functions, one block per request.
//
// A function gets the message in shared memory and may modify it. It returns the reply's address in shared memory; the host
// derives its length from the length of the message.
#ifndef SERVAL_BASELINES_GPU_FUNCTIONS_CUH
#define SERVAL_BASELINES_GPU_FUNCTIONS_CUH

#include <cstdint>
#include <cstring>

#include "../../../device/include/serval/platform.h"
#include "../../../device/models/faces.h"
#include "../../../device/models/lenet.h"

namespace gpu {

// A length that no message has: the block has no request.
constexpr uint32_t NOTHING = ~0u;

// A request as the GPU reads it: this header, then the message, in one read. In place: only the header, which says where the
// message is.
struct alignas(16) Header {
    uint32_t bytes;
    // The launch it belongs to.
    uint32_t launch;
    // Where it was received, as the GPU sees it; null if it is behind the header.
    const uint8_t* message;
};

struct Echo {
    static constexpr unsigned THREADS = 32;
    // Length of the reply to a message; NOTHING if there is none.
    __host__ __device__ uint32_t reply_bytes(uint32_t bytes) const { return bytes; }
    __device__ uint8_t* operator()(uint8_t* message, uint32_t) const { return message; }
};

// Replies with the request after a delay.
struct Delay {
    static constexpr unsigned THREADS = 32;
    uint64_t ns;
    __host__ __device__ uint32_t reply_bytes(uint32_t bytes) const { return bytes; }
    __device__ uint8_t* operator()(uint8_t* message, uint32_t) const {
        const uint64_t until = serval::detail::clock_ns() + ns;
        while (serval::detail::clock_ns() < until) {
        }
        return message;
    }
};

struct Scale {
    static constexpr unsigned THREADS = 128;
    __host__ __device__ uint32_t reply_bytes(uint32_t bytes) const { return bytes % 4 ? NOTHING : bytes; }
    __device__ uint8_t* operator()(uint8_t* message, uint32_t bytes) const {
        for (unsigned i = threadIdx.x; i < bytes / 4; i += blockDim.x) reinterpret_cast<float*>(message)[i] *= 3.0f;
        __syncthreads();
        return message;
    }
};

struct LeNet {
    static constexpr unsigned THREADS = 256;
    static constexpr uint32_t NUMBERED_BYTES = serval_lenet::INPUT_BYTES + serval_lenet::NUMBER_BYTES;
    __host__ __device__ uint32_t reply_bytes(uint32_t bytes) const {
        if (bytes == NUMBERED_BYTES) return serval_lenet::OUTPUT_BYTES + serval_lenet::NUMBER_BYTES;
        return bytes == serval_lenet::INPUT_BYTES ? serval_lenet::OUTPUT_BYTES : NOTHING;
    }
    __device__ uint8_t* operator()(uint8_t* message, uint32_t bytes) const {
        __shared__ serval_lenet::Scratch scratch;
        __shared__ alignas(16) uint8_t reply[(serval_lenet::OUTPUT_BYTES + serval_lenet::NUMBER_BYTES + 15) / 16 * 16];
        auto* logits = reinterpret_cast<float*>(reply) + 1;
        serval_lenet::infer(threadIdx.x, blockDim.x, [] { __syncthreads(); }, message, logits, scratch);
        if (threadIdx.x == 0) *reinterpret_cast<uint32_t*>(reply) = serval_lenet::digit(logits);
        if (bytes == NUMBERED_BYTES && threadIdx.x < serval_lenet::NUMBER_BYTES)
            reply[serval_lenet::OUTPUT_BYTES + threadIdx.x] = message[serval_lenet::INPUT_BYTES + threadIdx.x];
        __syncthreads();
        return reply;
    }
};

// The client's picture, then the one from the database.
struct Faces {
    static constexpr unsigned THREADS = 256;
    static constexpr uint32_t BYTES = 2 * serval_faces::PICTURE_BYTES;
    struct Verdict {
        uint32_t verdict;
        float distance;
    };
    __host__ __device__ uint32_t reply_bytes(uint32_t bytes) const { return bytes == BYTES ? uint32_t(sizeof(Verdict)) : NOTHING; }
    __device__ uint8_t* operator()(uint8_t* message, uint32_t) const {
        __shared__ serval_faces::Scratch scratch;
        __shared__ alignas(16) Verdict verdict[2];
        const auto found = serval_faces::verify(threadIdx.x, blockDim.x, [] { __syncthreads(); }, message, message + serval_faces::PICTURE_BYTES,
                                                serval_faces::DEFAULT_THRESHOLD, scratch);
        if (threadIdx.x == 0) verdict[0] = {found.match ? 1u : 0u, found.distance};
        __syncthreads();
        return reinterpret_cast<uint8_t*>(verdict);
    }
};

// The requests of one launch and the addresses of their replies, `request_stride` and `reply_stride` bytes apart.
struct Work {
    const uint8_t* requests;
    uint8_t* replies;
    uint32_t request_stride, reply_stride;
    // Requests are only headers.
    bool in_place;
    // Receives the launch's number once all replies are written; null if the host queries the stream.
    volatile uint32_t* done;
    // Number of finished blocks, in GPU memory.
    uint32_t* arrived;
};

// Fetches a request, whose message is where it was received, into `staged`, as if it was behind its header.
__device__ inline void fetch_in_place(uint4* staged, const uint4* from) {
    const uint4 first = *from;
    const Header header = *reinterpret_cast<const Header*>(&first);
    if (threadIdx.x == 0) *staged = first;
    if (header.bytes == NOTHING) return;
    if (reinterpret_cast<uintptr_t>(header.message) % 16 == 0) {
        // The rest of the last unit is behind the message in its buffer, which has room for it.
        const auto* message = reinterpret_cast<const uint4*>(header.message);
        for (unsigned i = threadIdx.x; i < (header.bytes + 15) / 16; i += blockDim.x) staged[1 + i] = message[i];
    } else {
        auto* to = reinterpret_cast<uint8_t*>(staged + 1);
        for (unsigned i = threadIdx.x; i < header.bytes; i += blockDim.x) to[i] = header.message[i];
    }
}

// One block answers one request.
template <class Function>
__global__ void serve(Function function, Work work) {
    extern __shared__ uint4 staged[];
    const auto* from = reinterpret_cast<const uint4*>(work.requests + size_t(blockIdx.x) * work.request_stride);
    if (work.in_place)
        fetch_in_place(staged, from);
    else
        for (unsigned i = threadIdx.x; i < work.request_stride / 16; i += blockDim.x) staged[i] = from[i];
    __syncthreads();
    const Header header = *reinterpret_cast<const Header*>(staged);
    if (header.bytes != NOTHING) {
        const auto* reply = reinterpret_cast<const uint4*>(function(reinterpret_cast<uint8_t*>(staged + 1), header.bytes));
        auto* to = reinterpret_cast<uint4*>(work.replies + size_t(blockIdx.x) * work.reply_stride);
        const uint32_t bytes = function.reply_bytes(header.bytes);
        for (unsigned i = threadIdx.x; i < (bytes + 15) / 16; i += blockDim.x) to[i] = reply[i];
    }
    if (!work.done) return;
    // Every reply is visible to the host before the word that announces it.
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (gridDim.x > 1) {
        if (atomicAdd(work.arrived, 1) + 1 < gridDim.x) return;
        *work.arrived = 0;
        __threadfence_system();
    }
    *work.done = header.launch;
}

}  // namespace gpu

#endif
