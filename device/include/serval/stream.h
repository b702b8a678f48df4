// The two ends of a stream ring: bytes between the engine and a block, in one direction. The layout and the protocol are explained in
// crates/mqueue/src/abi.rs and byte_ring.rs.
//
// Only whole words are accessed. The writer keeps the last, partial word privately and stores it again when more bytes follow, so no access
// modifies shared memory in place; it never writes a word with bytes that were not read. The reader ignores bytes beyond the head.
//
// Neither end trusts the other: a head or tail that is impossible is CORRUPT, and every access stays inside the ring.
//
// Ordering edges: BYTES_PUBLISH (bytes before the head), BYTES_RELEASE (copies before the tail), BYTES_END (the last head before the end).
#ifndef SERVAL_STREAM_H
#define SERVAL_STREAM_H

#include "ring.h"

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

// Writes the first `bytes` (1 to 8) bytes of a word to private memory of any alignment.
SERVAL_INLINE void put_bytes(uint8_t* to, uint64_t v, unsigned bytes) {
#if SERVAL_CUDA
    const uint64_t address = reinterpret_cast<uint64_t>(to);
    if (bytes == 8 && address % 8 == 0) {
        private_store(to, v);
    } else if (bytes == 8 && address % 4 == 0) {
        private_store(to, static_cast<uint32_t>(v));
        private_store(to + 4, static_cast<uint32_t>(v >> 32));
    } else {
#pragma unroll 1
        for (unsigned i = 0; i < bytes; i++) to[i] = static_cast<uint8_t>(v >> (8 * i));
    }
#else
    __builtin_memcpy(to, &v, bytes);
#endif
}
// The first `bytes` (1 to 8) bytes of private memory of any alignment, as the low bytes of a word.
SERVAL_INLINE uint64_t get_bytes(const uint8_t* from, unsigned bytes) {
#if SERVAL_CUDA
    const uint64_t address = reinterpret_cast<uint64_t>(from);
    if (bytes == 8 && address % 8 == 0) return private_load<uint64_t>(from);
    if (bytes == 8 && address % 4 == 0) {
        return private_load<uint32_t>(from) | static_cast<uint64_t>(private_load<uint32_t>(from + 4)) << 32;
    }
    return private_bytes(from, bytes);
#else
    uint64_t v = 0;
    __builtin_memcpy(&v, from, bytes);
    return v;
#endif
}

// The reading end.
struct StreamReader {
    StreamRing ring;
    uint64_t tail;      // bytes read
    uint64_t head;      // as last seen
    uint64_t unheard;   // bytes read since the engine was notified

    SERVAL_INLINE void restart() { tail = head = unheard = 0; }

    // By one thread: whether there are bytes; updates `head`.
    SERVAL_INLINE Look look() {
        if (head != tail) return Look::FOUND;
        // EDGE BYTES_PUBLISH (acquire half)
        const uint64_t seen = load_acquire(ring.word(SERVAL_STREAM_HEAD));
        if (seen - tail > ring.capacity) return Look::CORRUPT;
        head = seen;
        return head != tail ? Look::FOUND : Look::NONE;
    }
    // By one thread: the status with which the stream has ended, once all its bytes were read; 0 before that.
    SERVAL_INLINE uint64_t ended(Look& found) {
        // EDGE BYTES_END (acquire half): the head after the end.
        const uint64_t end = load_acquire(ring.word(SERVAL_STREAM_HEAD_END));
        found = end ? look() : Look::NONE;
        return found == Look::NONE ? end : 0;
    }
    // By one thread: whether there are bytes, or an end, or the ring is broken; updates `head`.
    SERVAL_INLINE bool is_ready() {
        Look found = look();
        if (found != Look::NONE) return true;
        return ended(found) != 0 || found != Look::NONE;
    }
    // By all threads of the block, with the same arguments: copies the next bytes, of which there are `count`.
    inline SERVAL_DEVICE void copy(uint8_t* to, uint64_t count) const {
        const unsigned shift = static_cast<unsigned>(tail % 8);
        uint64_t done = 0;
        if (shift) {
            done = 8 - shift < count ? 8 - shift : count;
            if (leader()) put_bytes(to, load_relaxed(ring.at(tail)) >> (8 * shift), static_cast<unsigned>(done));
        }
        copy_words(to + done, tail + done, count - done);
    }
    // By one thread, after all copies: gives the room back.
    SERVAL_INLINE void release(uint64_t count) {
        tail += count;
        unheard += count;
        // EDGE BYTES_RELEASE (release half)
        store_release(ring.word(SERVAL_STREAM_TAIL), tail);
    }

  private:
    // From a position that is a multiple of 8.
    inline SERVAL_DEVICE void copy_words(uint8_t* to, uint64_t from, uint64_t count) const {
#if SERVAL_CUDA
        // Each thread has several loads in flight: one takes a trip over the bus.
        constexpr unsigned LOADS = 4;
        const uint64_t stride = 8 * block_size();
        uint64_t at = 8 * block_rank();
        for (; at + (LOADS - 1) * stride + 8 <= count; at += LOADS * stride) {
            uint64_t words[LOADS];
#pragma unroll
            for (unsigned i = 0; i < LOADS; i++) words[i] = load_relaxed(ring.at(from + at + i * stride));
#pragma unroll
            for (unsigned i = 0; i < LOADS; i++) put_bytes(to + at + i * stride, words[i], 8);
        }
        for (; at < count; at += stride) {
            const uint64_t left = count - at;
            put_bytes(to + at, load_relaxed(ring.at(from + at)), left < 8 ? static_cast<unsigned>(left) : 8);
        }
#else
        while (count >= 8) {
            const uint64_t until_end = ring.capacity - (from & (ring.capacity - 1));
            const uint64_t run = (until_end < count ? until_end : count) & ~uint64_t{7};
            const uint64_t* words = ring.at(from);
            const unsigned whole = static_cast<unsigned>(run / 8);
            for (unsigned i = move_pieces(to, words, whole); i < whole; i++) put_bytes(to + 8 * i, load_relaxed(words + i), 8);
            to += run, from += run, count -= run;
        }
        if (count) put_bytes(to, load_relaxed(ring.at(from)), static_cast<unsigned>(count));
#endif
    }
};

// The writing end.
struct StreamWriter {
    StreamRing ring;
    uint64_t head;     // bytes written
    uint64_t tail;     // as last seen
    uint64_t partial;  // the bytes of the last word that were written, if it is not whole

    SERVAL_INLINE void restart() { head = tail = partial = 0; }

    // Bytes for which there is room as last seen. The word at the tail may have bytes that were not read.
    SERVAL_INLINE uint64_t known_room() const { return ring.capacity - (head - (tail & ~uint64_t{7})); }

    // By one thread: whether there is room; updates `tail`.
    SERVAL_INLINE Look reserve(uint64_t wanted) {
        if (known_room() >= wanted) return Look::FOUND;
        // EDGE BYTES_RELEASE (acquire half)
        const uint64_t seen = load_acquire(ring.word(SERVAL_STREAM_TAIL));
        if (head - seen > ring.capacity || seen - tail > head - tail) return Look::CORRUPT;
        tail = seen;
        return known_room() ? Look::FOUND : Look::NONE;
    }
    // By one thread: the status with which the engine takes nothing more; 0 while it does.
    SERVAL_INLINE uint64_t refused() const {
        // EDGE BYTES_END (acquire half)
        return load_acquire(ring.word(SERVAL_STREAM_TAIL_END));
    }

    // By all threads of the block, with the same arguments: writes bytes for which there is room.
    inline SERVAL_DEVICE void write(const uint8_t* from, uint64_t count) const {
        const unsigned shift = static_cast<unsigned>(head % 8);
        uint64_t done = 0;
        if (shift) {
            done = 8 - shift < count ? 8 - shift : count;
            if (leader()) store_relaxed(ring.at(head), partial | get_bytes(from, static_cast<unsigned>(done)) << (8 * shift));
        }
        write_words(head + done, from + done, count - done);
    }
    // By one thread, after all writes: publishes them. `from` and `count` are those of write().
    SERVAL_INLINE void publish(const uint8_t* from, uint64_t count) {
        const unsigned old = static_cast<unsigned>(head % 8), now = static_cast<unsigned>((head + count) % 8);
        const bool same = head / 8 == (head + count) / 8;
        if (now == 0) partial = 0;
        else if (same) partial |= get_bytes(from, static_cast<unsigned>(count)) << (8 * old);
        else partial = get_bytes(from + count - now, now);
        head += count;
        // EDGE BYTES_PUBLISH (release half)
        store_release(ring.word(SERVAL_STREAM_HEAD), head);
    }
    // By one thread: nothing more is written.
    SERVAL_INLINE void end(uint64_t status) {
        // EDGE BYTES_END (release half)
        store_release(ring.word(SERVAL_STREAM_HEAD_END), status);
    }

  private:
    // To a position that is a multiple of 8.
    inline SERVAL_DEVICE void write_words(uint64_t to, const uint8_t* from, uint64_t count) const {
#if SERVAL_CUDA
        for (uint64_t at = 8 * block_rank(); at < count; at += 8 * block_size()) {
            const uint64_t left = count - at;
            store_relaxed(ring.at(to + at), get_bytes(from + at, left < 8 ? static_cast<unsigned>(left) : 8));
        }
#else
        while (count >= 8) {
            const uint64_t until_end = ring.capacity - (to & (ring.capacity - 1));
            const uint64_t run = (until_end < count ? until_end : count) & ~uint64_t{7};
            uint64_t* words = ring.at(to);
            const unsigned whole = static_cast<unsigned>(run / 8);
            for (unsigned i = move_pieces(words, from, whole); i < whole; i++) store_relaxed(words + i, get_bytes(from + 8 * i, 8));
            to += run, from += run, count -= run;
        }
        if (count) store_relaxed(ring.at(to), get_bytes(from, static_cast<unsigned>(count)));
#endif
    }
};

}  // namespace detail
}  // namespace serval

#endif
