// How a runtime finds and starts kernels: SERVAL_KERNEL, the kernel list of a library, and the function that surrounds a
// kernel's own.
//
// Host: each kernel adds a serval_kernel_entry to a list when its library is loaded; the library exports
// serval_kernel_abi_version() and serval_kernel_list(). CUDA: `extern "C" __global__ serval_kernel_NAME(blocks)`, launched
// with one CUDA block for each serval_block_args in the array, of 32 to SERVAL_BLOCK_THREADS_MAX threads, a multiple of 32. Staging
// is in shared memory if the launch provides enough of it (the arguments' staging_bytes of dynamic memory per block), else
// at the address in the arguments. Beside each kernel is an empty function `serval_abi_V_NAME`, V being the region ABI version
// of its library: the layout of the arguments depends on it, so a runtime launches no kernel without the mark of its own version.
// A kernel of SERVAL_WARP_KERNEL has an empty function `serval_warps_NAME` beside it, and is launched with
// CUDA blocks of 32 threads by 1 to SERVAL_WARPS_MAX: each warp is a block, in the order of the array. Surplus warps get
// a block number outside the region, and do nothing.
#ifndef SERVAL_ENTRY_H
#define SERVAL_ENTRY_H

#ifndef SERVAL_KERNEL_H
#error "include <serval/kernel.h>"
#endif

namespace serval {
namespace detail {

#if SERVAL_CUDA

// State shared by the threads of the WARPS blocks in a CUDA block.
template <unsigned WARPS>
struct Shared {
    static constexpr unsigned BACKENDS_MAX = WARPS == 1 ? SERVAL_BACKENDS_MAX : SERVAL_WARP_BACKENDS_MAX;
    Block blocks[WARPS];
    Mqueue mqueues[WARPS];
    Backend backends[WARPS][BACKENDS_MAX];
    bool go[WARPS];
};
template <unsigned WARPS>
SERVAL_INLINE Shared<WARPS>& shared() {
    __shared__ Shared<WARPS> all;
    return all;
}

// Runs the block of row threadIdx.y among the WARPS blocks of a CUDA block: its threads are one warp, and the library treats it
// as a block that is its own crew.
template <void (*KERNEL)(Block&, Mqueue&), unsigned WARPS, bool SOCKETS = false>
SERVAL_DEVICE void run_block(const serval_block_args* given) {
    constexpr unsigned BACKENDS_MAX = Shared<WARPS>::BACKENDS_MAX;
    extern __shared__ __align__(16) unsigned char shared_staging[];
    const unsigned row = WARPS == 1 ? 0 : threadIdx.y;
    Block& block = shared<WARPS>().blocks[row];
    Mqueue& mqueue = shared<WARPS>().mqueues[row];
    Backend* const backends = shared<WARPS>().backends[row];
    bool& go = shared<WARPS>().go[row];
    if (leader()) {
        serval_block_args args = *given;
        Place place;
        go = false;
        if (find_place(place, args, SOCKETS)) {
            uint32_t shared_bytes;
            asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(shared_bytes));
            if (shared_bytes >= args.staging_bytes * blockDim.y)
                args.staging = reinterpret_cast<uint64_t>(shared_staging) + row * args.staging_bytes;
            block.open(args, place);
            go = suits(place, args) && suits_launch(WARPS) && place.mqueue_count <= 1 + BACKENDS_MAX &&
                 mqueue.open(block, args, place, backends);
            if (go) {
                block.ready();
            } else {
                block.refuse();
            }
        }
    }
    block_sync();
    if (!go) return;
    if (WARPS > 1) __builtin_assume(blockDim.x == CREW_SIZE && threadIdx.x < CREW_SIZE);
    KERNEL(block, mqueue);
    block_sync();
    if (in_crew()) block.publish_answers();
    if (leader()) {
        mqueue.close();
        block.finish();
    }
}

// A block of one warp has code of its own: without barriers and the branches around them, a message takes a twentieth less time.
template <void (*KERNEL)(Block&, Mqueue&), bool SOCKETS = false>
SERVAL_INLINE void run_sized(const serval_block_args* given) {
    if (blockDim.x == CREW_SIZE) {
        __builtin_assume(blockDim.x == CREW_SIZE && threadIdx.x < CREW_SIZE);
        run_block<KERNEL, 1, SOCKETS>(given);
    } else {
        run_block<KERNEL, 1, SOCKETS>(given);
    }
}

#else

// Not inlined, so that the backends are on its stack frame.
template <void (*KERNEL)(Block&, Mqueue&), unsigned, bool SOCKETS = false>
__attribute__((noinline)) void run_block(const serval_block_args* given) {
    Place place;
    if (!find_place(place, *given, SOCKETS)) return;
    serval_block_args args = *given;
    Block block;
    Mqueue mqueue;
    Backend* backends = nullptr;
    if (place.mqueue_count > 1)
        backends = static_cast<Backend*>(__builtin_alloca(sizeof(Backend) * (place.mqueue_count - 1)));
    const bool has_sink = provide_sink(args);
    block.open(args, place);
    if (!has_sink || !suits(place, args) || !mqueue.open(block, args, place, backends)) return block.refuse();
    block.ready();
    KERNEL(block, mqueue);
    block.publish_answers();
    mqueue.close();
    block.finish();
}

// First kernel of this library. Hidden, and weak instead of inline: two libraries in one process must not share it, and the
// linker would unify inline variables within a process.
__attribute__((weak, visibility("hidden"))) const serval_kernel_entry* first_kernel = nullptr;

struct Registration {
    serval_kernel_entry entry;
    Registration(const char* name, void (*run)(const serval_block_args*))
        : entry{reinterpret_cast<uint64_t>(name), reinterpret_cast<uint64_t>(run), reinterpret_cast<uint64_t>(first_kernel), 0} {
        first_kernel = &entry;
    }
};

#endif

}  // namespace detail
}  // namespace serval

#if SERVAL_CUDA

// VERSION passes through two macros so that it is expanded, and _NAME comes with its underscore so that it is not.
#define SERVAL_ABI_MARK(VERSION, _NAME) SERVAL_ABI_MARK_OF(VERSION, _NAME)
#define SERVAL_ABI_MARK_OF(VERSION, _NAME) \
    extern "C" __global__ void serval_abi_##VERSION##_NAME() {}

#define SERVAL_KERNEL(NAME)                                                                                    \
    static __device__ void serval_user_##NAME(serval::Block&, serval::Mqueue&);                                \
    SERVAL_ABI_MARK(SERVAL_ABI_NUMBER, _##NAME)                                                                \
    extern "C" __global__ void __launch_bounds__(SERVAL_BLOCK_THREADS_MAX, SERVAL_BLOCKS_MIN)                  \
        serval_kernel_##NAME(const serval_block_args* blocks) {                                                \
        serval::detail::run_sized<serval_user_##NAME>(blocks + blockIdx.x);                                    \
    }                                                                                                          \
    static __device__ void serval_user_##NAME

#define SERVAL_WARP_KERNEL(NAME)                                                                               \
    static __device__ void serval_user_##NAME(serval::Block&, serval::Mqueue&);                                \
    SERVAL_ABI_MARK(SERVAL_ABI_NUMBER, _##NAME)                                                                \
    extern "C" __global__ void serval_warps_##NAME() {}                                                        \
    extern "C" __global__ void __launch_bounds__(32 * SERVAL_WARPS_MAX, 3)                                     \
        serval_kernel_##NAME(const serval_block_args* blocks) {                                                \
        serval::detail::run_block<serval_user_##NAME, SERVAL_WARPS_MAX>(blocks + blockIdx.x * blockDim.y +     \
                                                                        threadIdx.y);                          \
    }                                                                                                          \
    static __device__ void serval_user_##NAME

#else

// ABI_VERSION that the library was built with.
extern "C" inline __attribute__((used, visibility("default"))) uint32_t serval_kernel_abi_version(void) {
    return SERVAL_ABI_VERSION;
}
// The library's kernels; null if it has none.
extern "C" inline __attribute__((used, visibility("default"))) const struct serval_kernel_entry* serval_kernel_list(void) {
    return serval::detail::first_kernel;
}

#define SERVAL_KERNEL(NAME)                                                                                    \
    static void serval_user_##NAME(serval::Block&, serval::Mqueue&);                                           \
    static serval::detail::Registration serval_registration_##NAME(                                            \
        #NAME, serval::detail::run_block<serval_user_##NAME, 1>);                                               \
    static void serval_user_##NAME

#define SERVAL_WARP_KERNEL(NAME) SERVAL_KERNEL(NAME)

#endif

#endif
