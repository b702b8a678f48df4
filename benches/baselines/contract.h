// The interface that baselines share with every measured server: flags, the ready line, SIGTERM and the final counts.
//
// A server prints one line that starts with `ready` and holds the URLs it serves, serves until SIGTERM or SIGINT, prints
// as its last line `{"messages":N,"busy_ns":N,"cpu_ns":N}` and exits with 0. messages: replies sent. busy_ns: time spent in
// loop iterations that found work, summed over the threads. cpu_ns: CPU time of the process. Exit code 1 is a failure, 2 a
// wrong flag.
#ifndef SERVAL_BASELINES_CONTRACT_H
#define SERVAL_BASELINES_CONTRACT_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

// Set by SIGTERM and SIGINT.
inline std::atomic<bool> stopping{false};

[[noreturn]] inline void fail(const std::string& what) {
    std::fprintf(stderr, "%s: %s\n", what.c_str(), std::strerror(errno));
    std::exit(1);
}

[[noreturn]] inline void misused(const std::string& what) {
    std::fprintf(stderr, "%s; --help lists the flags\n", what.c_str());
    std::exit(2);
}

inline uint64_t now_ns(clockid_t clock = CLOCK_MONOTONIC) {
    timespec t;
    clock_gettime(clock, &t);
    return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
}

// Gives up the core briefly; another thread may need it more than this one needs to poll again.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Flags: `--name` or `--name VALUE`. Each known flag is read once, then `end` refuses the remaining ones.
class Flags {
  public:
    Flags(int argc, char** argv, const char* help) : left(argv + 1, argv + argc) {
        for (const auto& word : left)
            if (word == "--help") {
                std::fputs(help, stdout);
                std::exit(0);
            }
    }
    bool on(const char* name) {
        for (size_t i = 0; i < left.size(); i++)
            if (left[i] == name) {
                left.erase(left.begin() + long(i));
                return true;
            }
        return false;
    }
    std::string text(const char* name, const char* otherwise) {
        for (size_t i = 0; i < left.size(); i++)
            if (left[i] == name) {
                if (i + 1 == left.size()) misused(std::string(name) + " needs a value");
                const std::string value = left[i + 1];
                left.erase(left.begin() + long(i), left.begin() + long(i) + 2);
                return value;
            }
        return otherwise;
    }
    long number(const char* name, long otherwise, long min, long max) {
        const std::string value = text(name, std::to_string(otherwise).c_str());
        return parse(name, value, min, max);
    }
    // One of several words; the first is the default. Returns its index.
    size_t choice(const char* name, const std::vector<std::string>& words) {
        const std::string value = text(name, words[0].c_str());
        std::string all;
        for (size_t i = 0; i < words.size(); i++) {
            if (words[i] == value) return i;
            all += (i ? ", " : "") + words[i];
        }
        misused(std::string(name) + " must be one of " + all + ", not `" + value + "`");
    }
    // Cores as in `0` or `0,1`; none when the flag is absent.
    std::vector<int> cores(const char* name) {
        std::vector<int> found;
        const std::string list = text(name, "");
        for (size_t at = 0; at < list.size();) {
            const size_t end = std::min(list.find(',', at), list.size());
            found.push_back(int(parse(name, list.substr(at, end - at), 0, CPU_SETSIZE - 1)));
            at = end + 1;
        }
        return found;
    }
    void end() {
        if (!left.empty()) misused("unknown flag `" + left[0] + "`");
    }
    static long parse(const std::string& name, const std::string& value, long min, long max) {
        char* rest;
        errno = 0;
        const long number = std::strtol(value.c_str(), &rest, 10);
        if (value.empty() || *rest || errno || number < min || number > max)
            misused(name + " must be a number from " + std::to_string(min) + " to " + std::to_string(max) + ", not `" + value + "`");
        return number;
    }

  private:
    std::vector<std::string> left;
};

// Binds the calling thread to one core.
inline void pin(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    if ((errno = pthread_setaffinity_np(pthread_self(), sizeof set, &set))) fail("run on core " + std::to_string(core));
}

// The cores this process may use.
inline std::vector<int> allowed_cores() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) fail("ask for the cores");
    std::vector<int> found;
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &set)) found.push_back(core);
    return found;
}

inline void stop_on_signals() {
    struct sigaction action = {};
    action.sa_handler = [](int) { stopping.store(true); };
    sigaction(SIGTERM, &action, nullptr);
    sigaction(SIGINT, &action, nullptr);
    signal(SIGPIPE, SIG_IGN);
}

inline bool going() { return !stopping.load(); }

// Counts of one thread.
struct alignas(64) Account {
    uint64_t messages = 0;
    uint64_t busy_ns = 0;
};

// Divides a loop's time into iterations: one clock read each, about 25 ns.
class Turns {
  public:
    explicit Turns(Account& account) : account(account), last(now_ns()) {}
    // Ends an iteration; `found` says whether it had work.
    void end(bool busy) {
        const uint64_t now = now_ns();
        if (busy) account.busy_ns += now - last;
        last = now;
    }
    // Like `end`, if the thread slept until `woke`: sleeping does not count as work.
    void woke() { last = now_ns(); }

  private:
    Account& account;
    uint64_t last;
};

inline void ready(const char* name, const std::string& urls) {
    std::printf("ready: %s %s\n", name, urls.c_str());
    std::fflush(stdout);
}

inline int report(const std::vector<Account>& accounts) {
    Account sum;
    for (const auto& account : accounts) {
        sum.messages += account.messages;
        sum.busy_ns += account.busy_ns;
    }
    std::printf("{\"messages\":%" PRIu64 ",\"busy_ns\":%" PRIu64 ",\"cpu_ns\":%" PRIu64 "}\n", sum.messages, sum.busy_ns,
                now_ns(CLOCK_PROCESS_CPUTIME_ID));
    return 0;
}

#endif
