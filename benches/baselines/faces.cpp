// Face verification on the host, with the pictures in memcached: the servers that Lynx (ASPLOS 2020) uses for comparison.
//
// Request: 12-byte label and 32x32 grey bytes. Reply: u32 verdict (0 no match, 1 match, 2 unknown label, 3 database
// unavailable), float32 distance, little endian: the answer of device/kernels/faces.cpp, computed by the same function.
//
// --mode sync: each thread receives a request, asks memcached over a connection of its own, waits for the answer (as with
// a client library such as libmemcached: one write, one read), computes and replies.
// --mode async: one thread, no waiting: see Async below.
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "lookup.h"
#include "pictures.h"
#include "udp.h"

namespace {

const char HELP[] =
    "usage: faces [FLAGS]   verifies faces against pictures in memcached, over UDP\n"
    "  --mode M           sync or async (sync)\n"
    "  --listen A:P       address and port; port 0 takes a free one (127.0.0.1:0)\n"
    "  --memcached A:P    memcached's address (127.0.0.1:11211)\n"
    "  --cores N,N,...    the cores that the threads run on in turn (not pinned)\n"
    "  --timeout-ms N     longest wait for memcached, 1..60000 (100)\n"
    "  --threads N        sync: threads, 1..64 (2)\n"
    "  --connections N    async: connections to memcached, 1..16 (1)\n"
    "  --keys N           async: maximum number of keys per command, 1..64 (16)\n"
    "  --wait W           async: when idle, poll sleeps, spin polls again, yield offers the core first (poll)\n"
    "  --keep             async: ask for each label once, and keep its picture: what a cache brings that costs nothing\n"
    "  --gso              async: GRO receive, GSO send\n";

constexpr uint32_t REQUEST_BYTES = LABEL_BYTES + serval_faces::PICTURE_BYTES;

struct Options {
    sockaddr_in address, memcached;
    std::vector<int> cores;
    unsigned threads, connections, keys;
    uint64_t timeout_ns;
    bool gso, keep;
    enum Wait { POLL, SPIN, YIELD } wait;
};

struct Verdict {
    uint32_t verdict;
    float distance;
};
static_assert(sizeof(Verdict) == 8);

// The reply to a request, once the database has answered.
Verdict judge(const uint8_t* picture, const Found& found, serval_faces::Scratch& scratch) {
    if (found.what != Found::VALUE) return {found.what == Found::MISS ? 2u : 3u, 0};
    const auto result = serval_faces::verify(0, 1, [] {}, picture, found.picture, serval_faces::DEFAULT_THRESHOLD, scratch);
    return {result.match ? 1u : 0u, result.distance};
}

// One thread of the synchronous server.
void serve_one_by_one(int fd, const Options& options, Account& account) {
    Lookup lookup(options.memcached, options.timeout_ns, 1);
    serval_faces::Scratch scratch;
    uint8_t message[REQUEST_BYTES + 1];
    Turns turns(account);
    while (going()) {
        sockaddr_in peer;
        socklen_t length = sizeof peer;
        const ssize_t bytes = recvfrom(fd, message, sizeof message, 0, reinterpret_cast<sockaddr*>(&peer), &length);
        turns.woke();
        if (bytes != REQUEST_BYTES) continue;
        Verdict verdict{3, 0};
        const auto answer = [&](uint32_t, const Found& found) { verdict = judge(message + LABEL_BYTES, found, scratch); };
        if (lookup.ask(0, message, now_ns())) lookup.flush(answer);
        while (lookup.pending()) lookup.receive(true, answer);
        if (sendto(fd, &verdict, sizeof verdict, 0, reinterpret_cast<sockaddr*>(&peer), length) == sizeof verdict) account.messages++;
        turns.end(true);
    }
}

// The asynchronous server: a turn receives all pending requests, asks memcached for all of them with one write, reads the
// available answers, computes, and sends all replies with one call. Only the client's picture is copied, because it
// has to wait for the one from the database.
class Async {
  public:
    Async(int fd, const Options& options, Account& account)
        : options(options), account(account), inbox(BATCH, REQUEST_BYTES + 1, options.gso), outbox(fd, BATCH, options.gso), polled{{fd, POLLIN, 0}} {
        // Reuse the most recently freed request: its memory is in the cache.
        unused.reserve(REQUESTS_MAX);
        answered.reserve(REQUESTS_MAX);
        for (uint32_t i = REQUESTS_MAX; i-- > 0;) unused.push_back(i);
        for (unsigned i = 0; i < options.connections; i++)
            lookups.push_back(std::make_unique<Lookup>(options.memcached, options.timeout_ns, options.keys));
        polled.resize(1 + options.connections);
    }
    void serve() {
        const auto answer = [this](uint32_t id, const Found& found) { settle(id, found); };
        Turns turns(account);
        while (going()) {
            const bool asleep = options.wait == Options::POLL;
            if (asleep) {
                sleep();
                turns.woke();
            }
            bool busy = false;
            if (!asleep || polled[0].revents) busy = receive();
            for (size_t i = 0; i < lookups.size(); i++) {
                Lookup& lookup = *lookups[i];
                lookup.flush(answer);
                // Without poll the sockets are simply read again.
                const bool look = asleep ? polled[1 + i].revents != 0 : lookup.descriptor() >= 0 && lookup.pending();
                if (look && lookup.descriptor() >= 0) busy |= lookup.receive(false, answer);
            }
            const uint64_t now = now_ns();
            if (now - checked_ns > 1'000'000) {
                checked_ns = now;
                for (auto& lookup : lookups) lookup->expire(now, answer);
            }
            account.messages += outbox.flush();
            unused.insert(unused.end(), answered.begin(), answered.end());
            answered.clear();
            turns.end(busy);
            if (!busy && options.wait == Options::YIELD) sched_yield();
            if (!busy && options.wait == Options::SPIN) relax();
        }
    }

  private:
    static constexpr unsigned BATCH = 64;
    static constexpr uint32_t REQUESTS_MAX = 4096;
    struct Request {
        sockaddr_in peer;
        Verdict verdict;
        std::string label;
        uint8_t picture[serval_faces::PICTURE_BYTES];
    };

    // Room for one receive. GRO batches could bring more than ever fits; the excess is dropped.
    bool room() const { return unused.size() >= (options.gso ? REQUESTS_MAX / 2 : BATCH); }
    void settle(uint32_t id, const Found& found) {
        Request& request = requests[id];
        if (options.keep && found.what == Found::VALUE) kept.emplace(request.label, Picture(found.picture, found.picture + serval_faces::PICTURE_BYTES));
        settle(id, request.picture, found);
    }
    void settle(uint32_t id, const uint8_t* picture, const Found& found) {
        Request& request = requests[id];
        request.verdict = judge(picture, found, scratch);
        outbox.add(request.peer, reinterpret_cast<uint8_t*>(&request.verdict), sizeof request.verdict);
        answered.push_back(id);
    }
    void sleep() {
        bool waiting = false;
        for (size_t i = 0; i < lookups.size(); i++) {
            polled[1 + i] = {lookups[i]->descriptor(), short(lookups[i]->unsent() ? POLLIN | POLLOUT : POLLIN), 0};
            waiting |= lookups[i]->pending() > 0;
        }
        polled[0].events = room() ? POLLIN : 0;
        poll(polled.data(), polled.size(), waiting ? 5 : 100);
    }
    bool receive() {
        if (!room()) return false;
        Lookup* least = lookups[0].get();
        for (auto& lookup : lookups)
            if (lookup->pending() < least->pending()) least = lookup.get();
        const unsigned count = inbox.receive(polled[0].fd, MSG_DONTWAIT);
        const uint64_t now = now_ns();
        for (unsigned i = 0; i < count; i++)
            inbox.each(i, [&](const sockaddr_in& peer, const uint8_t* message, uint32_t bytes) {
                if (bytes != REQUEST_BYTES || unused.empty()) return;
                const uint32_t id = unused.back();
                unused.pop_back();
                Request& request = requests[id];
                request.peer = peer;
                if (options.keep) {
                    request.label.assign(reinterpret_cast<const char*>(message), LABEL_BYTES);
                    if (const auto known = kept.find(request.label); known != kept.end())
                        return settle(id, message + LABEL_BYTES, {Found::VALUE, known->second.data()});
                }
                memcpy(request.picture, message + LABEL_BYTES, sizeof request.picture);
                if (!least->ask(id, message, now)) settle(id, {Found::UNAVAILABLE, nullptr});
            });
        return count > 0;
    }

    const Options& options;
    Account& account;
    Inbox inbox;
    Outbox outbox;
    std::vector<pollfd> polled;
    std::vector<std::unique_ptr<Lookup>> lookups;
    std::unique_ptr<Request[]> requests{new Request[REQUESTS_MAX]};
    std::vector<uint32_t> unused, answered;
    uint64_t checked_ns = 0;
    serval_faces::Scratch scratch;
    using Picture = std::vector<uint8_t>;
    std::unordered_map<std::string, Picture> kept;
};

int serve(const Options& options, bool async) {
    sockaddr_in address = options.address;
    const int fd = udp_server(address, options.gso);
    const auto place = [&](unsigned thread) {
        if (!options.cores.empty()) pin(options.cores[thread % options.cores.size()]);
    };
    ready("faces", url("udp", address));
    if (async) {
        std::vector<Account> accounts(1);
        place(0);
        Async(fd, options, accounts[0]).serve();
        return report(accounts);
    }
    std::vector<Account> accounts(options.threads);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < options.threads; i++)
        threads.emplace_back([&, i] {
            place(i);
            serve_one_by_one(fd, options, accounts[i]);
        });
    for (auto& thread : threads) thread.join();
    return report(accounts);
}

}  // namespace

int main(int argc, char** argv) {
    Flags flags(argc, argv, HELP);
    Options options;
    const bool async = flags.choice("--mode", {"sync", "async"}) == 1;
    options.address = address_of("--listen", flags.text("--listen", "127.0.0.1:0"));
    options.memcached = address_of("--memcached", flags.text("--memcached", "127.0.0.1:11211"));
    options.cores = flags.cores("--cores");
    options.timeout_ns = uint64_t(flags.number("--timeout-ms", 100, 1, 60000)) * 1'000'000;
    if (!async) options.threads = unsigned(flags.number("--threads", 2, 1, 64));
    if (async) {
        options.connections = unsigned(flags.number("--connections", 1, 1, 16));
        options.keys = unsigned(flags.number("--keys", 16, 1, 64));
        options.wait = Options::Wait(flags.choice("--wait", {"poll", "spin", "yield"}));
    }
    options.keep = async && flags.on("--keep");
    options.gso = async && flags.on("--gso");
    flags.end();
    stop_on_signals();
    return serve(options, async);
}
