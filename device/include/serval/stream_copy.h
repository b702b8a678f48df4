// Copies between a stream ring and private memory by all threads of a CUDA block.
//
// A trip over the bus takes a microsecond, so each thread has many loads in flight; and a line is asked for by one instruction of one warp,
// because the bus brings it to one reader at a time. So a warp takes runs of whole lines, and a lane one *pair* of words of each 512 bytes. Pairs
// that are not whole in the range, at most one at each end, are accessed word by word by four threads. Where private memory is not
// aligned as the ring is, lanes exchange their pairs.
//
// `Threads` are the threads of the block: tests run them on the host.
#ifndef SERVAL_STREAM_COPY_H
#define SERVAL_STREAM_COPY_H

#include "abi.h"
#include "memory.h"

namespace serval {
namespace detail {

// A validated, private description of a stream ring.
struct StreamRing {
    uint8_t* words;     // head, tail and ends
    uint64_t capacity;  // a power of two

    SERVAL_INLINE uint64_t* word(unsigned offset) const { return reinterpret_cast<uint64_t*>(words + offset); }
    // The word that has the byte at this position.
    SERVAL_INLINE uint64_t* at(uint64_t position) const {
        return reinterpret_cast<uint64_t*>(words + SERVAL_STREAM_DATA + (position & (capacity - 1) & ~uint64_t{7}));
    }
};

// Threads of a warp, bytes of a pair, and bytes that a warp accesses with one instruction.
constexpr unsigned WARP_SIZE = 32, PAIR_BYTES = sizeof(WordPair), WARP_BYTES = WARP_SIZE * PAIR_BYTES;
// Pairs that a thread has in flight: from the ring over the bus, and from private memory.
constexpr unsigned PAIRS_IN = 8, PAIRS_OUT = 4;

#if SERVAL_CUDA
// The threads of this block.
struct BlockThreads {
    SERVAL_INLINE unsigned rank() const { return block_rank(); }
    SERVAL_INLINE unsigned size() const { return block_size(); }
    // By a warp: the value of the lane before; for lane 0 what the last lane has as `last`.
    SERVAL_INLINE uint64_t before(uint64_t value, uint64_t last) const {
        const unsigned lane = rank() % WARP_SIZE;
        return __shfl_sync(~0u, static_cast<unsigned long long>(lane == WARP_SIZE - 1 ? last : value), (lane + WARP_SIZE - 1) % WARP_SIZE);
    }
    // By a warp: the value of the lane that has one, of which there is at most one; 0 if none has.
    SERVAL_INLINE uint64_t value_of(bool has, uint64_t value) const {
        const unsigned lanes = __ballot_sync(~0u, has);
        value = __shfl_sync(~0u, static_cast<unsigned long long>(value), __ffs(static_cast<int>(lanes)) - 1);
        return lanes ? value : 0;
    }
};
#endif

// A range of a stream, in bytes from the line where it begins: [begin, end), of which [first, last) are whole pairs.
struct StreamRange {
    uint8_t* data;
    uint32_t line, mask;
    uint32_t begin, end, first, last;

    SERVAL_INLINE StreamRange(const StreamRing& ring, uint64_t position, uint64_t count) {
        constexpr uint32_t IN_LINE = SERVAL_LINE_BYTES - 1, IN_PAIR = PAIR_BYTES - 1;
        data = ring.words + SERVAL_STREAM_DATA;
        mask = static_cast<uint32_t>(ring.capacity - 1);
        line = static_cast<uint32_t>(position) & ~IN_LINE;
        begin = static_cast<uint32_t>(position) & IN_LINE;
        end = begin + static_cast<uint32_t>(count);
        const uint32_t up = (begin + IN_PAIR) & ~IN_PAIR, down = end & ~IN_PAIR;
        first = up < end ? up : end;
        last = down > first ? down : first;
    }
    SERVAL_INLINE bool has_pair(uint32_t at) const { return at - first < last - first; }
    SERVAL_INLINE uint64_t* word(uint32_t at) const { return reinterpret_cast<uint64_t*>(data + ((line + at) & mask)); }
};

// A word at an end of a range, with the bytes [begin, end) of it in the range: of each of four threads.
struct EndWord {
    uint32_t at, begin, end;

    SERVAL_INLINE EndWord(const StreamRange& range, unsigned number) {
        const bool leads = number < 2;
        const uint32_t from = leads ? range.begin : range.last, to = leads ? range.first : range.end;
        at = (from & ~(PAIR_BYTES - 1)) + 8 * (number % 2);
        begin = at > from ? at : from;
        end = number >= 4 ? begin : at + 8 < to ? at + 8 : to;
    }
    SERVAL_INLINE bool is_used() const { return begin < end; }
    SERVAL_INLINE unsigned bytes() const { return end - begin; }
    // Bits of the word before its bytes.
    SERVAL_INLINE unsigned shift() const { return 8 * (begin - at); }
};

// Stores the bytes [from, to) of a pair to the same bytes of `place`; `step` (4 or 1) divides both and the address.
SERVAL_INLINE void put_part(uint8_t* place, const WordPair& pair, unsigned from, unsigned to, unsigned step) {
#if SERVAL_CUDA
#pragma unroll 1
#endif
    for (unsigned i = from; i < to; i += step) {
        const uint64_t v = (i < 8 ? pair.word[0] : pair.word[1]) >> (8 * (i % 8));
        if (step == 4) private_store(place + i, static_cast<uint32_t>(v));
        else place[i] = static_cast<uint8_t>(v);
    }
}

// The 16 bytes that end `shift` (1 to 15) bytes before the end of the second pair.
SERVAL_INLINE WordPair join_pairs(const WordPair& a, const WordPair& b, unsigned shift) {
    const unsigned skip = PAIR_BYTES - shift, bits = 8 * (skip % 8);
    const uint64_t x = skip < 8 ? a.word[0] : a.word[1], y = skip < 8 ? a.word[1] : b.word[0], z = skip < 8 ? b.word[0] : b.word[1];
    if (bits == 0) return {{x, y}};
    return {{x >> bits | y << (64 - bits), y >> bits | z << (64 - bits)}};
}

// By all threads: copies `count` bytes from position `from` on.
template <class Threads>
SERVAL_CALL void copy_out_of_stream(const StreamRing ring, uint64_t from, uint64_t count, uint8_t* to, const Threads threads) {
    const StreamRange range(ring, from, count);
    const unsigned lane = threads.rank() % WARP_SIZE;
    to -= range.begin;
    // How far private memory is from the alignment of the ring.
    const unsigned shift = static_cast<unsigned>(reinterpret_cast<uint64_t>(to) % PAIR_BYTES), step = shift % 4 ? 1 : 4;
    // By the last threads, because the last warp has the least to do beside.
    const EndWord part(range, threads.size() - 1 - threads.rank());
    if (part.is_used()) {
        const uint64_t word = load_relaxed(range.word(part.at)) >> part.shift();
#if SERVAL_CUDA
#pragma unroll
#endif
        for (unsigned i = 0; i < 8; i++)
            if (i < part.bytes()) to[part.begin + i] = static_cast<uint8_t>(word >> (8 * i));
    }
    for (uint32_t run = threads.rank() / WARP_SIZE * PAIRS_IN * WARP_BYTES; run < range.last; run += threads.size() / WARP_SIZE * PAIRS_IN * WARP_BYTES) {
        const uint32_t mine = run + lane * PAIR_BYTES;
        WordPair pairs[PAIRS_IN] = {};
#if SERVAL_CUDA
#pragma unroll
#endif
        for (unsigned i = 0; i < PAIRS_IN; i++) load_pair_if(range.has_pair(mine + i * WARP_BYTES), range.word(mine + i * WARP_BYTES), pairs[i]);
#if SERVAL_CUDA
#pragma unroll
#endif
        for (unsigned i = 0; i < PAIRS_IN; i++) {
            const uint32_t at = mine + i * WARP_BYTES;
            const bool is_here = range.has_pair(at);
            if (shift == 0) {
                if (is_here) private_store(to + at, pairs[i]);
                continue;
            }
            // An aligned place gets the last bytes of the pair before and the first ones of this pair.
            const WordPair& last = pairs[i ? i - 1 : 0];
            const WordPair before = {{threads.before(pairs[i].word[0], last.word[0]), threads.before(pairs[i].word[1], last.word[1])}};
            if (!is_here) continue;
            const bool is_joined = at > range.first && (i || lane), is_last = at + PAIR_BYTES >= range.last || (i == PAIRS_IN - 1 && lane == WARP_SIZE - 1);
            if (is_joined) private_store(to + at - shift, join_pairs(before, pairs[i], shift));
            else put_part(to + at, pairs[i], 0, PAIR_BYTES - shift, step);
            if (is_last) put_part(to + at, pairs[i], PAIR_BYTES - shift, PAIR_BYTES, step);
        }
    }
}

// The word at `at`, of any alignment, in the private memory [begin, end); loads nothing beyond.
SERVAL_INLINE uint64_t word_at(const uint8_t* at, const uint8_t* begin, const uint8_t* end) {
    const unsigned beyond = static_cast<unsigned>(reinterpret_cast<uint64_t>(at) % 8);
    if (beyond == 0) return private_load<uint64_t>(at);
    const uint8_t* const whole = at - beyond;
    if (whole < begin || whole + 16 > end) return private_bytes(at, 8);
    return private_load<uint64_t>(whole) >> (8 * beyond) | private_load<uint64_t>(whole + 8) << (64 - 8 * beyond);
}

// By all threads: writes `count` bytes at position `to`. `partial` has the bytes below it in its word, if it is not the first of a word. Returns the same
// for the position after the last byte, to the threads of the first warp.
template <class Threads>
SERVAL_CALL uint64_t copy_into_stream(const StreamRing ring, uint64_t to, uint64_t count, const uint8_t* from, uint64_t partial, const Threads threads) {
    const StreamRange range(ring, to, count);
    const uint8_t* const from_end = from + count;
    const uint8_t* const from_line = from - range.begin;
    const bool is_aligned = reinterpret_cast<uint64_t>(from_line) % PAIR_BYTES == 0;
    const EndWord part(range, threads.rank());
    uint64_t word = 0;
    if (part.is_used()) {
#if SERVAL_CUDA
#pragma unroll
#endif
        for (unsigned i = 0; i < 8; i++)
            if (i < part.bytes()) word |= static_cast<uint64_t>(from_line[part.begin + i]) << (part.shift() + 8 * i);
        if (part.at < range.begin) word |= partial;
        store_relaxed(range.word(part.at), word);
    }
    for (uint32_t run = threads.rank() / WARP_SIZE * PAIRS_OUT * WARP_BYTES; run < range.last; run += threads.size() / WARP_SIZE * PAIRS_OUT * WARP_BYTES) {
        const uint32_t mine = run + threads.rank() % WARP_SIZE * PAIR_BYTES;
        WordPair pairs[PAIRS_OUT] = {};
#if SERVAL_CUDA
#pragma unroll
#endif
        for (unsigned i = 0; i < PAIRS_OUT; i++) {
            const uint32_t at = mine + i * WARP_BYTES;
            if (!range.has_pair(at)) continue;
            if (is_aligned) pairs[i] = private_load<WordPair>(from_line + at);
            else pairs[i] = {{word_at(from_line + at, from, from_end), word_at(from_line + at + 8, from, from_end)}};
        }
#if SERVAL_CUDA
#pragma unroll
#endif
        for (unsigned i = 0; i < PAIRS_OUT; i++)
            if (range.has_pair(mine + i * WARP_BYTES)) store_pair(range.word(mine + i * WARP_BYTES), pairs[i]);
    }
    return threads.value_of(range.end % 8 != 0 && part.is_used() && part.end == range.end, word);
}

}  // namespace detail
}  // namespace serval

#endif
