// H: host-centric, the usual design of a service: a network thread receives, worker threads compute and reply.
//
// Every request crosses from one thread to another, which is the minimum cost of an accelerator behind a host application.
// The hand-over is as cheap as possible: a ring per worker, preallocated slots, no lock. A worker with
// an empty ring sleeps on a futex; the network thread wakes it once per batch, and only if it sleeps. With --spin
// neither ever sleeps. The network thread gives a request to the worker with the fewest pending ones. A worker takes all its
// pending requests (up to a batch), calls the function on each and sends the replies with one call.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <thread>

#include "functions.h"
#include "udp.h"

namespace {

const char HELP[] =
    "usage: host_centric [FLAGS]   a UDP server with a network thread and worker threads\n"
    "  --handler F        echo, lenet, scale, sockperf or spin:MICROSECONDS (echo)\n"
    "  --listen A:P       address and port; port 0 takes a free one (127.0.0.1:0)\n"
    "  --workers N        worker threads, 1..64 (1)\n"
    "  --pinning P        none: threads are not pinned; same: all threads on the first core of --cores;\n"
    "                     cross: the network thread on the first, the workers on the others in turn (none)\n"
    "  --cores N,N,...    the cores to pin to (those this process may use)\n"
    "  --batch N          datagrams per call, and requests a worker takes at a time, 1..1024 (64)\n"
    "  --max-bytes N      longest message, 1..65507 (2048)\n"
    "  --gso              GRO receive, GSO send\n"
    "  --spin             all threads spin; needs a core per thread, so --pinning same is refused\n";

constexpr uint32_t RING_SLOTS = 4096;  // requests pending per worker; more are dropped, as in a full socket buffer

struct Options {
    sockaddr_in address;
    unsigned batch, workers;
    uint32_t bytes_max;
    bool gso, spin;
    std::vector<int> cores;  // by thread, the network thread first; empty: not pinned
};

// Requests from the network thread to one worker.
class Ring {
  public:
    explicit Ring(uint32_t bytes_max)
        : stride((sizeof(Slot) + bytes_max + 63) / 64 * 64 + 64), memory(new uint8_t[RING_SLOTS * stride]) {}
    struct Slot {
        sockaddr_in peer;
        uint32_t bytes;
        uint8_t* message() { return reinterpret_cast<uint8_t*>(this + 1); }
    };

    // The network thread.
    uint32_t waiting() const { return written - head.load(std::memory_order_acquire); }
    bool put(const sockaddr_in& peer, const uint8_t* message, uint32_t bytes) {
        if (waiting() == RING_SLOTS) return false;
        Slot& to = at(written++);
        to.peer = peer;
        to.bytes = bytes;
        memcpy(to.message(), message, bytes);
        return true;
    }
    // Publishes the added requests; wakes the worker if it sleeps.
    void publish() {
        if (tail.load(std::memory_order_relaxed) == written) return;
        tail.store(written, std::memory_order_seq_cst);
        wake();
    }
    void wake() {
        if (asleep.load(std::memory_order_seq_cst) && asleep.exchange(0, std::memory_order_seq_cst))
            syscall(SYS_futex, &asleep, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }

    // The worker. Number of requests it may take.
    uint32_t ready() const { return tail.load(std::memory_order_acquire) - head.load(std::memory_order_relaxed); }
    Slot& next(uint32_t i) { return at(head.load(std::memory_order_relaxed) + i); }
    void release(uint32_t count) { head.store(head.load(std::memory_order_relaxed) + count, std::memory_order_release); }
    // Sleeps until something is published or the server ends. The flag is set before the last check, and the network thread
    // reads the flag after publishing: one of them sees the other.
    void sleep() {
        asleep.store(1, std::memory_order_seq_cst);
        while (tail.load(std::memory_order_seq_cst) == head.load(std::memory_order_relaxed) && going())
            if (syscall(SYS_futex, &asleep, FUTEX_WAIT_PRIVATE, 1, nullptr, nullptr, 0) == 0 || errno == EAGAIN) return;
        asleep.store(0, std::memory_order_relaxed);
    }

  private:
    Slot& at(uint32_t count) { return *reinterpret_cast<Slot*>(memory.get() + count % RING_SLOTS * stride); }

    const size_t stride;
    std::unique_ptr<uint8_t[]> memory;
    uint32_t written = 0;
    alignas(64) std::atomic<uint32_t> tail{0};
    alignas(64) std::atomic<uint32_t> asleep{0};
    alignas(64) std::atomic<uint32_t> head{0};
};

template <class Function>
void work(Ring& ring, int fd, const Options& options, Function function, Account& account) {
    Outbox outbox(fd, options.batch, options.gso);
    std::vector<uint8_t> out(size_t(options.batch) * OUT_BYTES);
    Turns turns(account);
    while (going()) {
        const uint32_t count = std::min(ring.ready(), options.batch);
        if (count == 0) {
            if (options.spin)
                relax();
            else
                ring.sleep();
            turns.woke();
            continue;
        }
        uint8_t* room = out.data();
        for (uint32_t i = 0; i < count; i++) {
            Ring::Slot& slot = ring.next(i);
            const Reply reply = function(slot.message(), slot.bytes, room);
            if (reply.at == room) room += reply.bytes;
            if (reply.at) outbox.add(slot.peer, reply.at, reply.bytes);
        }
        account.messages += outbox.flush();
        ring.release(count);
        turns.end(true);
    }
}

void receive(std::vector<std::unique_ptr<Ring>>& rings, int fd, const Options& options, Account& account) {
    Inbox inbox(options.batch, options.bytes_max, options.gso);
    Turns turns(account);
    while (going()) {
        const unsigned count = inbox.receive(fd, options.spin ? MSG_DONTWAIT : MSG_WAITFORONE);
        if (!options.spin) turns.woke();
        for (unsigned i = 0; i < count; i++)
            inbox.each(i, [&](const sockaddr_in& peer, const uint8_t* message, uint32_t bytes) {
                if (bytes > options.bytes_max) return;
                Ring* least = rings[0].get();
                for (auto& ring : rings)
                    if (ring->waiting() < least->waiting()) least = ring.get();
                least->put(peer, message, bytes);
            });
        for (auto& ring : rings) ring->publish();
        turns.end(count > 0);
    }
}

template <class Make>
int serve(const Options& options, Make make) {
    sockaddr_in address = options.address;
    const int fd = udp_server(address, options.gso);
    std::vector<Account> accounts(options.workers + 1);
    std::vector<std::unique_ptr<Ring>> rings;
    std::vector<std::thread> workers;
    for (unsigned i = 0; i < options.workers; i++) rings.push_back(std::make_unique<Ring>(options.bytes_max));
    const auto place = [&](unsigned thread) {
        if (options.cores.empty()) return;
        pin(options.cores[thread == 0 || options.cores.size() == 1 ? 0 : 1 + (thread - 1) % (options.cores.size() - 1)]);
    };
    for (unsigned i = 0; i < options.workers; i++)
        workers.emplace_back([&, i] {
            place(i + 1);
            work(*rings[i], fd, options, make(), accounts[i + 1]);
        });
    place(0);
    ready("host_centric", url("udp", address));
    receive(rings, fd, options, accounts[0]);
    for (auto& ring : rings) ring->wake();
    for (auto& worker : workers) worker.join();
    return report(accounts);
}

}  // namespace

int main(int argc, char** argv) {
    Flags flags(argc, argv, HELP);
    const std::string handler = flags.text("--handler", "echo");
    Options options;
    options.address = address_of("--listen", flags.text("--listen", "127.0.0.1:0"));
    options.workers = unsigned(flags.number("--workers", 1, 1, 64));
    options.batch = unsigned(flags.number("--batch", 64, 1, 1024));
    options.bytes_max = uint32_t(flags.number("--max-bytes", 2048, 1, DATAGRAM_BYTES_MAX));
    options.gso = flags.on("--gso");
    options.spin = flags.on("--spin");
    enum { NONE, SAME, CROSS };
    const size_t pinning = flags.choice("--pinning", {"none", "same", "cross"});
    auto cores = flags.cores("--cores");
    flags.end();
    if (options.spin && pinning == SAME) misused("--spin with --pinning same would make threads on one core spin while they wait for each other");
    if (pinning == NONE && !cores.empty()) misused("--cores needs --pinning same or cross");
    if (cores.empty()) cores = allowed_cores();
    if (pinning == CROSS && cores.size() < 2) misused("--pinning cross needs two cores");
    if (pinning == SAME) cores.resize(1);
    if (pinning != NONE) options.cores = cores;
    stop_on_signals();
    return with_function(handler, [&](auto make) { return serve(options, make); });
}
