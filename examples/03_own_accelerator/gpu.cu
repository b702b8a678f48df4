// An accelerator of your own on a GPU: the blocks of a service as one persistent kernel of this program.
//   gpu PATH    PATH is `attach` of the accelerator; exits with code 0 after a drain that the engine requested
//
// Everything is allocated and loaded before the launch: an allocation, a free or a synchronisation would wait for blocks that
// do not end.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <chrono>

#include <serval/attach.h>

#include "reverse.h"

#define CHECK(call)                                                                   \
    do {                                                                              \
        const cudaError_t error = (call);                                             \
        if (error != cudaSuccess) {                                                   \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));            \
            return 1;                                                                 \
        }                                                                             \
    } while (0)

constexpr int THREADS = 32;
// Memory for replies that are too long to send; a kernel that prepares a longer reply ends. Twice the longest message.
constexpr size_t SINK_BYTES = size_t{2} * SERVAL_MESSAGE_BYTES_MAX;
// A block hangs if it has messages and makes no progress for this long, or if it does not end within this time.
constexpr uint32_t HUNG_MS = 10000;

// The driver waits for running blocks whenever it frees something, also when main() returns. _exit() does not, and the end of the process
// frees the GPU.
[[noreturn]] static void end_with_blocks_left() {
    fflush(nullptr);
    _exit(1);
}

int main(int argc, char** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: gpu PATH\n");
        return 2;
    }
    serval::Runtime runtime;
    serval::Wish wish;
    wish.kind = "own-gpu";
    if (!runtime.join(argv[1], wish)) {
        fprintf(stderr, "%s\n", runtime.why());
        return 1;
    }
    const uint32_t blocks = runtime.blocks();
    // A block that is not resident would never serve its mqueue.
    cudaDeviceProp gpu;
    int fit = 0;
    CHECK(cudaGetDeviceProperties(&gpu, 0));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, serval_kernel_reverse, THREADS, 0));
    if (blocks > static_cast<uint32_t>(fit * gpu.multiProcessorCount)) {
        fprintf(stderr, "%u blocks do not fit: ask for at most %d mqueues\n", blocks, fit * gpu.multiProcessorCount);
        return 1;
    }
    // The region in the GPU's address space, private memory for each block, and the arguments, which the kernel reads on the GPU.
    void *region = nullptr, *staging = nullptr, *sink = nullptr;
    serval_block_args* args = nullptr;
    serval_param* params = nullptr;
    CHECK(cudaHostRegister(runtime.region(), runtime.region_bytes(), cudaHostRegisterPortable | cudaHostRegisterMapped));
    CHECK(cudaHostGetDevicePointer(&region, runtime.region(), 0));
    CHECK(cudaMalloc(&staging, blocks * runtime.staging_bytes()));
    CHECK(cudaMalloc(&sink, SINK_BYTES));
    CHECK(cudaMallocManaged(&args, blocks * sizeof *args));
    CHECK(cudaMallocManaged(&params, runtime.params_bytes() + 1));
    memcpy(params, runtime.params(), runtime.params_bytes());
    for (uint32_t n = 0; n < blocks; n++) {
        args[n] = runtime.block_args(n);
        args[n].region = reinterpret_cast<uint64_t>(region);
        args[n].params = runtime.param_count() ? reinterpret_cast<uint64_t>(params) : 0;
        args[n].staging = reinterpret_cast<uint64_t>(staging) + n * runtime.staging_bytes();
        args[n].sink = reinterpret_cast<uint64_t>(sink);
        args[n].sink_bytes = SINK_BYTES;
    }
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    serval_kernel_reverse<<<blocks, THREADS, 0, stream>>>(args);
    CHECK(cudaGetLastError());

    serval::Step step = serval::Step::SERVING;
    cudaError_t running = cudaErrorNotReady;
    uint32_t hung = blocks;
    const auto look = [&](uint32_t ms) {
        step = runtime.look(ms);
        running = cudaStreamQuery(stream);
        hung = runtime.hung(HUNG_MS);
        return step != serval::Step::OVER && running == cudaErrorNotReady && hung == blocks;
    };
    while (runtime.starting() && look(1)) {
    }
    if (step != serval::Step::OVER && runtime.ready()) {
        printf("serving %s on %s, generation %llu\n", runtime.service(), gpu.name, static_cast<unsigned long long>(runtime.generation()));
        fflush(stdout);
        while (look(100)) {
        }
        // Blocks without messages end as soon as the stop word is set, possibly before the engine's message arrives here.
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
        while (running == cudaSuccess && step == serval::Step::SERVING && std::chrono::steady_clock::now() < until) look(100);
    }
    const bool asked = running == cudaSuccess && step == serval::Step::DRAINING;
    const bool faulted = running != cudaSuccess && running != cudaErrorNotReady;
    const char* why = faulted ? cudaGetErrorString(running) : *runtime.why() ? runtime.why() : "the blocks ended";
    if (!asked && hung == blocks) fprintf(stderr, "%s\n", why);
    runtime.stop_blocks();
    if (hung < blocks) {
        fprintf(stderr, "block %u hangs: it has messages and has done nothing for %u s\n", hung, HUNG_MS / 1000);
        end_with_blocks_left();
    }
    // The kernel ends with the stop word; a kernel that faulted has ended. A synchronisation would wait without end for a block that hangs.
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(HUNG_MS);
    while (cudaStreamQuery(stream) == cudaErrorNotReady) {
        if (std::chrono::steady_clock::now() >= until) {
            fprintf(stderr, "a block hangs: it has not ended %u s after the stop request\n", HUNG_MS / 1000);
            end_with_blocks_left();
        }
        usleep(1000);
    }
    cudaHostUnregister(runtime.region());
    runtime.leave(faulted ? SERVAL_REASON_CONTRACT : SERVAL_REASON_STOPPED, faulted ? cudaGetErrorString(running) : "");
    return asked ? 0 : 1;
}
