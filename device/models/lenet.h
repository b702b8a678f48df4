// LeNet-5 inference: one 28x28 grey picture in, ten logits out. The numeric core of the built-in `lenet` kernel.
//
// One source, two compilers. nvcc builds the cooperative form, in which the threads of a block share the work of one
// picture; the host compiler builds that too, and besides it the SIMD form of lenet_host.h for a block of one thread.
//
// Network (LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", Proc. IEEE 1998,
// with ReLU and max pooling), 0.83 MFLOP a picture:
//
//     28x28 u8 / 255, padded by 2 -> conv 5x5 x6 -> pool 2x2 -> 14x14x6
//                                 -> conv 5x5 x16 -> pool 2x2 -> 5x5x16 = 400 -> 120 -> 84 -> 10 logits
//
// Every form adds the same terms in the same order: a convolution starts from its bias and takes (input, ky, kx) in
// rising order; the first full layer sums four runs of 100 inputs and then bias + ((r0 + r1) + (r2 + r3)); the others
// start from their bias. With fused multiply-add (CUDA, AVX2, AVX-512, Arm) the logits are therefore equal bit for bit,
// whatever the number of threads and the vector width; without it they differ in the last places (relative 1e-5).
#ifndef SERVAL_MODELS_LENET_H
#define SERVAL_MODELS_LENET_H

#include <cstdint>

#include "lenet_weights.h"

#ifndef SERVAL_DEVICE
#ifdef __CUDACC__
#define SERVAL_DEVICE __device__
#else
#define SERVAL_DEVICE
#endif
#endif

namespace serval_lenet {

constexpr unsigned INPUT_BYTES = 784;  // 28 rows of 28 pixels, 0 paper .. 255 ink
constexpr unsigned NUMBER_BYTES = 8;   // a request may end with a number of the client, which the reply repeats at its end
constexpr unsigned OUTPUT_BYTES = 44;  // the kernel's reply: u8 digit, 3 zero bytes, 10 float32 LE logits
constexpr unsigned CLASSES = 10;

// The padded picture is kept as 32 rows; in each the 16 even columns come first, then the 16 odd ones, both with 4
// spare floats. So neighbouring *pooled* outputs read neighbouring words: whole vectors on a CPU, no bank conflict on
// a GPU, and 2x2 pooling is a plain maximum of four accumulators.
constexpr unsigned INPUT_ROWS = 32, INPUT_STRIDE = 40, ODD_COLUMNS = 20;
constexpr unsigned MAP1_STRIDE = 16, MAP1_PLANE = 14 * MAP1_STRIDE;  // 14 columns used
constexpr unsigned FC1_RUNS = 4, FC1_RUN = 100, FC1_WIDTH = 128, FC2_WIDTH = 96, FC3_WIDTH = 16;

// Working memory of one inference, 14 KiB: block-shared on a GPU, per block on a host. Needs no initialisation and
// carries nothing from one picture to the next.
struct Scratch {
    alignas(64) float input[INPUT_ROWS * INPUT_STRIDE];
    alignas(64) float map1[6 * MAP1_PLANE];  // [channel][y][x]
    alignas(64) float map2[400];             // [y][x][channel]
    alignas(64) float runs[FC1_RUNS * FC1_WIDTH];
    alignas(64) float hidden1[FC1_WIDTH];
    alignas(64) float hidden2[FC2_WIDTH];
};

// Index of the largest logit: the digit. The first one wins a tie.
SERVAL_DEVICE inline uint8_t digit(const float* logits) {
    uint8_t best = 0;
    for (uint8_t i = 1; i < CLASSES; ++i)
        if (logits[i] > logits[best]) best = i;
    return best;
}

// A GPU hides the latency of a weight only by loading more of them meanwhile: its loops are unrolled this far, and
// weights are loaded several at a time.
#ifdef __CUDACC__
#define SERVAL_LENET_UNROLL(n) _Pragma(SERVAL_LENET_TEXT(unroll n))
#define SERVAL_LENET_TEXT(text) #text
#else
#define SERVAL_LENET_UNROLL(n)
#endif

namespace shared {  // the cooperative form: each function does the share of thread `rank` of `size`

SERVAL_DEVICE inline float larger(float a, float b) { return a > b ? a : b; }

// sum += a * b, rounded once if the target can: explicit, so that it does not depend on compiler flags.
SERVAL_DEVICE inline void add_product(float& sum, float a, float b) {
#if defined(__CUDACC__)
    sum = __fmaf_rn(a, b, sum);
#elif defined(__FMA__) || defined(__aarch64__)
    sum = __builtin_fmaf(a, b, sum);
#else
    sum += a * b;
#endif
}

// Maximum of the four sums under one pooling window, and ReLU.
SERVAL_DEVICE inline float pooled(const float* sums) {
    return larger(larger(larger(sums[0], sums[1]), larger(sums[2], sums[3])), 0.0f);
}

SERVAL_DEVICE inline void load_input(unsigned rank, unsigned size, const uint8_t* image, float* input) {
    for (unsigned i = rank; i < INPUT_ROWS * INPUT_STRIDE; i += size) {
        const unsigned row = i / INPUT_STRIDE, at = i % INPUT_STRIDE, odd = at >= ODD_COLUMNS;
        const unsigned y = row - 2, x = 2 * (at - odd * ODD_COLUMNS) + odd - 2;  // outside wraps to a large number
        input[i] = y < 28 && x < 28 ? float(image[y * 28 + x]) * (1.0f / 255.0f) : 0.0f;
    }
}

// N neighbouring weights; `from` is aligned to all of them.
template <unsigned N>
struct alignas(4 * N) Pack {
    float at[N];
    SERVAL_DEVICE explicit Pack(const float* from) : Pack(*reinterpret_cast<const Pack*>(from)) {}
};

// Two or four weights of the first full layer. Its 200 KiB are read once per picture, bypassing the L1 cache of a GPU, so that
// they do not evict all the other weights, which fit.
template <unsigned N>
SERVAL_DEVICE Pack<N> streamed(const float* from) {
#ifdef __CUDACC__
    if constexpr (N == 4) {
        const float4 value = __ldcg(reinterpret_cast<const float4*>(from));
        return Pack<N>(&value.x);
    } else {
        const float2 value = __ldcg(reinterpret_cast<const float2*>(from));
        return Pack<N>(&value.x);
    }
#else
    return Pack<N>(from);
#endif
}

// Adds one input map under one 2x2 pooling window to the sums of N channels: sums[channel] are the window's upper left,
// upper right, lower left and lower right. `patch` is the first row of its 6x6 inputs, the next row is STRIDE further,
// column j is at column(j). `taps` are the 25 taps of the first channel, WIDTH floats apart.
template <unsigned N, unsigned STRIDE, unsigned WIDTH, class Column>
SERVAL_DEVICE void convolve(const float* patch, Column column, const float* taps, float (&sums)[N][4]) {
    float upper[6], lower[6];
    SERVAL_LENET_UNROLL(6)
    for (unsigned j = 0; j < 6; ++j) upper[j] = patch[column(j)];
    SERVAL_LENET_UNROLL(5)
    for (unsigned ky = 0; ky < 5; ++ky) {
        SERVAL_LENET_UNROLL(6)
        for (unsigned j = 0; j < 6; ++j) lower[j] = patch[(ky + 1) * STRIDE + column(j)];
        SERVAL_LENET_UNROLL(5)
        for (unsigned kx = 0; kx < 5; ++kx) {
            const Pack<N> weight(taps + (ky * 5 + kx) * WIDTH);
            SERVAL_LENET_UNROLL(N)
            for (unsigned c = 0; c < N; ++c) {
                add_product(sums[c][0], weight.at[c], upper[kx]);
                add_product(sums[c][1], weight.at[c], upper[kx + 1]);
                add_product(sums[c][2], weight.at[c], lower[kx]);
                add_product(sums[c][3], weight.at[c], lower[kx + 1]);
            }
        }
        SERVAL_LENET_UNROLL(6)
        for (unsigned j = 0; j < 6; ++j) upper[j] = lower[j];
    }
}

template <unsigned N>
SERVAL_DEVICE void start(const float* bias, float (&sums)[N][4]) {
    for (unsigned c = 0; c < N; ++c)
        for (unsigned k = 0; k < 4; ++k) sums[c][k] = bias[c];
}

// A thread takes one pooled position and N of the 6 channels.
template <unsigned N>
SERVAL_DEVICE void conv1(unsigned rank, unsigned size, const float* input, float* map1) {
    for (unsigned unit = rank; unit < 196 * (6 / N); unit += size) {
        const unsigned x = unit % 14, y = unit / 14 % 14, first = unit / 196 * N;
        const auto column = [](unsigned j) { return j % 2 * ODD_COLUMNS + j / 2; };
        float sums[N][4];
        start(weights::CONV1_BIAS + first, sums);
        convolve<N, INPUT_STRIDE, 6>(input + 2 * y * INPUT_STRIDE + x, column, &weights::CONV1[0][first], sums);
        for (unsigned c = 0; c < N; ++c) map1[(first + c) * MAP1_PLANE + y * MAP1_STRIDE + x] = pooled(sums[c]);
    }
}

// A thread takes one pooled position and N of the 16 channels; neighbouring threads take neighbouring channels.
template <unsigned N>
SERVAL_DEVICE void conv2(unsigned rank, unsigned size, const float* map1, float* map2) {
    constexpr unsigned groups = 16 / N;
    for (unsigned unit = rank; unit < 25 * groups; unit += size) {
        const unsigned first = unit % groups * N, position = unit / groups, x = position % 5, y = position / 5;
        const auto column = [](unsigned j) { return j; };
        float sums[N][4];
        start(weights::CONV2_BIAS + first, sums);
        SERVAL_LENET_UNROLL(1)
        for (unsigned plane = 0; plane < 6; ++plane)
            convolve<N, MAP1_STRIDE, 16>(map1 + plane * MAP1_PLANE + 2 * y * MAP1_STRIDE + 2 * x, column,
                                         &weights::CONV2[plane * 25][first], sums);
        for (unsigned c = 0; c < N; ++c) map2[position * 16 + first + c] = pooled(sums[c]);
    }
}

// A thread takes one run of inputs and N neighbouring outputs.
template <unsigned N>
SERVAL_DEVICE void fc1_runs(unsigned rank, unsigned size, const float* map2, float* runs) {
    constexpr unsigned groups = FC1_WIDTH / N;
    for (unsigned unit = rank; unit < FC1_RUNS * groups; unit += size) {
        const unsigned first = unit % groups * N, run = unit / groups;
        float sums[N] = {};
        SERVAL_LENET_UNROLL(25)
        for (unsigned i = run * FC1_RUN; i < (run + 1) * FC1_RUN; ++i) {
            const Pack<N> weight = streamed<N>(&weights::FC1[i][first]);
            SERVAL_LENET_UNROLL(N)
            for (unsigned k = 0; k < N; ++k) add_product(sums[k], weight.at[k], map2[i]);
        }
        for (unsigned k = 0; k < N; ++k) runs[run * FC1_WIDTH + first + k] = sums[k];
    }
}

SERVAL_DEVICE inline void fc1_join(unsigned rank, unsigned size, const float* runs, float* hidden1) {
    for (unsigned out = rank; out < FC1_WIDTH; out += size) {
        const float* r = runs + out;
        const float sum = (r[0] + r[FC1_WIDTH]) + (r[2 * FC1_WIDTH] + r[3 * FC1_WIDTH]);
        hidden1[out] = larger(weights::FC1_BIAS[out] + sum, 0.0f);
    }
}

SERVAL_DEVICE inline void fc2(unsigned rank, unsigned size, const float* hidden1, float* hidden2) {
    for (unsigned out = rank; out < FC2_WIDTH; out += size) {
        float sum = weights::FC2_BIAS[out];
        SERVAL_LENET_UNROLL(40)
        for (unsigned i = 0; i < 120; ++i) add_product(sum, weights::FC2[i][out], hidden1[i]);
        hidden2[out] = larger(sum, 0.0f);
    }
}

SERVAL_DEVICE inline void fc3(unsigned rank, unsigned size, const float* hidden2, float* logits) {
    for (unsigned out = rank; out < CLASSES; out += size) {
        float sum = weights::FC3_BIAS[out];
        SERVAL_LENET_UNROLL(42)
        for (unsigned i = 0; i < 84; ++i) add_product(sum, weights::FC3[i][out], hidden2[i]);
        logits[out] = sum;
    }
}

// The whole network by `size` cooperating threads; arguments as for serval_lenet::infer().
template <class Sync>
SERVAL_DEVICE void infer(unsigned rank, unsigned size, Sync sync, const uint8_t* image, float* logits, Scratch& scratch) {
    load_input(rank, size, image, scratch.input);
    sync();
    conv1<2>(rank, size, scratch.input, scratch.map1);
    sync();
    const bool large = size >= 200;  // enough threads for twice the units of half the work
    if (large)
        conv2<2>(rank, size, scratch.map1, scratch.map2);
    else
        conv2<4>(rank, size, scratch.map1, scratch.map2);
    sync();
    if (large)
        fc1_runs<2>(rank, size, scratch.map2, scratch.runs);
    else
        fc1_runs<4>(rank, size, scratch.map2, scratch.runs);
    sync();
    fc1_join(rank, size, scratch.runs, scratch.hidden1);
    sync();
    fc2(rank, size, scratch.hidden1, scratch.hidden2);
    sync();
    fc3(rank, size, scratch.hidden2, logits);
    sync();
}

#undef SERVAL_LENET_UNROLL
#undef SERVAL_LENET_TEXT

}  // namespace shared
}  // namespace serval_lenet

#ifndef __CUDACC__
#include "lenet_host.h"
#endif

namespace serval_lenet {

// Classifies one picture.
//
// All `size` threads of a block call it together, each with its own `rank` < `size`, the same `image`, `logits` and
// `scratch`; `sync()` is their barrier (empty for a block of one). `image` is INPUT_BYTES long and the caller's own
// copy, `logits` has room for CLASSES floats. On return every thread may read all logits.
template <class Sync>
SERVAL_DEVICE void infer(unsigned rank, unsigned size, Sync sync, const uint8_t* image, float* logits, Scratch& scratch) {
#ifndef __CUDACC__
    if (size == 1) return host::infer(image, logits, scratch);
#endif
    shared::infer(rank, size, sync, image, logits, scratch);
}

}  // namespace serval_lenet

#endif
