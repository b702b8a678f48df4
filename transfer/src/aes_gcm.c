/*
 * AES-GCM (NIST SP 800-38D) on 16 blocks at a time: four vectors of counters go through AES, and the ciphertext is multiplied with the powers 16
 * to 1 of the hash key and summed before it is reduced once. Values of GHASH are kept with their bytes reversed, and the powers are multiplied
 * by the inverse of x, so that a product of two values of 128 bits needs no shift (Gueron and Kounavis, 2010). Nothing depends on the key or
 * the bytes but the content of registers: no table, no branch.
 */
#define _GNU_SOURCE
#include "aes_gcm.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,vaes,vpclmulqdq,aes,pclmul,sse4.1")))
#define INLINE TARGET __attribute__((always_inline)) static inline

enum { BLOCK = 16, VECTOR = 64, LANES = 4, BATCH = 4 * VECTOR, POWERS = 16, ROUNDS_MAX = 14 };

struct aes_gcm {
    uint8_t rounds_keys[ROUNDS_MAX + 1][BLOCK] __attribute__((aligned(64)));
    /* The powers 16 to 1 of the hash key, then zeros: a vector that begins at any of them may be read. */
    uint8_t powers[POWERS + LANES][BLOCK] __attribute__((aligned(64)));
    int rounds;
};

bool aes_gcm_is_here(void) {
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    /* These tell what the operating system has enabled, too. Not every compiler has names for VAES (bit 9) and VPCLMULQDQ (bit 10). */
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul") &&
           __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 9 & 3) == 3;
}

INLINE __m128i load(const void *from) {
    return _mm_loadu_si128(from);
}

INLINE __m128i reversed(__m128i value) {
    return _mm_shuffle_epi8(value, _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

INLINE __m128i encrypt(const struct aes_gcm *key, __m128i block) {
    block = _mm_xor_si128(block, load(key->rounds_keys[0]));
    for (int i = 1; i < key->rounds; i++) block = _mm_aesenc_si128(block, load(key->rounds_keys[i]));
    return _mm_aesenclast_si128(block, load(key->rounds_keys[key->rounds]));
}

/* x^63 + x^62 + x^57 in the upper half: what is left of x^128 by the field's polynomial, with bits reversed. */
INLINE __m128i polynomial(void) {
    return _mm_set_epi64x((long long)0xc200000000000000, 1);
}

/* The product of two values of the field. */
INLINE __m128i multiply(__m128i a, __m128i b) {
    __m128i low = _mm_clmulepi64_si128(a, b, 0x00), high = _mm_clmulepi64_si128(a, b, 0x11);
    __m128i middle = _mm_xor_si128(_mm_clmulepi64_si128(a, b, 0x01), _mm_clmulepi64_si128(a, b, 0x10));
    middle = _mm_xor_si128(middle, _mm_xor_si128(_mm_shuffle_epi32(low, 0x4e), _mm_clmulepi64_si128(polynomial(), low, 0x01)));
    return _mm_xor_si128(high, _mm_xor_si128(_mm_shuffle_epi32(middle, 0x4e), _mm_clmulepi64_si128(polynomial(), middle, 0x01)));
}

/* A sum of products, not reduced, in four lanes. */
struct sum {
    __m512i low, middle, high;
};

INLINE void add_product(struct sum *sum, __m512i a, __m512i b) {
    sum->low = _mm512_xor_si512(sum->low, _mm512_clmulepi64_epi128(a, b, 0x00));
    sum->middle = _mm512_ternarylogic_epi64(sum->middle, _mm512_clmulepi64_epi128(a, b, 0x01), _mm512_clmulepi64_epi128(a, b, 0x10), 0x96);
    sum->high = _mm512_xor_si512(sum->high, _mm512_clmulepi64_epi128(a, b, 0x11));
}

INLINE __m128i reduce(const struct sum *sum) {
    __m512i by = _mm512_broadcast_i32x4(polynomial());
    __m512i middle = _mm512_ternarylogic_epi64(sum->middle, _mm512_shuffle_epi32(sum->low, 0x4e), _mm512_clmulepi64_epi128(by, sum->low, 0x01), 0x96);
    __m512i value = _mm512_ternarylogic_epi64(sum->high, _mm512_shuffle_epi32(middle, 0x4e), _mm512_clmulepi64_epi128(by, middle, 0x01), 0x96);
    __m256i half = _mm256_xor_si256(_mm512_castsi512_si256(value), _mm512_extracti64x4_epi64(value, 1));
    return _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

INLINE __m128i assist(__m128i before, __m128i made, int lane) {
    made = lane == 3 ? _mm_shuffle_epi32(made, 0xff) : _mm_shuffle_epi32(made, 0xaa);
    for (int i = 0; i < 3; i++) before = _mm_xor_si128(before, i == 0 ? _mm_slli_si128(before, 4) : i == 1 ? _mm_slli_si128(before, 8) : made);
    return before;
}

/* FIPS 197, section 5.2. */
TARGET static void expand(struct aes_gcm *key, const uint8_t *bytes, size_t len) {
    __m128i *to = (__m128i *)key->rounds_keys;
    to[0] = load(bytes);
    if (len == 16) {
        key->rounds = 10;
#define STEP(n, constant) to[n] = assist(to[n - 1], _mm_aeskeygenassist_si128(to[n - 1], constant), 3)
        STEP(1, 0x01), STEP(2, 0x02), STEP(3, 0x04), STEP(4, 0x08), STEP(5, 0x10), STEP(6, 0x20), STEP(7, 0x40), STEP(8, 0x80), STEP(9, 0x1b);
        STEP(10, 0x36);
#undef STEP
        return;
    }
    key->rounds = 14;
    to[1] = load(bytes + 16);
#define STEP(n, constant) to[n] = assist(to[n - 2], _mm_aeskeygenassist_si128(to[n - 1], constant), 3)
#define HALF(n) to[n] = assist(to[n - 2], _mm_aeskeygenassist_si128(to[n - 1], 0), 2)
    STEP(2, 0x01), HALF(3), STEP(4, 0x02), HALF(5), STEP(6, 0x04), HALF(7), STEP(8, 0x08), HALF(9), STEP(10, 0x10), HALF(11), STEP(12, 0x20), HALF(13);
    STEP(14, 0x40);
#undef STEP
#undef HALF
}

TARGET static void set_powers(struct aes_gcm *key) {
    /* The hash key times the inverse of x: a shift, and the polynomial for the bit that leaves. */
    __m128i hash = reversed(encrypt(key, _mm_setzero_si128()));
    uint64_t low = (uint64_t)_mm_cvtsi128_si64(hash), high = (uint64_t)_mm_extract_epi64(hash, 1), all = 0 - (high >> 63);
    high = (high << 1 | low >> 63) ^ (all & 0xc200000000000000);
    low = (low << 1) ^ (all & 1);
    __m128i first = _mm_set_epi64x((long long)high, (long long)low), power = first;
    for (int i = POWERS - 1; i >= 0; i--) {
        _mm_storeu_si128((__m128i *)key->powers[i], power);
        power = multiply(power, first);
    }
}

struct aes_gcm *aes_gcm_new(const uint8_t *bytes, size_t len) {
    struct aes_gcm *key = aligned_alloc(64, (sizeof *key + 63) / 64 * 64);
    if (!key) return NULL;
    memset(key, 0, sizeof *key);
    expand(key, bytes, len);
    set_powers(key);
    return key;
}

INLINE __m512i wide(const uint8_t *block) {
    return _mm512_broadcast_i32x4(load(block));
}

INLINE void four_through_aes(const __m512i *keys, int rounds, __m512i *blocks) {
    _Pragma("GCC unroll 4")
    for (int i = 0; i < 4; i++) blocks[i] = _mm512_xor_si512(blocks[i], keys[0]);
    _Pragma("GCC unroll 14")
    for (int round = 1; round < rounds; round++)
        _Pragma("GCC unroll 4")
        for (int i = 0; i < 4; i++) blocks[i] = _mm512_aesenc_epi128(blocks[i], keys[round]);
    _Pragma("GCC unroll 4")
    for (int i = 0; i < 4; i++) blocks[i] = _mm512_aesenclast_epi128(blocks[i], keys[rounds]);
}

/* For a number of rounds that the compiler knows. */
INLINE void seal(const struct aes_gcm *key, int rounds, const uint8_t *nonce, const uint8_t *more, size_t more_len, uint8_t *bytes, size_t len) {
    const __m512i swap = _mm512_broadcast_i32x4(_mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m512i four = _mm512_broadcast_i32x4(_mm_set_epi32(0, 0, 0, 4));
    __m512i keys[ROUNDS_MAX + 1], powers[4], blocks[4];
    _Pragma("GCC unroll 15")
    for (int i = 0; i <= rounds; i++) keys[i] = wide(key->rounds_keys[i]);
    _Pragma("GCC unroll 4")
    for (int i = 0; i < 4; i++) powers[i] = _mm512_load_si512(key->powers[4 * i]);
    uint8_t first[BLOCK] = {[15] = 1}, lengths[BLOCK];
    memcpy(first, nonce, 12);
    for (int i = 0; i < 8; i++) {
        lengths[7 - i] = (uint8_t)(((uint64_t)more_len * 8) >> (8 * i));
        lengths[15 - i] = (uint8_t)(((uint64_t)len * 8) >> (8 * i));
    }
    const size_t whole = len;
    /* With bytes reversed, the counter is the lowest 32 bits. The first one is for the tag. */
    __m512i counters = _mm512_add_epi32(_mm512_broadcast_i32x4(reversed(load(first))), _mm512_set_epi32(0, 0, 0, 4, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 1));
    __m128i hash = reversed(_mm_maskz_loadu_epi8((__mmask16)((1u << more_len) - 1), more));
    hash = multiply(hash, load(key->powers[POWERS - 1]));
    uint8_t *at = bytes;
    while (len > 0) {
        _Pragma("GCC unroll 4")
        for (int i = 0; i < 4; i++, counters = _mm512_add_epi32(counters, four)) blocks[i] = _mm512_shuffle_epi8(counters, swap);
        four_through_aes(keys, rounds, blocks);
        struct sum sum = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
        if (__builtin_expect(len >= BATCH, 1)) {
            _Pragma("GCC unroll 4")
            for (int i = 0; i < 4; i++) {
                blocks[i] = _mm512_xor_si512(blocks[i], _mm512_loadu_si512(at + i * VECTOR));
                _mm512_storeu_si512(at + i * VECTOR, blocks[i]);
                blocks[i] = _mm512_shuffle_epi8(blocks[i], swap);
            }
            blocks[0] = _mm512_xor_si512(blocks[0], _mm512_zextsi128_si512(hash));
            _Pragma("GCC unroll 4")
            for (int i = 0; i < 4; i++) add_product(&sum, blocks[i], powers[i]);
            at += BATCH;
            len -= BATCH;
        } else {
            /* The last block has power 1, and what is missing of it is zero. */
            const uint8_t *power = key->powers[POWERS - (len + BLOCK - 1) / BLOCK];
            _Pragma("GCC unroll 4")
            for (int i = 0; len > 0; i++) {
                __mmask64 mask = len >= VECTOR ? ~(__mmask64)0 : ((__mmask64)1 << len) - 1;
                blocks[i] = _mm512_maskz_mov_epi8(mask, _mm512_xor_si512(blocks[i], _mm512_maskz_loadu_epi8(mask, at)));
                _mm512_mask_storeu_epi8(at, mask, blocks[i]);
                blocks[i] = _mm512_shuffle_epi8(blocks[i], swap);
                if (i == 0) blocks[0] = _mm512_xor_si512(blocks[0], _mm512_zextsi128_si512(hash));
                add_product(&sum, blocks[i], _mm512_loadu_si512(power + i * VECTOR));
                size_t now = len < VECTOR ? len : VECTOR;
                at += now;
                len -= now;
            }
        }
        hash = reduce(&sum);
    }
    hash = multiply(_mm_xor_si128(hash, reversed(load(lengths))), load(key->powers[POWERS - 1]));
    _mm_storeu_si128((__m128i *)(bytes + whole), _mm_xor_si128(reversed(hash), encrypt(key, load(first))));
}

TARGET static void seal_10(const struct aes_gcm *key, const uint8_t *nonce, const uint8_t *more, size_t more_len, uint8_t *bytes, size_t len) {
    seal(key, 10, nonce, more, more_len, bytes, len);
}

TARGET static void seal_14(const struct aes_gcm *key, const uint8_t *nonce, const uint8_t *more, size_t more_len, uint8_t *bytes, size_t len) {
    seal(key, 14, nonce, more, more_len, bytes, len);
}

void aes_gcm_seal(const struct aes_gcm *key, const uint8_t nonce[12], const uint8_t *more, size_t more_len, uint8_t *bytes, size_t len) {
    (key->rounds == 10 ? seal_10 : seal_14)(key, nonce, more, more_len, bytes, len);
}

void aes_gcm_free(struct aes_gcm *key) {
    if (key) explicit_bzero(key, sizeof *key);
    free(key);
}

#else

bool aes_gcm_is_here(void) {
    return false;
}

struct aes_gcm *aes_gcm_new(const uint8_t *bytes, size_t len) {
    (void)bytes;
    (void)len;
    return NULL;
}

void aes_gcm_seal(const struct aes_gcm *key, const uint8_t nonce[12], const uint8_t *more, size_t more_len, uint8_t *bytes, size_t len) {
    (void)key, (void)nonce, (void)more, (void)more_len, (void)bytes, (void)len;
}

void aes_gcm_free(struct aes_gcm *key) {
    (void)key;
}

#endif
