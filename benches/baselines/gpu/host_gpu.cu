// The host-centric servers: an application on host cores receives requests and passes each to a GPU. pool.cuh has the three ways.
//
// A thread has its own socket on the common port, its own streams and takes no locks itself; only the driver shares state between
// threads. A turn: collect finished replies, send them with one call, receive, launch.
#include <thread>

#include "fronts.cuh"
#include "pool.cuh"

namespace {

const char HELP[] =
    "usage: host_gpu [FLAGS]   a UDP server that passes its requests to a GPU, as host applications do\n"
    "  --mode M           copy (A: copy in, launch, copy out), graph (B: graph, mapped memory) or batch (C: B with several requests) (copy)\n"
    "  --function F       echo, scale, lenet, faces or delay:MICROSECONDS (echo)\n"
    "  --listen A:P       address and port; port 0 takes a free one (127.0.0.1:0)\n"
    "  --cores N,N,...    a thread on each of these cores (one thread, not pinned)\n"
    "  --streams N        launches in flight per thread, 1..1024 (32)\n"
    "  --batch N          batch: maximum number of requests per launch, 2..1024 (64)\n"
    "  --wait-us N        batch: longest wait for more requests while the GPU is busy, 0..100000 (0)\n"
    "  --max-bytes N      longest message, 1..8192 (64; lenet 784; faces both pictures)\n"
    "  --gso              GRO receive, GSO send\n"
    "  --in-place         graph, batch: the GPU reads requests where they were received, without a copy\n"
    "  --ordered          faces: replies in the order of requests, for clients that send batches of datagrams\n"
    "  --memcached A:P    faces: memcached's address (127.0.0.1:11211)\n"
    "  --gpu N            the GPU's number (0)\n"
    "  --tune             no server: tries thread, stream and batch counts on generated requests; the last line is the best\n"
    "  --tune-ms N        tune: time for each, 10..10000 (200)\n";

struct Options {
    gpu::PoolOptions pool;
    gpu::FrontOptions front;
    sockaddr_in address;
    std::vector<int> cores;
    int device;
    uint64_t tune_ns;
};

template <class Front, class Pool, class Going>
void serve(Front& front, Pool& pool, Account& account, Going going_on) {
    Turns turns(account);
    while (going_on()) {
        bool busy = pool.collect([&](const typename Front::Peer& peer, uint8_t* at, uint32_t bytes) { front.reply(peer, at, bytes); });
        if (busy) {
            account.messages += front.flush();
            pool.release();
            front.finished(pool.unreleased());
        }
        if (front.empty() && pool.room()) busy |= front.receive();
        while (!front.empty() && pool.room()) front.give_next(pool);
        pool.launch_due(!front.empty());
        turns.end(busy);
    }
}

// Runs `body(thread)` on a thread for each core.
template <class Body>
void on_threads(const Options& options, size_t count, Body body) {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < count; i++)
        threads.emplace_back([&, i] {
            if (!options.cores.empty()) pin(options.cores[i]);
            gpu::check(cudaSetDevice(options.device), "use the GPU");
            body(i);
        });
    for (auto& thread : threads) thread.join();
}

template <class Front, class Function>
int serve_network(const Options& options, Function function) {
    const size_t count = std::max<size_t>(1, options.cores.size());
    sockaddr_in address = options.address;
    const std::vector<int> sockets = udp_servers(address, options.front.gso, count);
    std::vector<Account> accounts(count);
    std::atomic<size_t> prepared{0};
    std::vector<gpu::FrontOptions> fronts(count, options.front);
    for (auto& front : fronts)
        if (options.pool.in_place)
            gpu::check(cudaHostAlloc(reinterpret_cast<void**>(&front.storage), gpu::Network::storage_bytes(front), cudaHostAllocMapped | cudaHostAllocPortable),
                       "allocate host memory");
    on_threads(options, count, [&](size_t thread) {
        gpu::Pool<Function, typename Front::Peer> pool(options.pool, function);
        Front front(sockets[thread], fronts[thread]);
        // Making graphs takes long; the server is ready once every thread has its own.
        if (++prepared == count) ready("host_gpu", url("udp", address));
        serve(front, pool, accounts[thread], going);
    });
    return report(accounts);
}

struct Tried {
    size_t threads;
    gpu::PoolOptions pool;
    double rate;
};

template <class Function>
Tried attempt(const Options& options, const gpu::PoolOptions& pool_options, size_t count, Function function) {
    std::vector<Account> accounts(count);
    std::atomic<size_t> prepared{0};
    std::atomic<uint64_t> begin{0}, end{~uint64_t{0}};
    on_threads(options, count, [&](size_t thread) {
        gpu::Pool<Function, gpu::Endless::Peer> pool(pool_options, function);
        gpu::Endless endless(options.pool.bytes_max);
        if (++prepared == count) {
            begin = now_ns();
            end = begin + options.tune_ns;
        }
        while (!begin && going()) relax();
        serve(endless, pool, accounts[thread], [&] { return now_ns() < end && going(); });
    });
    uint64_t messages = 0;
    for (const auto& account : accounts) messages += account.messages;
    return {count, pool_options, 1e9 * double(messages) / double(options.tune_ns)};
}

template <class Function>
int tune(const Options& options, Function function) {
    Tried best = {};
    std::printf("threads streams batch        rate  us in flight\n");
    const bool batch = options.pool.mode == gpu::BATCH;
    for (size_t threads = 1; threads <= std::max<size_t>(1, options.cores.size()); threads *= 2)
        for (unsigned streams : {1u, 2u, 4u, 8u, 16u, 32u, 64u, 128u})
            for (unsigned requests : {1u, 8u, 32u, 128u, 512u}) {
                if ((requests > 1) != batch || (batch && streams > 16) || !going()) continue;
                gpu::PoolOptions pool = options.pool;
                pool.streams = streams;
                pool.batch = requests;
                const Tried tried = attempt(options, pool, threads, function);
                const double us = 1e6 * double(threads * streams * requests) / tried.rate;
                std::printf("%7zu %7u %5u %11.0f %13.1f\n", threads, streams, requests, tried.rate, us);
                std::fflush(stdout);
                if (tried.rate > best.rate) best = tried;
            }
    std::printf("{\"rate\":%.1f,\"threads\":%zu,\"streams\":%u,\"batch\":%u}\n", best.rate, best.threads, best.pool.streams, best.pool.batch);
    return 0;
}

template <class Run>
int with_function(const std::string& name, Run run) {
    if (name == "echo") return run(gpu::Echo{});
    if (name == "scale") return run(gpu::Scale{});
    if (name == "lenet") return run(gpu::LeNet{});
    if (name.rfind("delay:", 0) == 0) return run(gpu::Delay{uint64_t(Flags::parse("--function delay", name.substr(6), 0, 1'000'000)) * 1000});
    if (name == "faces") return run(gpu::Faces{});
    misused("--function is echo, scale, lenet, faces or delay:MICROSECONDS, not `" + name + "`");
}

}  // namespace

int main(int argc, char** argv) {
    Flags flags(argc, argv, HELP);
    const std::string function = flags.text("--function", "echo");
    Options options;
    options.pool.mode = gpu::Mode(flags.choice("--mode", {"copy", "graph", "batch"}));
    options.pool.streams = unsigned(flags.number("--streams", 32, 1, 1024));
    options.pool.batch = options.pool.mode == gpu::BATCH ? unsigned(flags.number("--batch", 64, 2, 1024)) : 1;
    options.pool.wait_ns = options.pool.mode == gpu::BATCH ? uint64_t(flags.number("--wait-us", 0, 0, 100'000)) * 1000 : 0;
    const long usual = function == "lenet" ? serval_lenet::INPUT_BYTES : function == "faces" ? gpu::Faces::BYTES : 64;
    options.pool.bytes_max = options.front.bytes_max = uint32_t(flags.number("--max-bytes", usual, 1, 8192));
    options.address = address_of("--listen", flags.text("--listen", "127.0.0.1:0"));
    options.cores = flags.cores("--cores");
    options.front.gso = flags.on("--gso");
    options.front.storage = nullptr;
    options.pool.in_place = flags.on("--in-place");
    options.front.ordered = flags.on("--ordered");
    options.front.memcached = address_of("--memcached", flags.text("--memcached", "127.0.0.1:11211"));
    options.device = int(flags.number("--gpu", 0, 0, 63));
    const bool tuned = flags.on("--tune");
    options.tune_ns = tuned ? uint64_t(flags.number("--tune-ms", 200, 10, 10'000)) * 1'000'000 : 0;
    flags.end();
    if (options.pool.in_place && (options.pool.mode == gpu::COPY || function == "faces" || tuned))
        misused("--in-place needs --mode graph or batch, a function without a database, and a network");
    stop_on_signals();
    // Streams share hardware queues to the GPU, and streams on one queue may wait for each other. More queues than the default of
    // 8 cost a twentieth of the rate of short kernels.
    if (options.pool.streams > 8) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    gpu::check(cudaSetDeviceFlags(cudaDeviceScheduleSpin | cudaDeviceMapHost), "prepare the GPU");
    gpu::check(cudaSetDevice(options.device), "use the GPU");
    return with_function(function, [&](auto f) {
        using Front = std::conditional_t<std::is_same_v<decltype(f), gpu::Faces>, gpu::Database, gpu::Network>;
        return tuned ? tune(options, f) : serve_network<Front>(options, f);
    });
}
