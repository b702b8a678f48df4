// Sends messages without replies as fast as possible, from a thread on each core: GSO batches to a `udp://`
// port, or through a `shm://` port. Prints the number sent; the server counts arrivals.
#include <serval/client.h>

#include "../baselines/contract.h"

#include <thread>

namespace {

const char HELP[] =
    "usage: flood URL [FLAGS]   sends messages without replies to udp://ADDRESS:PORT or shm:///PATH\n"
    "  --cores N,N,...    a thread with a client of its own on each of these cores (one thread, not pinned)\n"
    "  --bytes N          length of a message, 4..1024 (64)\n"
    "  --seconds N        duration, 1..600 (3)\n";

constexpr size_t BURST = 1024;

void checked(int result) {
    if (result == SERVAL_OK || result == SERVAL_FULL) return;
    std::fprintf(stderr, "%s: %s\n", serval_strerror(result), serval_detail());
    std::exit(1);
}

void over_udp(const std::string& url, size_t bytes, uint64_t end, Account& account) {
    serval_burst* client = nullptr;
    checked(serval_burst_open(url.c_str(), nullptr, &client));
    const std::vector<uint8_t> datagrams(BURST * bytes, 1);
    while (now_ns() < end && going()) {
        size_t sent = 0;
        checked(serval_burst_send(client, datagrams.data(), bytes, BURST, &sent));
        account.messages += sent;
    }
    serval_burst_close(client);
}

void through_memory(const std::string& path, size_t bytes, uint64_t end, Account& account) {
    serval_shm* client = nullptr;
    const serval_shm_options options = {4096, 0};
    checked(serval_shm_connect(path.c_str(), &options, &client));
    const std::vector<uint8_t> message(bytes, 1);
    while (now_ns() < end && going()) {
        for (unsigned i = 0; i < 64; i++) {
            const int result = serval_shm_send(client, 0, message.data(), bytes);
            checked(result);
            if (result == SERVAL_FULL) {
                relax();
                break;
            }
            account.messages++;
        }
        serval_shm_flush(client);
    }
    serval_shm_close(client);
}

}  // namespace

int main(int argc, char** argv) {
    const std::string url = argc > 1 ? argv[1] : "";
    Flags flags(argc - (argc > 1), argv + (argc > 1), HELP);
    const auto cores = flags.cores("--cores");
    const auto bytes = size_t(flags.number("--bytes", 64, 4, 1024));
    const auto seconds = uint64_t(flags.number("--seconds", 3, 1, 600));
    flags.end();
    const bool udp = url.rfind("udp://", 0) == 0;
    if (!udp && url.rfind("shm:///", 0) != 0) misused("the first argument must be udp://ADDRESS:PORT or shm:///PATH");
    stop_on_signals();
    const size_t count = std::max<size_t>(1, cores.size());
    std::vector<Account> accounts(count);
    std::vector<std::thread> threads;
    const uint64_t end = now_ns() + seconds * 1'000'000'000;
    for (size_t i = 0; i < count; i++)
        threads.emplace_back([&, i] {
            if (!cores.empty()) pin(cores[i]);
            if (udp)
                over_udp(url, bytes, end, accounts[i]);
            else
                through_memory(url.substr(6), bytes, end, accounts[i]);
        });
    for (auto& thread : threads) thread.join();
    return report(accounts);
}
