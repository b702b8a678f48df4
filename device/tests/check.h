// A one-page test harness: TEST(name) { CHECK(...); } in any number of files, one main.
#ifndef SERVAL_TESTS_CHECK_H
#define SERVAL_TESTS_CHECK_H

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace check {

struct Case {
    const char* name;
    void (*run)();
    Case* next;
    static Case*& first() {
        static Case* list = nullptr;
        return list;
    }
    Case(const char* n, void (*r)()) : name(n), run(r), next(first()) { first() = this; }
};

inline int& failures() {
    static int count = 0;
    return count;
}

inline bool fail(const char* file, int line, const char* what) {
    std::printf("%s:%d: failed: %s\n", file, line, what);
    failures()++;
    return false;
}

inline bool equal(const char* file, int line, const char* what, uint64_t a, uint64_t b) {
    if (a == b) return true;
    fail(file, line, what);
    std::printf("    %" PRIu64 " (0x%" PRIx64 ") is not %" PRIu64 " (0x%" PRIx64 ")\n", a, a, b, b);
    return false;
}

// Runs every case, or those whose name contains the argument. A run without a case is a failure.
inline int run_all(int argc, char** argv) {
    int ran = 0;
    for (Case* c = Case::first(); c; c = c->next) {
        if (argc > 1 && !std::strstr(c->name, argv[1])) continue;
        int before = failures();
        c->run();
        ran++;
        if (failures() != before) std::printf("FAILED %s\n", c->name);
    }
    std::printf("%d cases, %d failed checks\n", ran, failures());
    return failures() != 0 || ran == 0;
}

// xorshift64*: tests repeat exactly.
struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed * 2 + 1) {}
    uint64_t next() {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        return state * 0x2545f4914f6cdd1du;
    }
    uint64_t below(uint64_t n) { return next() % n; }
    void fill(void* p, size_t bytes) {
        for (size_t i = 0; i < bytes; i++) static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(next());
    }
};

}  // namespace check

// Returns from the test on failure if later checks would only repeat it.
#define CHECK(what)                                                   \
    do {                                                              \
        if (!(what)) { check::fail(__FILE__, __LINE__, #what); return; } \
    } while (0)
#define CHECK_EQ(a, b)                                                                                           \
    do {                                                                                                         \
        if (!check::equal(__FILE__, __LINE__, #a " == " #b, static_cast<uint64_t>(a), static_cast<uint64_t>(b))) \
            return;                                                                                              \
    } while (0)

#define TEST(NAME)                                     \
    static void NAME();                                \
    static check::Case case_##NAME(#NAME, NAME);       \
    static void NAME()

#endif
