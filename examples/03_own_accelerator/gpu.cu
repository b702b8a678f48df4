// An accelerator of one's own on a GPU: the blocks of a service as one persistent kernel of this program.
//   gpu PATH    PATH is `attach` of the accelerator; ends with code 0 when the engine asks for it
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
// Memory for replies that are too long to send: a kernel that asks for more than this ends. Twice what a message may have.
constexpr size_t SINK_BYTES = size_t{2} * SERVAL_MESSAGE_BYTES_MAX;
// A block hangs that has messages and has done nothing for this long, or that does not end within it.
constexpr uint32_t HUNG_MS = 10000;

// The driver waits for blocks that run wherever it gives something back, also on the way out of main(). The end of the process does not, and
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
    // A block that waits for room would never serve its mqueue.
    cudaDeviceProp gpu;
    int fit = 0;
    CHECK(cudaGetDeviceProperties(&gpu, 0));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, serval_kernel_reverse, THREADS, 0));
    if (blocks > static_cast<uint32_t>(fit * gpu.multiProcessorCount)) {
        fprintf(stderr, "%u blocks do not fit: ask for at most %d mqueues\n", blocks, fit * gpu.multiProcessorCount);
        return 1;
    }
    // The region as the GPU sees it, private memory for each block, and the arguments, all of which the kernel reads there.
    void *region = nullptr, *staging = nullptr, *sink = nullptr;
    serval_block_args* args = nullptr;
    serval_param* params = nullptr;
    CHECK(cudaHostRegister(runtime.region(), runtime.region_bytes(), cudaHostRegisterPortable | cudaHostRegisterMapped));
    CHECK(cudaHostGetDevicePointer(&region, runtime.region(), 0));
    CHECK(cudaMalloc(&staging, blocks * runtime.staging_bytes()));
    CHECK(cudaMalloc(&sink, SINK_BYTES));
    CHECK(cudaMallocManaged(&args, blocks * sizeof *args));
    CHECK(cudaMallocManaged(&params, SERVAL_PARAMS_MAX * sizeof *params));
    memcpy(params, runtime.params(), runtime.param_count() * sizeof *params);
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
        printf("serving %s on %s, life %llu\n", runtime.service(), gpu.name, static_cast<unsigned long long>(runtime.generation()));
        fflush(stdout);
        while (look(100)) {
        }
        // Blocks that have nothing left end as soon as the engine wishes it, which may be before it says so here.
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
    // The kernel ends with the stop word; one that faulted has ended. A synchronisation would wait for a block that hangs for ever.
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(HUNG_MS);
    while (cudaStreamQuery(stream) == cudaErrorNotReady) {
        if (std::chrono::steady_clock::now() >= until) {
            fprintf(stderr, "a block hangs: it has not ended %u s after it was told to\n", HUNG_MS / 1000);
            end_with_blocks_left();
        }
        usleep(1000);
    }
    cudaHostUnregister(runtime.region());
    runtime.leave(faulted ? SERVAL_REASON_CONTRACT : SERVAL_REASON_STOPPED, faulted ? cudaGetErrorString(running) : "");
    return asked ? 0 : 1;
}
