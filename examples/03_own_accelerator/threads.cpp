// An accelerator of your own: the blocks of a service on plain threads of this program.
//   threads PATH    PATH is `attach` of the accelerator; exits with code 0 after a drain that the engine requested
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <vector>

#include <serval/attach.h>

#include "reverse.h"

// A block hangs if it has messages and makes no progress for this long, or if it does not end within this time.
constexpr uint32_t HUNG_MS = 10000;

// A block without work calls this function.
static void pause_block(void*, uint32_t, uint64_t) { usleep(50); }

static void run_block(serval_block_args args) {
    void* staging = nullptr;
    if (posix_memalign(&staging, 64, args.staging_bytes)) abort();
    args.staging = reinterpret_cast<uint64_t>(staging);
    args.wait = reinterpret_cast<uint64_t>(&pause_block);
    reinterpret_cast<void (*)(const serval_block_args*)>(serval_kernel_list()->entry)(&args);
    free(staging);
}

int main(int argc, char** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: threads PATH\n");
        return 2;
    }
    serval::Runtime runtime;
    serval::Wish wish;
    wish.kind = "threads";
    if (!runtime.join(argv[1], wish)) {
        fprintf(stderr, "%s\n", runtime.why());
        return 1;
    }
    std::vector<std::thread> blocks;
    for (uint32_t n = 0; n < runtime.blocks(); n++) blocks.emplace_back(run_block, runtime.block_args(n));
    serval::Step step = serval::Step::SERVING;
    while (runtime.starting() && step != serval::Step::OVER) step = runtime.look(1);
    if (step != serval::Step::OVER && runtime.ready()) {
        printf("serving %s, generation %llu\n", runtime.service(), static_cast<unsigned long long>(runtime.generation()));
        fflush(stdout);
        while (step != serval::Step::OVER && !runtime.ended() && runtime.hung(HUNG_MS) == runtime.blocks()) step = runtime.look(100);
        // Blocks without messages end as soon as the stop word is set, possibly before the engine's message arrives here.
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
        while (step == serval::Step::SERVING && std::chrono::steady_clock::now() < until) step = runtime.look(100);
    }
    const bool asked = runtime.ended() && step == serval::Step::DRAINING;
    const uint32_t hung = runtime.hung(HUNG_MS);
    runtime.stop_blocks();
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(HUNG_MS);
    while (hung == runtime.blocks() && !runtime.ended() && std::chrono::steady_clock::now() < until) usleep(1000);
    if (!runtime.ended()) {
        // Only the end of the process ends a thread from outside.
        fprintf(stderr, "a block hangs: it has done nothing, or has not ended, for %u s\n", HUNG_MS / 1000);
        _exit(1);
    }
    for (std::thread& block : blocks) block.join();
    if (!asked) fprintf(stderr, "%s\n", *runtime.why() ? runtime.why() : "the blocks ended");
    runtime.leave();
    return asked ? 0 : 1;
}
