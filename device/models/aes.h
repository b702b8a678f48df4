// AES-256 in counter mode for the kernel aes256_ctr (FIPS 197). One table of 1 KiB, which all threads of a block fill and share.
// Lookups depend on the key: a program that measures the times of memory accesses on this accelerator may learn about it.
#ifndef SERVAL_MODELS_AES_H
#define SERVAL_MODELS_AES_H

#include <cstdint>

#ifndef SERVAL_DEVICE
#ifdef __CUDACC__
#define SERVAL_DEVICE __device__
#else
#define SERVAL_DEVICE
#endif
#endif

namespace serval_aes {

constexpr uint32_t PIECE_HEADER_BYTES = 48;
constexpr unsigned ROUNDS = 14;

// The S-box combined with MixColumns for the first byte of a column; the other bytes rotate it.
struct Tables {
    uint32_t te[256];
    uint8_t sbox[256];
};

struct Schedule {
    uint32_t words[4 * (ROUNDS + 1)];
};

SERVAL_DEVICE inline uint32_t rotate(uint32_t word, unsigned bits) { return (word >> bits) | (word << (32 - bits)); }
SERVAL_DEVICE inline uint8_t twice(uint8_t byte) { return uint8_t((byte << 1) ^ ((byte >> 7) * 0x1b)); }

SERVAL_DEVICE inline uint8_t times(uint8_t a, uint8_t b) {
    uint8_t product = 0;
    for (unsigned bit = 0; bit < 8; bit++, a = twice(a))
        if (b >> bit & 1) product ^= a;
    return product;
}

// The inverse in the field of 256 elements (0 for 0) is the 254th power; the affine map follows.
SERVAL_DEVICE inline uint8_t substitute(uint8_t byte) {
    uint8_t power = 1;
    for (unsigned i = 0; i < 254; i++) power = times(power, byte);
    uint8_t result = power;
    for (unsigned i = 1; i < 5; i++) result ^= uint8_t((power << i) | (power >> (8 - i)));
    return uint8_t(result ^ 0x63);
}

SERVAL_DEVICE inline void make_tables(unsigned rank, unsigned size, Tables& tables) {
    for (unsigned byte = rank; byte < 256; byte += size) {
        const uint8_t s = substitute(uint8_t(byte)), two = twice(s);
        tables.sbox[byte] = s;
        tables.te[byte] = uint32_t(two) << 24 | uint32_t(s) << 16 | uint32_t(s) << 8 | uint32_t(uint8_t(two ^ s));
    }
}

SERVAL_DEVICE inline uint32_t load(const uint8_t* from) {
    return uint32_t(from[0]) << 24 | uint32_t(from[1]) << 16 | uint32_t(from[2]) << 8 | from[3];
}

SERVAL_DEVICE inline uint32_t substitute_word(const Tables& tables, uint32_t word) {
    return uint32_t(tables.sbox[word >> 24]) << 24 | uint32_t(tables.sbox[word >> 16 & 255]) << 16 |
           uint32_t(tables.sbox[word >> 8 & 255]) << 8 | tables.sbox[word & 255];
}

// By one thread.
SERVAL_DEVICE inline void expand(const uint8_t* key, const Tables& tables, Schedule& schedule) {
    uint32_t* words = schedule.words;
    for (unsigned i = 0; i < 8; i++) words[i] = load(key + 4 * i);
    uint8_t round = 1;
    for (unsigned i = 8; i < 4 * (ROUNDS + 1); i++) {
        uint32_t word = words[i - 1];
        if (i % 8 == 0) {
            word = substitute_word(tables, rotate(word, 24)) ^ uint32_t(round) << 24;
            round = twice(round);
        } else if (i % 8 == 4) {
            word = substitute_word(tables, word);
        }
        words[i] = words[i - 8] ^ word;
    }
}

SERVAL_DEVICE inline uint32_t column(const Tables& tables, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return tables.te[a >> 24] ^ rotate(tables.te[b >> 16 & 255], 8) ^ rotate(tables.te[c >> 8 & 255], 16) ^ rotate(tables.te[d & 255], 24);
}

SERVAL_DEVICE inline uint32_t last_column(const Tables& tables, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return substitute_word(tables, (a & 0xff000000u) | (b & 0xff0000u) | (c & 0xff00u) | (d & 0xffu));
}

// Combines up to 16 bytes with the key stream of one counter block.
SERVAL_DEVICE inline void combine(const Tables& tables, const Schedule& schedule, uint64_t counter, const uint8_t* in, uint8_t* out, uint32_t bytes) {
    const uint32_t* k = schedule.words;
    // The upper half of the counter is 0: no stream has 2^68 bytes.
    uint32_t s[4] = {k[0], k[1], uint32_t(counter >> 32) ^ k[2], uint32_t(counter) ^ k[3]}, t[4];
    for (unsigned round = 1; round < ROUNDS; round++) {
        k += 4;
        for (unsigned i = 0; i < 4; i++) t[i] = column(tables, s[i], s[(i + 1) % 4], s[(i + 2) % 4], s[(i + 3) % 4]) ^ k[i];
        for (unsigned i = 0; i < 4; i++) s[i] = t[i];
    }
    k += 4;
    for (unsigned i = 0; i < 4; i++) t[i] = last_column(tables, s[i], s[(i + 1) % 4], s[(i + 2) % 4], s[(i + 3) % 4]) ^ k[i];
    for (uint32_t i = 0; i < bytes; i++) out[i] = uint8_t(in[i] ^ (t[i / 4] >> (24 - 8 * (i % 4))));
}

}  // namespace serval_aes

#endif
