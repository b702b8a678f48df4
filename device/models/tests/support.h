// Shared by the tests of this folder: files, checks, guarded buffers, and a block of real threads.
#ifndef SERVAL_MODELS_TESTS_SUPPORT_H
#define SERVAL_MODELS_TESTS_SUPPORT_H

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#define CHECK(condition, ...)                                                   \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            std::fprintf(stderr, __VA_ARGS__);                                  \
            std::fputc('\n', stderr);                                           \
            std::exit(1);                                                       \
        }                                                                       \
    } while (0)

// A file of device/models: 8 bytes of magic, a u32 count and records (README.md there).
struct Records {
    std::vector<uint8_t> bytes;
    size_t first = 12, size;
    uint32_t count;

    Records(const std::string& path, const char* magic, size_t record, bool text = false) : size(record) {
        std::ifstream file(path, std::ios::binary);
        bytes.assign(std::istreambuf_iterator<char>(file), {});
        CHECK(bytes.size() >= 16 && !memcmp(bytes.data(), magic, 8), "%s is missing or not a %s file", path.c_str(), magic);
        memcpy(&count, &bytes[8], 4);
        if (text) {
            uint32_t length;
            memcpy(&length, &bytes[12], 4);
            first = 16 + length;
        }
        CHECK(count > 0 && bytes.size() == first + count * size, "%s has %zu bytes", path.c_str(), bytes.size());
    }
    const uint8_t* operator[](size_t i) const { return &bytes[first + i * size]; }
};

// A buffer that ends at an unmapped page: reading or writing past it ends the test.
class Guarded {
    uint8_t* pages;
    size_t page, used;

  public:
    explicit Guarded(size_t size) : page(sysconf(_SC_PAGESIZE)), used(size) {
        pages = static_cast<uint8_t*>(mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        CHECK(pages != MAP_FAILED && size <= page && !mprotect(pages + page, page, PROT_NONE), "no guarded page");
    }
    ~Guarded() { munmap(pages, 2 * page); }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;
    uint8_t* data() { return pages + page - used; }
};

// Calls body(rank, sync) on `size` threads that share a barrier: a block as a GPU has it.
template <class Body>
void block(unsigned size, Body body) {
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, nullptr, size);
    std::vector<std::thread> threads;
    for (unsigned rank = 0; rank < size; ++rank)
        threads.emplace_back([&barrier, &body, rank] { body(rank, [&barrier] { pthread_barrier_wait(&barrier); }); });
    for (auto& thread : threads) thread.join();
    pthread_barrier_destroy(&barrier);
}

#endif
