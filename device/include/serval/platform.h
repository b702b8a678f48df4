// The differences between the two compilers of a kernel.
//
// A kernel is one source, compiled twice: by the host compiler, where a block is one thread, and by nvcc, where a block
// is one CUDA block. Two groups of threads appear in this library:
//
// - the *block*: every thread that runs the kernel function;
// - the *crew*: the threads of a block that poll rings and wait. One thread on the host, the first warp on CUDA, so that
//   one poll can fetch a whole line of a ring.
//
// Functions of both groups must be called by all their threads together.
#ifndef SERVAL_PLATFORM_H
#define SERVAL_PLATFORM_H

#include <stddef.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "regions are little endian; this target is not"
#endif

#if defined(__CUDACC__)
#define SERVAL_CUDA 1
// Marks a function that kernels call.
#define SERVAL_DEVICE __device__
// Marks a variable inside a kernel that all threads of the block share (trivial types only).
#define SERVAL_SHARED __shared__
#define SERVAL_INLINE __device__ __forceinline__
// The body of a receive or a send: inline on the host, where it takes a few nanoseconds; one copy on CUDA, where it takes a trip over
// the bus and the instruction cache matters more.
#define SERVAL_CALL inline __device__ __noinline__
// For rarely executed code, placed apart from the rest. For templates only: other functions would have to be `inline` as well, which
// compilers report as a contradiction.
#define SERVAL_RARE __device__ __noinline__
// For code that is executed as often as the rest with some traffic, and must not make the rest slower. For templates only.
#define SERVAL_APART __device__ __noinline__
#else
#define SERVAL_CUDA 0
#define SERVAL_DEVICE
#define SERVAL_SHARED
#define SERVAL_INLINE inline __attribute__((always_inline))
#define SERVAL_CALL inline __attribute__((always_inline))
#define SERVAL_RARE __attribute__((noinline, cold))
#define SERVAL_APART __attribute__((noinline))
#include <time.h>
#endif

#define SERVAL_LIKELY(x) __builtin_expect(!!(x), 1)
#define SERVAL_UNLIKELY(x) __builtin_expect(!!(x), 0)

namespace serval {
namespace detail {

#if SERVAL_CUDA

constexpr unsigned CREW_SIZE = 32;

SERVAL_INLINE unsigned block_rank() { return threadIdx.x; }
SERVAL_INLINE unsigned block_size() { return blockDim.x; }
// The block is its own crew: its threads communicate without a barrier of the block.
SERVAL_INLINE bool solo() { return blockDim.x == CREW_SIZE; }
SERVAL_INLINE void block_sync() {
    if (solo())
        __syncwarp();
    else
        __syncthreads();
}
SERVAL_INLINE bool in_crew() { return threadIdx.x < CREW_SIZE; }
SERVAL_INLINE unsigned crew_rank() { return threadIdx.x; }
SERVAL_INLINE void crew_sync() { __syncwarp(); }
SERVAL_INLINE bool crew_all(bool value) { return __all_sync(~0u, value); }

// The value of the crew's first thread.
SERVAL_INLINE uint64_t crew_first(uint64_t value) {
    value = __shfl_sync(~0u, static_cast<unsigned long long>(value), 0);
    __syncwarp();
    return value;
}

// Pauses for about this long.
SERVAL_INLINE void rest_ns(unsigned ns) { __nanosleep(ns); }

#else

constexpr unsigned CREW_SIZE = 1;

SERVAL_INLINE constexpr unsigned block_rank() { return 0; }
SERVAL_INLINE constexpr unsigned block_size() { return 1; }
SERVAL_INLINE constexpr bool solo() { return true; }
SERVAL_INLINE void block_sync() {}
SERVAL_INLINE constexpr bool in_crew() { return true; }
SERVAL_INLINE constexpr unsigned crew_rank() { return 0; }
SERVAL_INLINE void crew_sync() {}
SERVAL_INLINE constexpr bool crew_all(bool value) { return value; }
SERVAL_INLINE constexpr uint64_t crew_first(uint64_t value) { return value; }

#endif

SERVAL_INLINE constexpr uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

// True on the one thread that writes the block's shared state.
SERVAL_INLINE bool leader() { return block_rank() == 0; }

// Nanoseconds of a clock that never goes back. On CUDA the device's global timer: compare its values only with each other.
SERVAL_INLINE uint64_t clock_ns() {
#if SERVAL_CUDA
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
#endif
}

}  // namespace detail
}  // namespace serval

#endif
