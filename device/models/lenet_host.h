// LeNet-5 on one host thread: the SIMD form of lenet.h, compiled once per instruction set and chosen at run time.
//
// The library is built for baseline x86-64 (or baseline Arm), so that one binary runs everywhere; the wider variants
// carry their own target attribute. The choice reads CPUID directly: the compiler's own helpers (ifunc clones,
// __builtin_cpu_supports) need symbols of libgcc or the dynamic linker that are missing when the static library is
// linked by something other than g++, such as rustc.
#ifndef SERVAL_MODELS_LENET_HOST_H
#define SERVAL_MODELS_LENET_HOST_H

#include <atomic>

#include "lenet.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define SERVAL_LENET_ISA baseline
#define SERVAL_LENET_TARGET
#if defined(__aarch64__)
#define SERVAL_LENET_FMA(a, b, c) vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b))
#elif defined(__FMA__)
#define SERVAL_LENET_FMA(a, b, c) _mm_fmadd_ps((__m128)(a), (__m128)(b), (__m128)(c))
#else
#define SERVAL_LENET_FMA(a, b, c) ((a) * (b) + (c))
#endif
#define SERVAL_LENET_LANES 4
#define SERVAL_LENET_CONV1_GROUP 2
#define SERVAL_LENET_CONV2_COLUMNS 1
#include "lenet_simd.inc"

#if defined(__x86_64__)
#define SERVAL_LENET_ISA avx2
#define SERVAL_LENET_TARGET __attribute__((target("avx2,fma")))
#define SERVAL_LENET_FMA(a, b, c) _mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c))
#define SERVAL_LENET_LANES 8
#define SERVAL_LENET_CONV1_GROUP 2
#define SERVAL_LENET_CONV2_COLUMNS 1
#include "lenet_simd.inc"

#define SERVAL_LENET_ISA avx512
#define SERVAL_LENET_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define SERVAL_LENET_FMA(a, b, c) _mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c))
#define SERVAL_LENET_LANES 16
#define SERVAL_LENET_CONV1_GROUP 3
#define SERVAL_LENET_CONV2_COLUMNS 5
#include "lenet_simd.inc"
#endif

namespace serval_lenet::host {

enum class Isa : int { baseline = 1, avx2 = 2, avx512 = 3 };  // each implies the ones before it

// The best variant that this CPU supports and whose registers the host kernel saves.
inline Isa detect() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return Isa::baseline;
    const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1;
    if (!fma || !osxsave || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return Isa::baseline;
    unsigned saved, high;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
    if ((b & avx512) == avx512 && (saved & 0xe6) == 0xe6) return Isa::avx512;
    if ((b >> 5 & 1) && (saved & 6) == 6) return Isa::avx2;
#endif
    return Isa::baseline;
}

// One picture by one thread with a variant that the CPU is known to support.
inline void infer_with(Isa isa, const uint8_t* image, float* logits, Scratch& scratch) {
#if defined(__x86_64__)
    if (isa == Isa::avx512) return avx512::infer(image, logits, scratch);
    if (isa == Isa::avx2) return avx2::infer(image, logits, scratch);
#endif
    (void)isa;
    baseline::infer(image, logits, scratch);
}

inline std::atomic<int> chosen{0};  // 0 until the first picture; threads that race all store the same value

inline void infer(const uint8_t* image, float* logits, Scratch& scratch) {
    int isa = chosen.load(std::memory_order_relaxed);
    if (isa == 0) {
        isa = static_cast<int>(detect());
        chosen.store(isa, std::memory_order_relaxed);
    }
    infer_with(static_cast<Isa>(isa), image, logits, scratch);
}

}  // namespace serval_lenet::host

#endif
