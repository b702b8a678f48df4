// Face verification: does a client's picture show the same face as the picture in the database? The numeric core of the
// built-in `faces` kernel.
//
// The method is Ahonen, Hadid, Pietikainen, "Face description with local binary patterns" (PAMI 2006), as in the face
// verification services of GPUnet and Lynx:
//
// - a picture is 32x32 grey u8, row by row from the top;
// - the code of a pixel has one bit for each of its 8 neighbours, set when neighbour >= pixel; bit 0 is the upper left
//   neighbour, then clockwise (bit 1 above, 3 right, 5 below, 7 left). Outside the picture the nearest pixel is used, so
//   every pixel has a code;
// - the picture is 4x4 cells of 8x8 pixels, each described by the histogram of its 64 codes (256 bins);
// - the distance of two pictures is the chi-square distance of their histograms, summed over the cells:
//   sum (p - s)^2 / (p + s), from 0 (the same codes) to 2048 (no code in common). It is symmetric, and invariant under changes
//   of brightness or contrast that keep the order of the grey values.
//
// Because the counts of a cell add up to 64, the distance is 2048 - 4 * sum p*s/(p+s). Each p*s/(p+s) is rounded to a
// multiple of 2^-19 and summed in integers: the distance is the same bit for bit whatever the order of the sum, the
// number of threads and the compiler, and within 0.004 of the exact value.
#ifndef SERVAL_MODELS_FACES_H
#define SERVAL_MODELS_FACES_H

#include <cstdint>
#include <cstring>

#ifndef SERVAL_DEVICE
#ifdef __CUDACC__
#define SERVAL_DEVICE __device__
#else
#define SERVAL_DEVICE
#endif
#endif

namespace serval_faces {

constexpr unsigned SIDE = 32;
constexpr unsigned PICTURE_BYTES = SIDE * SIDE;
constexpr unsigned LABEL_BYTES = 12;
constexpr unsigned CELLS = 16, CELL_PIXELS = 64;
constexpr unsigned MAX_THREADS = 1024;
constexpr float MAX_DISTANCE = 2.0f * PICTURE_BYTES;

// Accepts the same picture under other light and with sensor noise, rejects another face. Measured by
// tools/train/make_faces.py: none of 4950 pairs of different synthetic faces are accepted (0.06 % of pairs of real
// photographs, skimage.data.lfw_subset) and no true pair is rejected with noise of up to 2 grey levels (0.5 % of the
// photographs at 3). It recognises a picture, not a person: another pose counts as another face.
constexpr float DEFAULT_THRESHOLD = 800.0f;

struct Result {
    bool match;      // distance <= threshold
    float distance;  // 0 .. MAX_DISTANCE
};

// Working memory of one verification: block-shared on a GPU, per block on a host. Needs no initialisation.
struct Scratch {
    alignas(64) uint32_t codes[2][PICTURE_BYTES / 4];  // bytes, cell after cell: probe, stored
#ifdef __CUDACC__
    uint32_t sums[MAX_THREADS + 32];
#else
    union {
        uint32_t sums[MAX_THREADS + 32];
        alignas(64) uint8_t counts[4][2][256];  // histograms of four neighbouring cells: probe, stored
        alignas(64) uint8_t padded[SIDE + 2][64];  // a picture with its edges repeated, columns at 16..47
    };
#endif
};

namespace detail {

constexpr unsigned FRACTION_BITS = 19;

// p*s/(p+s) as a multiple of 2^-19, rounded; p, s <= 64 and not both 0.
SERVAL_DEVICE constexpr uint32_t common(uint32_t p, uint32_t s) {
    return ((p * s << FRACTION_BITS) + (p + s) / 2) / (p + s);
}

// 2048 - 4 * sum * 2^-19
SERVAL_DEVICE inline float distance_of(uint32_t sum) {
    constexpr unsigned shift = FRACTION_BITS - 2;
    return float((uint32_t(MAX_DISTANCE) << shift) - sum) * (1.0f / (1u << shift));
}

// Where the code of pixel (x, y) is stored.
SERVAL_DEVICE constexpr unsigned place(unsigned x, unsigned y) { return (y / 8 * 4 + x / 8) * 64 + y % 8 * 8 + x % 8; }

}  // namespace detail

namespace shared {  // the cooperative form: each function does the share of thread `rank` of `size`

SERVAL_DEVICE inline void encode(unsigned rank, unsigned size, const uint8_t* picture, uint8_t* codes) {
    for (unsigned i = rank; i < PICTURE_BYTES; i += size) {
        const unsigned x = i % SIDE, y = i / SIDE;
        const uint8_t* row = picture + y * SIDE;
        const uint8_t* above = y > 0 ? row - SIDE : row;
        const uint8_t* below = y < SIDE - 1 ? row + SIDE : row;
        const unsigned left = x > 0 ? x - 1 : x, right = x < SIDE - 1 ? x + 1 : x;
        const uint8_t pixel = row[x];
        codes[detail::place(x, y)] = uint8_t((above[left] >= pixel) | (above[x] >= pixel) << 1 | (above[right] >= pixel) << 2 |
                                             (row[right] >= pixel) << 3 | (below[right] >= pixel) << 4 |
                                             (below[x] >= pixel) << 5 | (below[left] >= pixel) << 6 | (row[left] >= pixel) << 7);
    }
}

// 0x80 in each byte of `word` that equals the byte repeated in `pattern`, else 0.
SERVAL_DEVICE inline uint32_t equal_bytes(uint32_t word, uint32_t pattern) {
    const uint32_t diff = word ^ pattern;
    return ~((((diff & 0x7f7f7f7fu) + 0x7f7f7f7fu) | diff) | 0x7f7f7f7fu);
}

SERVAL_DEVICE inline unsigned count_marks(uint32_t marks) { return (marks >> 7) * 0x01010101u >> 24; }

// Sum of common() over the bins whose first pixel is in this thread's share. A thread counts its pixel's code in both
// cells by comparing, so no histogram is built and no atomic is needed.
SERVAL_DEVICE inline uint32_t compare(unsigned rank, unsigned size, const Scratch& scratch) {
    uint32_t sum = 0;
    for (unsigned i = rank; i < PICTURE_BYTES; i += size) {
        const uint32_t* probe = scratch.codes[0] + i / CELL_PIXELS * 16;
        const uint32_t* stored = scratch.codes[1] + i / CELL_PIXELS * 16;
        const unsigned own = i / 4 % 16, byte = i % 4 * 8;
        const uint32_t pattern = (probe[own] >> byte & 0xff) * 0x01010101u;
        unsigned before = 0, in_probe = 0, in_stored = 0;
        for (unsigned w = 0; w < 16; ++w) {
            const uint32_t marks = equal_bytes(probe[w], pattern);
            in_probe += count_marks(marks);
            before |= w < own ? marks : w == own ? marks & ((1u << byte) - 1) : 0;
            in_stored += count_marks(equal_bytes(stored[w], pattern));
        }
        if (before == 0) sum += detail::common(in_probe, in_stored);
    }
    return sum;
}

template <class Sync>
SERVAL_DEVICE float distance(unsigned rank, unsigned size, Sync sync, const uint8_t* probe, const uint8_t* stored, Scratch& scratch) {
    encode(rank, size, probe, reinterpret_cast<uint8_t*>(scratch.codes[0]));
    encode(rank, size, stored, reinterpret_cast<uint8_t*>(scratch.codes[1]));
    sync();
    scratch.sums[rank] = compare(rank, size, scratch);
    sync();
    uint32_t sum = 0;
    const unsigned lanes = size < 32 ? size : 32;  // two steps: `lanes` threads add up strides, then all add up those
    if (rank < lanes) {
        for (unsigned i = rank; i < size; i += lanes) sum += scratch.sums[i];
        scratch.sums[MAX_THREADS + rank] = sum;
    }
    sync();
    sum = 0;
    for (unsigned i = 0; i < lanes; ++i) sum += scratch.sums[MAX_THREADS + i];
    return detail::distance_of(sum);
}

}  // namespace shared

#ifndef __CUDACC__
namespace host {  // one thread: vectors for the codes, histograms and a table of common() for the distance

struct CommonTable {
    uint32_t at[65][65];
    constexpr CommonTable() : at() {
        for (uint32_t p = 1; p <= 64; ++p)
            for (uint32_t s = 1; s <= 64; ++s) at[p][s] = detail::common(p, s);
    }
};
alignas(64) inline constexpr CommonTable COMMON;

typedef uint8_t Bytes __attribute__((vector_size(16)));

inline Bytes load(const uint8_t* from) {
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

inline void encode(const uint8_t* picture, uint8_t (&padded)[SIDE + 2][64], uint8_t* codes) {
    for (unsigned y = 0; y < SIDE + 2; ++y) {
        const uint8_t* row = picture + (y == 0 ? 0 : y > SIDE ? SIDE - 1 : y - 1) * SIDE;
        memcpy(padded[y] + 16, row, SIDE);
        padded[y][15] = row[0];
        padded[y][16 + SIDE] = row[SIDE - 1];
    }
    for (unsigned y = 0; y < SIDE; ++y)
        for (unsigned x = 0; x < SIDE; x += 16) {
            const uint8_t *above = padded[y] + 16 + x, *row = above + 64, *below = row + 64;
            const Bytes pixel = load(row);
            const auto bit = [pixel](const uint8_t* neighbour, uint8_t value) {
                return (Bytes)(load(neighbour) >= pixel) & (Bytes{} + value);
            };
            const Bytes code = bit(above - 1, 1) | bit(above, 2) | bit(above + 1, 4) | bit(row + 1, 8) |
                               bit(below + 1, 16) | bit(below, 32) | bit(below - 1, 64) | bit(row - 1, 128);
            memcpy(codes + detail::place(x, y), &code, 8);
            memcpy(codes + detail::place(x + 8, y), reinterpret_cast<const uint8_t*>(&code) + 8, 8);
        }
}

inline float distance(const uint8_t* probe, const uint8_t* stored, Scratch& scratch) {
    uint8_t* codes[2] = {reinterpret_cast<uint8_t*>(scratch.codes[0]), reinterpret_cast<uint8_t*>(scratch.codes[1])};
    encode(probe, scratch.padded, codes[0]);
    encode(stored, scratch.padded, codes[1]);
    uint32_t sums[4] = {};
    for (unsigned band = 0; band < PICTURE_BYTES; band += 4 * CELL_PIXELS) {
        memset(scratch.counts, 0, sizeof scratch.counts);
        // Four cells of both pictures in turn: eight independent histograms hide the latency of each increment.
        for (unsigned i = band; i < band + CELL_PIXELS; ++i)
#pragma GCC unroll 4
            for (unsigned cell = 0; cell < 4; ++cell) {
                ++scratch.counts[cell][0][codes[0][i + cell * CELL_PIXELS]];
                ++scratch.counts[cell][1][codes[1][i + cell * CELL_PIXELS]];
            }
        for (unsigned i = band; i < band + CELL_PIXELS; ++i)
#pragma GCC unroll 4
            for (unsigned cell = 0; cell < 4; ++cell) {
                const uint8_t code = codes[0][i + cell * CELL_PIXELS];
                uint8_t& in_probe = scratch.counts[cell][0][code];
                sums[cell] += COMMON.at[in_probe][scratch.counts[cell][1][code]];
                in_probe = 0;  // each bin once
            }
    }
    return detail::distance_of(sums[0] + sums[1] + sums[2] + sums[3]);
}

}  // namespace host
#endif

// Compares two pictures.
//
// All `size` <= MAX_THREADS threads of a block call it together, each with its own `rank` < `size` and the same other
// arguments; `sync()` is their barrier (empty for a block of one). `probe` and `stored` are PICTURE_BYTES long and the
// caller's own copies. Every thread gets the same result.
template <class Sync>
SERVAL_DEVICE Result verify(unsigned rank, unsigned size, Sync sync, const uint8_t* probe, const uint8_t* stored, float threshold,
                            Scratch& scratch) {
#ifndef __CUDACC__
    if (size == 1) {
        const float distance = host::distance(probe, stored, scratch);
        return {distance <= threshold, distance};
    }
#endif
    const float distance = shared::distance(rank, size, sync, probe, stored, scratch);
    return {distance <= threshold, distance};
}

}  // namespace serval_faces

#endif
