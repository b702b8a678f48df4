// A block that hangs is noticed, and when it goes on that is noticed too.
//   hung PATH LIMIT_MS    answers every message with itself; one that begins with H only when
//                         its block was said to hang
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include <serval/attach.h>
#include <serval/kernel.h>

static std::atomic<bool> noticed{false};

SERVAL_KERNEL(stumble)(serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        while (msg.len() > 0 && msg.as<const char>()[0] == 'H' && !noticed) usleep(1000);
        auto reply = q.reply(block, msg, msg.len());
        for (unsigned i = block.rank(); i < msg.len(); i += block.size())
            reply.as<char>()[i] = msg.as<const char>()[i];
        q.send(block, reply);
    }
}

static void pause_block(void*, uint32_t, uint64_t) { usleep(50); }

static void run_block(serval_block_args args) {
    void* staging = nullptr;
    if (posix_memalign(&staging, 64, args.staging_bytes)) abort();
    args.staging = reinterpret_cast<uint64_t>(staging);
    args.wait = reinterpret_cast<uint64_t>(&pause_block);
    reinterpret_cast<void (*)(const serval_block_args*)>(serval_kernel_list()->entry)(&args);
    free(staging);
}

static void say(const char* format, uint32_t block) {
    printf(format, block);
    fflush(stdout);
}

int main(int argc, char** argv) {
    serval::Runtime runtime;
    const uint32_t limit_ms = argc == 3 ? static_cast<uint32_t>(atoi(argv[2])) : 0;
    if (!limit_ms || runtime.hung(limit_ms) != 0 || !runtime.join(argv[1])) {
        fprintf(stderr, "%s\n", runtime.why());
        return 1;
    }
    std::vector<std::thread> blocks;
    for (uint32_t n = 0; n < runtime.blocks(); n++)
        blocks.emplace_back(run_block, runtime.block_args(n));
    while (runtime.starting()) runtime.look(1);
    runtime.ready();
    say("serving\n", 0);
    uint32_t told = runtime.blocks();
    serval::Step step = serval::Step::SERVING;
    while (step != serval::Step::OVER && !runtime.ended()) {
        step = runtime.look(20);
        const uint32_t hung = runtime.hung(limit_ms);
        if (hung == told) continue;
        told = hung;
        noticed = hung < runtime.blocks();
        say(noticed ? "block %u hangs\n" : "all go on\n", hung);
    }
    runtime.stop_blocks();
    for (std::thread& block : blocks) block.join();
    runtime.leave();
    return runtime.hung(limit_ms) == runtime.blocks() ? 0 : 1;
}
