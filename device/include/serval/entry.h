// How a runtime finds and starts kernels: SERVAL_KERNEL, the kernel list of a library, and the function that surrounds a
// kernel's own.
//
// Host: each kernel adds a serval_kernel_entry to a list when its library is loaded; the library exports
// serval_kernel_abi_version() and serval_kernel_list(). CUDA: `extern "C" __global__ serval_kernel_NAME(blocks)`, launched
// with one CUDA block for each serval_block_args in the array, of 32 to SERVAL_BLOCK_THREADS_MAX threads, a multiple of 32; and
// `serval_herald(args)`, launched with one block of 32 threads or not at all (herald.h). Staging
// is in shared memory when the launch gives enough of it (2 * mqueues_per_block * staging_stride dynamic bytes), else where the
// arguments say.
#ifndef SERVAL_ENTRY_H
#define SERVAL_ENTRY_H

#ifndef SERVAL_KERNEL_H
#error "include <serval/kernel.h>"
#endif

namespace serval {
namespace detail {

#if SERVAL_CUDA

template <void (*KERNEL)(Block&, Mqueue&)>
SERVAL_DEVICE void run_block(const serval_block_args* given) {
    __shared__ Block block;
    __shared__ Mqueue mqueue;
    __shared__ Backend backends[SERVAL_BACKENDS_MAX];
    __shared__ bool go;
    extern __shared__ __align__(16) unsigned char shared_staging[];
    if (leader()) {
        serval_block_args args = *given;
        Place place;
        go = false;
        if (find_place(place, args)) {
            uint32_t shared_bytes;
            asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(shared_bytes));
            if (shared_bytes >= 2ull * place.mqueues_per_block * args.staging_stride) {
                args.staging = reinterpret_cast<uint64_t>(shared_staging);
                args.staging_bytes = shared_bytes;
            }
            block.open(args, place);
            go = suits(place, args) && mqueue.open(args, place, backends);
            if (go) {
                block.ready();
            } else {
                block.refuse();
            }
        }
    }
    block_sync();
    if (!go) return;
    KERNEL(block, mqueue);
    block_sync();
    if (leader()) {
        mqueue.close(block);
        block.finish();
    }
}

#else

// Not inlined, so that the backends can lie on its stack frame.
template <void (*KERNEL)(Block&, Mqueue&)>
__attribute__((noinline)) void run_block(const serval_block_args* given) {
    Place place;
    if (!find_place(place, *given)) return;
    Block block;
    Mqueue mqueue;
    Backend* backends = nullptr;
    if (place.mqueues_per_block > 1)
        backends = static_cast<Backend*>(__builtin_alloca(sizeof(Backend) * (place.mqueues_per_block - 1)));
    block.open(*given, place);
    if (!suits(place, *given) || !mqueue.open(*given, place, backends)) return block.refuse();
    block.ready();
    KERNEL(block, mqueue);
    mqueue.close(block);
    block.finish();
}

// First kernel of this library. Hidden, and weak instead of inline: two libraries in one process must not share it, and the
// linker makes inline variables unique in a process.
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

// Weak: one for all files of a program.
extern "C" __global__ void __attribute__((weak)) serval_herald(const serval_herald_args* args) {
    serval::detail::run_herald(args);
}

#define SERVAL_KERNEL(NAME)                                                                                    \
    static __device__ void serval_user_##NAME(serval::Block&, serval::Mqueue&);                                \
    extern "C" __global__ void __launch_bounds__(SERVAL_BLOCK_THREADS_MAX)                                     \
        serval_kernel_##NAME(const serval_block_args* blocks) {                                                \
        serval::detail::run_block<serval_user_##NAME>(blocks + blockIdx.x);                                    \
    }                                                                                                          \
    static __device__ void serval_user_##NAME

#else

// ABI_VERSION that the library was built with.
extern "C" inline __attribute__((used, visibility("default"))) uint32_t serval_kernel_abi_version(void) {
    return SERVAL_ABI_VERSION;
}
// The library's kernels; null when it has none.
extern "C" inline __attribute__((used, visibility("default"))) const struct serval_kernel_entry* serval_kernel_list(void) {
    return serval::detail::first_kernel;
}

#define SERVAL_KERNEL(NAME)                                                                                    \
    static void serval_user_##NAME(serval::Block&, serval::Mqueue&);                                           \
    static serval::detail::Registration serval_registration_##NAME(                                            \
        #NAME, serval::detail::run_block<serval_user_##NAME>);                                                 \
    static void serval_user_##NAME

#endif

#endif
