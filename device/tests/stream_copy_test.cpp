// The copies between a stream ring and private memory that a CUDA block makes, with threads of the host for those of the block: every alignment of
// both sides, across the end of the ring, in blocks of one and of several warps. Nothing beside the bytes is written.
#include <serval/stream_copy.h>

#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"

namespace detail = serval::detail;

namespace {

// A warp whose lanes take turns: a lane runs until it exchanges a value, and goes on when all have.
class Warp {
  public:
    uint64_t exchange(unsigned lane, uint64_t value, unsigned from) {
        wait([&] { values[lane] = value; });
        const uint64_t result = values[from];
        wait([] {});
        return result;
    }

  private:
    void wait(const std::function<void()>& act) {
        std::unique_lock<std::mutex> lock(mutex);
        act();
        const uint64_t round = rounds;
        if (++arrived == detail::WARP_SIZE) {
            arrived = 0;
            rounds++;
            all.notify_all();
        } else {
            all.wait(lock, [&] { return rounds != round; });
        }
    }
    std::mutex mutex;
    std::condition_variable all;
    unsigned arrived = 0;
    uint64_t rounds = 0;
    uint64_t values[detail::WARP_SIZE];
};

struct HostThreads {
    Warp* warps;
    unsigned number, count;

    unsigned rank() const { return number; }
    unsigned size() const { return count; }
    uint64_t before(uint64_t value, uint64_t last) const {
        const unsigned lane = number % 32;
        return warps[number / 32].exchange(lane, lane == 31 ? last : value, (lane + 31) % 32);
    }
    uint64_t value_of(bool has, uint64_t value) const {
        uint64_t found = 0;
        for (unsigned lane = 0; lane < 32; lane++) {
            const uint64_t has_one = warps[number / 32].exchange(number % 32, has, lane);
            const uint64_t one = warps[number / 32].exchange(number % 32, value, lane);
            if (has_one) found = one;
        }
        return found;
    }
};

constexpr uint64_t CAPACITY = 16384;

struct Fixture {
    std::vector<uint8_t> memory, room;
    detail::StreamRing ring;
    uint8_t* data;

    Fixture() : memory(SERVAL_STREAM_DATA + CAPACITY + 256), room(CAPACITY + 256) {
        uint8_t* const base = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128) % 128;
        ring = {base, CAPACITY};
        data = base + SERVAL_STREAM_DATA;
    }
    uint8_t* private_at(unsigned offset) { return room.data() + (16 - reinterpret_cast<uintptr_t>(room.data()) % 16) % 16 + 32 + offset; }
};

// Calls `act` by every thread of a block.
void run_block(unsigned threads, const std::function<void(const HostThreads&)>& act) {
    std::vector<Warp> warps(threads / 32);
    std::vector<std::thread> all;
    for (unsigned i = 0; i < threads; i++) all.emplace_back([&, i] { act({warps.data(), i, threads}); });
    for (std::thread& thread : all) thread.join();
}

struct Case {
    uint64_t position, count;
    unsigned offset;
};

// `every`: one in this number of cases.
std::vector<Case> cases(check::Random& random, size_t every) {
    std::vector<Case> all;
    for (unsigned i = 0; i < 16; i++)
        for (uint64_t count : {1, 3, 8, 15, 16, 17, 40}) all.push_back({CAPACITY * 3 - 20 + random.below(40), count, i});
    for (unsigned i = 0; i < 40; i++) all.push_back({CAPACITY * 5 + random.below(CAPACITY), 1 + random.below(i % 2 ? 700 : CAPACITY), static_cast<unsigned>(random.below(16))});
    for (unsigned i = 0; i < 16; i++) all.push_back({CAPACITY * 7 + 128 * random.below(9) + (i & 3) * 4, 9000 + i % 5, i & ~3u});
    all.push_back({CAPACITY * 9 + 5, CAPACITY, 3});
    all.push_back({CAPACITY * 9, CAPACITY, 0});
    std::vector<Case> some;
    for (size_t i = 0; i < all.size(); i += every) some.push_back(all[i]);
    return some;
}

}  // namespace

TEST(copies_out_of_a_stream) {
    check::Random random(11);
    Fixture f;
    random.fill(f.data, CAPACITY);
    for (unsigned threads : {32u, 96u})
        for (const Case& c : cases(random, threads == 32 ? 1 : 7)) {
            std::fill(f.room.begin(), f.room.end(), 0xee);
            uint8_t* const to = f.private_at(c.offset);
            run_block(threads, [&](const HostThreads& t) { detail::copy_out_of_stream(f.ring, c.position, c.count, to, t); });
            uint64_t wrong = 0;
            for (uint64_t i = 0; i < c.count; i++) wrong += to[i] != f.data[(c.position + i) % CAPACITY];
            for (const uint8_t* p = f.room.data(); p < to; p++) wrong += *p != 0xee;
            for (const uint8_t* p = to + c.count; p < f.room.data() + f.room.size(); p++) wrong += *p != 0xee;
            CHECK_EQ(wrong, 0);
        }
}

// Words that hold a byte of the range are written, with what was before it in the first one and zeros after it in the last one; no others.
TEST(copies_into_a_stream) {
    check::Random random(12);
    Fixture f;
    for (unsigned threads : {32u, 96u})
        for (const Case& c : cases(random, threads == 32 ? 1 : 7)) {
            // A writer keeps the words of the bytes that were not read.
            const uint64_t room = CAPACITY - c.position % 8;
            const uint64_t count = c.count < room ? c.count : room;
            std::vector<uint8_t> from(count);
            random.fill(from.data(), count);
            std::memcpy(f.private_at(c.offset), from.data(), count);
            std::fill(f.data, f.data + CAPACITY, 0xee);
            uint64_t partial = 0, last = 0;
            for (unsigned i = 0; i < c.position % 8; i++) partial |= uint64_t{0xa0 + i} << (8 * i);
            run_block(threads, [&](const HostThreads& t) {
                const uint64_t left = detail::copy_into_stream(f.ring, c.position, count, f.private_at(c.offset), partial, t);
                if (t.rank() == 0) last = left;
            });
            std::vector<uint8_t> want(CAPACITY, 0xee);
            const uint64_t end = c.position + count;
            for (uint64_t p = c.position & ~uint64_t{7}; p < ((end + 7) & ~uint64_t{7}); p++)
                want[p % CAPACITY] = p < c.position ? static_cast<uint8_t>(0xa0 + p % 8) : p < end ? from[p - c.position] : 0;
            CHECK(std::memcmp(want.data(), f.data, CAPACITY) == 0);
            uint64_t tail = 0;
            for (unsigned i = 0; i < end % 8; i++) tail |= uint64_t{want[(end - end % 8 + i) % CAPACITY]} << (8 * i);
            CHECK_EQ(last, tail);
        }
}

int main(int argc, char** argv) { return check::run_all(argc, argv); }
