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
#include "stream_copy.h"

namespace serval {
namespace detail {

#if !SERVAL_CUDA
// Writes the first `bytes` (1 to 8) bytes of a word to private memory of any alignment.
SERVAL_INLINE void put_bytes(uint8_t* to, uint64_t v, unsigned bytes) { __builtin_memcpy(to, &v, bytes); }
// The first `bytes` (1 to 8) bytes of private memory of any alignment, as the low bytes of a word.
SERVAL_INLINE uint64_t get_bytes(const uint8_t* from, unsigned bytes) {
    uint64_t v = 0;
    __builtin_memcpy(&v, from, bytes);
    return v;
}
#endif

// The reading end.
struct StreamReader {
    StreamRing ring;
    uint64_t tail;      // bytes read
    uint64_t head;      // as last seen
    uint64_t unheard;   // bytes read since the engine was notified

    SERVAL_INLINE void restart() { tail = head = unheard = 0; }

    // By one thread: whether there are bytes; updates `head`. If there are none, `end` is the status with which the stream has ended, or 0.
    SERVAL_INLINE Look look(uint64_t& end) {
        end = 0;
        if (head != tail) return Look::FOUND;
#if SERVAL_CUDA
        uint64_t seen, seen_end;
        // EDGE BYTES_PUBLISH (acquire half)
        load_acquire_both(ring.word(SERVAL_STREAM_HEAD), seen, seen_end);
        const Look found = learn(seen);
#else
        const Look found = learn_head();
        // EDGE BYTES_END (acquire half)
        const uint64_t seen_end = found == Look::NONE ? load_acquire(ring.word(SERVAL_STREAM_HEAD_END)) : 0;
#endif
        if (found != Look::NONE || seen_end == 0) return found;
        // The head after the end.
        const Look last = learn_head();
        if (last == Look::NONE) end = seen_end;
        return last;
    }
    // By one thread: whether there are bytes, or an end, or the ring is broken; updates `head`.
    SERVAL_INLINE bool is_ready() {
        uint64_t end;
        return look(end) != Look::NONE || end != 0;
    }
    // By all threads of the block, with the same arguments: copies the next bytes, of which there are `count`.
    inline SERVAL_DEVICE void copy(uint8_t* to, uint64_t count) const {
#if SERVAL_CUDA
        copy_out_of_stream(ring, tail, count, to, BlockThreads());
#else
        const unsigned shift = static_cast<unsigned>(tail % 8);
        uint64_t done = 0;
        if (shift) {
            done = 8 - shift < count ? 8 - shift : count;
            put_bytes(to, load_relaxed(ring.at(tail)) >> (8 * shift), static_cast<unsigned>(done));
        }
        copy_words(to + done, tail + done, count - done);
#endif
    }
    // By one thread, after all copies: the bytes were read; release() gives the room back.
    SERVAL_INLINE void take(uint64_t count) {
        tail += count;
        unheard += count;
    }
    SERVAL_INLINE void release() {
        // EDGE BYTES_RELEASE (release half)
        store_release(ring.word(SERVAL_STREAM_TAIL), tail);
    }

  private:
    SERVAL_INLINE Look learn(uint64_t seen) {
        if (seen - tail > ring.capacity) return Look::CORRUPT;
        head = seen;
        return head != tail ? Look::FOUND : Look::NONE;
    }
    SERVAL_INLINE Look learn_head() {
        // EDGE BYTES_PUBLISH (acquire half)
        return learn(load_acquire(ring.word(SERVAL_STREAM_HEAD)));
    }
#if !SERVAL_CUDA
    // From a position that is a multiple of 8.
    void copy_words(uint8_t* to, uint64_t from, uint64_t count) const {
        while (count >= 8) {
            const uint64_t until_end = ring.capacity - (from & (ring.capacity - 1));
            const uint64_t run = (until_end < count ? until_end : count) & ~uint64_t{7};
            const uint64_t* words = ring.at(from);
            const unsigned whole = static_cast<unsigned>(run / 8);
            for (unsigned i = move_pieces(to, words, whole); i < whole; i++) put_bytes(to + 8 * i, load_relaxed(words + i), 8);
            to += run, from += run, count -= run;
        }
        if (count) put_bytes(to, load_relaxed(ring.at(from)), static_cast<unsigned>(count));
    }
#endif
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

    // By one thread: whether there is room; updates `tail`. `end` is the status with which the engine takes nothing more, or 0.
    SERVAL_INLINE Look reserve(uint64_t wanted, uint64_t& end) {
        end = 0;
        const bool is_known = known_room() >= wanted;
#if SERVAL_CUDA
        // The block looks at the end while it writes.
        if (is_known) return Look::FOUND;
        uint64_t seen;
        // EDGE BYTES_RELEASE (acquire half)
        load_acquire_both(ring.word(SERVAL_STREAM_TAIL), seen, end);
#else
        end = refused();
        if (is_known) return Look::FOUND;
        // EDGE BYTES_RELEASE (acquire half)
        const uint64_t seen = load_acquire(ring.word(SERVAL_STREAM_TAIL));
#endif
        if (head - seen > ring.capacity || seen - tail > head - tail) return Look::CORRUPT;
        tail = seen;
        return known_room() ? Look::FOUND : Look::NONE;
    }
    // By one thread: the status with which the engine takes nothing more; 0 while it does.
    SERVAL_INLINE uint64_t refused() const {
        // EDGE BYTES_END (acquire half)
        return load_acquire(ring.word(SERVAL_STREAM_TAIL_END));
    }
    // As refused(), for a look that something else hides: nothing is acquired.
    SERVAL_INLINE uint64_t peek_refused() const { return load_relaxed(ring.word(SERVAL_STREAM_TAIL_END)); }

    // By all threads of the block, with the same arguments: writes bytes for which there is room. Returns, to the leader, the bytes of the last word if it
    // is not whole, for publish().
    inline SERVAL_DEVICE uint64_t write(const uint8_t* from, uint64_t count) const {
#if SERVAL_CUDA
        return copy_into_stream(ring, head, count, from, partial, BlockThreads());
#else
        const unsigned shift = static_cast<unsigned>(head % 8);
        uint64_t done = 0;
        if (shift) {
            done = 8 - shift < count ? 8 - shift : count;
            store_relaxed(ring.at(head), partial | get_bytes(from, static_cast<unsigned>(done)) << (8 * shift));
        }
        write_words(head + done, from + done, count - done);
        const unsigned now = static_cast<unsigned>((head + count) % 8);
        if (now == 0) return 0;
        if (head / 8 == (head + count) / 8) return partial | get_bytes(from, static_cast<unsigned>(count)) << (8 * shift);
        return get_bytes(from + count - now, now);
#endif
    }
    // By one thread, after all writes: publishes `count` bytes, `last` being the result of write().
    SERVAL_INLINE void publish(uint64_t count, uint64_t last) {
        partial = last;
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
#if !SERVAL_CUDA
    // To a position that is a multiple of 8.
    void write_words(uint64_t to, const uint8_t* from, uint64_t count) const {
        while (count >= 8) {
            const uint64_t until_end = ring.capacity - (to & (ring.capacity - 1));
            const uint64_t run = (until_end < count ? until_end : count) & ~uint64_t{7};
            uint64_t* words = ring.at(to);
            const unsigned whole = static_cast<unsigned>(run / 8);
            for (unsigned i = move_pieces(words, from, whole); i < whole; i++) store_relaxed(words + i, get_bytes(from + 8 * i, 8));
            to += run, from += run, count -= run;
        }
        if (count) store_relaxed(ring.at(to), get_bytes(from, static_cast<unsigned>(count)));
    }
#endif
};

}  // namespace detail
}  // namespace serval

#endif
