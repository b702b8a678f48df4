// A noisy neighbour, not measured itself: multiplies integer matrices on its cores in a loop, which loads their caches, and
// the shared cache and memory. As in Lynx (ASPLOS 2020): 1140 x 1140, 15 MiB in three matrices.
#include <thread>

#include "contract.h"

namespace {

const char HELP[] =
    "usage: neighbour [FLAGS]   multiplies matrices of integers until SIGTERM; reports rows of products\n"
    "  --size N           rows and columns, 1..8192 (1140)\n"
    "  --cores N,N,...    a thread with matrices of its own on each of these cores (one thread, not pinned)\n";

void multiply(size_t n, Account& account) {
    std::vector<uint32_t> a(n * n, 3), b(n * n, 5), product(n * n);
    Turns turns(account);
    while (going()) {
        for (size_t row = 0; row < n && going(); row++) {
            uint32_t* to = product.data() + row * n;
            std::fill(to, to + n, 0);
            for (size_t k = 0; k < n; k++) {
                const uint32_t factor = a[row * n + k];
                for (size_t column = 0; column < n; column++) to[column] += factor * b[k * n + column];
            }
            account.messages++;
            turns.end(true);
        }
        // The next product has other factors, so that no product can be optimised away.
        a.swap(product);
    }
}

}  // namespace

int main(int argc, char** argv) {
    Flags flags(argc, argv, HELP);
    const auto size = size_t(flags.number("--size", 1140, 1, 8192));
    const auto cores = flags.cores("--cores");
    flags.end();
    stop_on_signals();
    const size_t count = std::max<size_t>(1, cores.size());
    std::vector<Account> accounts(count);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < count; i++)
        threads.emplace_back([&, i] {
            if (!cores.empty()) pin(cores[i]);
            multiply(size, accounts[i]);
        });
    ready("neighbour", "");
    for (auto& thread : threads) thread.join();
    return report(accounts);
}
