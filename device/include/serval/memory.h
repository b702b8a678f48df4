// Every access to shared memory that this library makes, and its only atomics.
//
// Another party writes a region while we read it. So each access is an atomic load or store of a naturally aligned
// unit: 64-bit words for headers, payloads and ring words, and 8- or 16-byte granules. There is no read-modify-write: the bus
// between the two sides may not support it. Private memory (staging, the kernel's own) is accessed with plain
// copies of constant size, which do not depend on the type of the objects there.
//
// 16-byte granules. x86-64: aligned 16-byte SSE moves are single-copy atomic on every processor that has AVX (Intel SDM
// vol. 3A, 9.1.1; AMD APM vol. 2, 7.3.2). CUDA: `.b128` accesses are one memory operation of the PTX model (PTX ISA 8.3, sm_70).
// Elsewhere rings use 8-byte granules.
#ifndef SERVAL_MEMORY_H
#define SERVAL_MEMORY_H

#include "platform.h"

#if SERVAL_CUDA
#include <cuda/atomic>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace serval {
namespace detail {

#if SERVAL_CUDA

template <class T>
using SystemAtomic = cuda::atomic_ref<T, cuda::thread_scope_system>;

SERVAL_INLINE uint64_t load_relaxed(const uint64_t* p) {
    return SystemAtomic<uint64_t>(*const_cast<uint64_t*>(p)).load(cuda::memory_order_relaxed);
}
SERVAL_INLINE uint64_t load_acquire(const uint64_t* p) {
    return SystemAtomic<uint64_t>(*const_cast<uint64_t*>(p)).load(cuda::memory_order_acquire);
}
SERVAL_INLINE void store_relaxed(uint64_t* p, uint64_t v) {
    SystemAtomic<uint64_t>(*p).store(v, cuda::memory_order_relaxed);
}
SERVAL_INLINE void store_release(uint64_t* p, uint64_t v) {
    SystemAtomic<uint64_t>(*p).store(v, cuda::memory_order_release);
}
// Orders what was stored before against later stores that are not ordered themselves.
SERVAL_INLINE void fence_release() { cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_system); }
// Orders earlier loads that are not ordered themselves against what is loaded later. A fence of every thread of the crew orders the rest of
// the block as well, through barriers.
SERVAL_INLINE void fence_acquire() { cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_system); }
// Two words, 16-byte aligned, in one trip over the bus; each is acquired, and they are in no order.
SERVAL_INLINE void load_acquire_both(const uint64_t* p, uint64_t& first, uint64_t& second) {
    asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(__cvta_generic_to_global(p)) : "memory");
}

#else

SERVAL_INLINE uint64_t load_relaxed(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
SERVAL_INLINE uint64_t load_acquire(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
SERVAL_INLINE void store_relaxed(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
SERVAL_INLINE void store_release(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
SERVAL_INLINE void fence_release() {
#if !defined(__SANITIZE_THREAD__)  // which has no fences
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}
SERVAL_INLINE void fence_acquire() {
#if !defined(__SANITIZE_THREAD__)
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
#endif
}

#endif

// The first `bytes` (at most 8) bytes at p as the low bytes of a word; the others are zero. Reads nothing beyond them.
SERVAL_INLINE uint64_t private_bytes(const uint8_t* p, unsigned bytes) {
    uint64_t v = 0;
#if SERVAL_CUDA
#pragma unroll 1
#endif
    for (unsigned i = 0; i < bytes; i++) v |= static_cast<uint64_t>(p[i]) << (8 * i);
    return v;
}
// Reads a word of private memory; on CUDA, which has no unaligned accesses, p must be naturally aligned.
template <class T>
SERVAL_INLINE T private_load(const void* p) {
    T v;
    __builtin_memcpy(&v, SERVAL_CUDA ? __builtin_assume_aligned(p, sizeof v) : p, sizeof v);
    return v;
}
// Writes a naturally aligned word of private memory, whatever the type of the object there.
template <class T>
SERVAL_INLINE void private_store(void* p, T v) {
    __builtin_memcpy(__builtin_assume_aligned(p, sizeof v), &v, sizeof v);
}

// Two neighbouring words, 16-byte aligned. Shared memory is accessed word by word, on CUDA with one instruction; the words are in no order.
struct alignas(16) WordPair {
    uint64_t word[2];
};
#if SERVAL_CUDA
// Does nothing where `wanted` is false: without a branch, so that a thread has many of these loads in flight.
SERVAL_INLINE void load_pair_if(bool wanted, const uint64_t* p, WordPair& pair) {
    asm volatile(
        "{ .reg .pred wanted;\n\t"
        "setp.ne.u32 wanted, %3, 0;\n\t"
        "@wanted ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2]; }"
        : "+l"(pair.word[0]), "+l"(pair.word[1])
        : "l"(__cvta_generic_to_global(p)), "r"(static_cast<uint32_t>(wanted))
        : "memory");
}
SERVAL_INLINE void store_pair(uint64_t* p, const WordPair& pair) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" : : "l"(__cvta_generic_to_global(p)), "l"(pair.word[0]), "l"(pair.word[1]) : "memory");
}
#else
SERVAL_INLINE void load_pair_if(bool wanted, const uint64_t* p, WordPair& pair) {
    if (wanted) pair = {{load_relaxed(p), load_relaxed(p + 1)}};
}
SERVAL_INLINE void store_pair(uint64_t* p, const WordPair& pair) {
    store_relaxed(p, pair.word[0]);
    store_relaxed(p + 1, pair.word[1]);
}
#endif

// A unit of a granule ring: data words and the sequence number of the message they belong to.
struct Granule8 {
    static constexpr unsigned BYTES = 8, WORDS = 1;
    uint32_t data[WORDS];
    uint32_t sequence;

    static SERVAL_INLINE Granule8 load(const uint8_t* p) {
        uint64_t v = load_relaxed(reinterpret_cast<const uint64_t*>(p));
        return {{static_cast<uint32_t>(v)}, static_cast<uint32_t>(v >> 32)};
    }
    SERVAL_INLINE void store(uint8_t* p) const {
        store_relaxed(reinterpret_cast<uint64_t*>(p), data[0] | static_cast<uint64_t>(sequence) << 32);
    }
};

#if SERVAL_CUDA || defined(__x86_64__)
#define SERVAL_HAS_GRANULE16 1
struct alignas(16) Granule16 {
    static constexpr unsigned BYTES = 16, WORDS = 3;
    uint32_t data[WORDS];
    uint32_t sequence;

    static SERVAL_INLINE Granule16 load(const uint8_t* p);
    SERVAL_INLINE void store(uint8_t* p) const;
};

#if SERVAL_CUDA

// Is it in the shared memory of the block?
SERVAL_INLINE bool is_shared(const void* p) { return __isShared(p); }
// Starts a copy of 16 bytes from global to shared memory, both aligned, that needs no register. The source must not change meanwhile, so an edge has to order it.
SERVAL_INLINE void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(__cvta_generic_to_global(from))
                 : "memory");
}
// Waits for this thread's copies.
SERVAL_INLINE void wait_for_copies() { asm volatile("cp.async.wait_all;" : : : "memory"); }

SERVAL_INLINE Granule16 Granule16::load(const uint8_t* p) {
    uint64_t low, high;
    asm volatile(
        "{ .reg .b128 unit;\n\t"
        "ld.relaxed.sys.global.b128 unit, [%2];\n\t"
        "mov.b128 {%0, %1}, unit; }"
        : "=l"(low), "=l"(high)
        : "l"(__cvta_generic_to_global(p))
        : "memory");
    return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high)},
            static_cast<uint32_t>(high >> 32)};
}
SERVAL_INLINE void Granule16::store(uint8_t* p) const {
    uint64_t low = data[0] | static_cast<uint64_t>(data[1]) << 32;
    uint64_t high = data[2] | static_cast<uint64_t>(sequence) << 32;
    asm volatile(
        "{ .reg .b128 unit;\n\t"
        "mov.b128 unit, {%1, %2};\n\t"
        "st.relaxed.sys.global.b128 [%0], unit; }"
        :
        : "l"(__cvta_generic_to_global(p)), "l"(low), "l"(high)
        : "memory");
}

#else

typedef uint32_t Vector16 __attribute__((vector_size(16), may_alias));
#if defined(__AVX__)
#define SERVAL_MOVE16 "vmovdqa"
#else
#define SERVAL_MOVE16 "movdqa"
#endif

// Inline assembly, because a compiler may split a vector access but not an instruction.
SERVAL_INLINE Granule16 Granule16::load(const uint8_t* p) {
    Vector16 v;
    asm volatile(SERVAL_MOVE16 " %1, %0" : "=x"(v) : "m"(*reinterpret_cast<const Vector16*>(p)));
    return {{v[0], v[1], v[2]}, v[3]};
}
SERVAL_INLINE void Granule16::store(uint8_t* p) const {
    Vector16 v = {data[0], data[1], data[2], sequence};
    asm volatile(SERVAL_MOVE16 " %1, %0" : "=m"(*reinterpret_cast<Vector16*>(p)) : "x"(v));
}

#endif
#else
#define SERVAL_HAS_GRANULE16 0
#endif

// Does this machine access 16-byte granules atomically?
inline SERVAL_DEVICE bool granule16_supported() {
#if SERVAL_CUDA
    return true;
#elif defined(__x86_64__)
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_AVX);
#else
    return false;
#endif
}

// Copies of payload between private and shared memory by one thread: words, and on x86-64 pieces of 32 bytes. Their
// order and atomicity do not matter, because the edges order a payload as a whole. Inline assembly, because concurrent writes by the other
// side would violate a compiler's assumptions about plain accesses. Under ThreadSanitizer words are used.
#if !SERVAL_CUDA && defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
constexpr unsigned PIECE_WORDS = 4;
// Of any alignment: memory of a kernel need not be aligned.
struct __attribute__((may_alias, packed)) Piece {
    uint64_t word[PIECE_WORDS];
};
#if defined(__AVX__)
#define SERVAL_MOVE_PIECE "vmovups %2, %0\n\tvmovups %3, %1"
#else
#define SERVAL_MOVE_PIECE "movups %2, %0\n\tmovups %3, %1"
#endif
SERVAL_INLINE void move_piece(void* to, const void* from) {
    Vector16 low, high;
    const Piece& source = *static_cast<const Piece*>(from);
    Piece& target = *static_cast<Piece*>(to);
    asm volatile(SERVAL_MOVE_PIECE : "=&x"(low), "=&x"(high) : "m"(source), "m"(source.word[2]));
    asm volatile(SERVAL_MOVE_PIECE : "=m"(target), "=m"(target.word[2]) : "x"(low), "x"(high));
}
SERVAL_INLINE unsigned move_pieces(void* to, const void* from, unsigned words) {
    unsigned i = 0;
    for (; i + PIECE_WORDS <= words; i += PIECE_WORDS)
        move_piece(static_cast<uint8_t*>(to) + 8 * i, static_cast<const uint8_t*>(from) + 8 * i);
    return i;
}
// Clears as many of the first `bytes` private bytes as make whole pieces; returns how many.
SERVAL_INLINE uint32_t clear_pieces(uint8_t* to, uint32_t bytes) {
    const Vector16 zero = {};
    uint32_t at = 0;
    for (; at + sizeof(Piece) <= bytes; at += sizeof(Piece)) {
        __builtin_memcpy(to + at, &zero, sizeof zero);
        __builtin_memcpy(to + at + sizeof zero, &zero, sizeof zero);
    }
    return at;
}
#else
#if !SERVAL_CUDA
SERVAL_INLINE unsigned move_pieces(void*, const void*, unsigned) { return 0; }
#endif
SERVAL_INLINE uint32_t clear_pieces(uint8_t*, uint32_t) { return 0; }
#endif
#if !SERVAL_CUDA
// `words` words of 8 bytes, from an aligned address.
SERVAL_INLINE void copy_words_out(uint8_t* to, const uint64_t* from, unsigned words) {
    for (unsigned i = move_pieces(to, from, words); i < words; i++) private_store(to + 8 * i, load_relaxed(from + i));
}
SERVAL_INLINE void copy_words_in(uint64_t* to, const uint8_t* from, unsigned words) {
    for (unsigned i = move_pieces(to, from, words); i < words; i++) store_relaxed(to + i, private_load<uint64_t>(from + 8 * i));
}
// `bytes` bytes from any address. Reads only words of 8 bytes that contain at least one of them; writes whole words.
SERVAL_INLINE void copy_bytes_out(uint8_t* to, const uint8_t* from, unsigned bytes) {
    const unsigned skew = reinterpret_cast<uintptr_t>(from) % 8, shift = 8 * skew;
    const uint64_t* word = reinterpret_cast<const uint64_t*>(from - skew);
    if (skew == 0) return copy_words_out(to, word, (bytes + 7) / 8);
    for (unsigned i = move_pieces(to, from, bytes / 8); 8 * i < bytes; i++) {
        uint64_t value = load_relaxed(word + i) >> shift;
        if (8 * i + 8 - skew < bytes) value |= load_relaxed(word + i + 1) << (64 - shift);
        private_store(to + 8 * i, value);
    }
}
#endif

// Keeps the host compiler from moving granule accesses (inline assembly) across; the processor's ordering is provided by the
// ordered load or store next to it.
SERVAL_INLINE void granule_barrier() {
#if !SERVAL_CUDA
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
#endif
}

}  // namespace detail
}  // namespace serval

#endif
