// Weights as they lie in memory, made operands of a matrix product in registers.
//
// A thread holds 16 bytes of a row: PIECE weights whose inputs follow one another. Four of them, and the four threads
// of a quad, are the 16 inputs of one product; which input stands where does not matter as long as x is in the same
// order. So nothing ever moves between threads, and a word of weights becomes operands by shifts and masks alone.
//
// FP8: sign, exponent and mantissa go where a bfloat16 has them, and a multiplication by 2^120 puts the exponent's bias
// right, also of numbers below the normal ones. Bytes 0 and 2 of a word are one register, 1 and 3 another.
// NVFP4: bits likewise, 2^126 times too small. The group's scale, taken 2^118 times too large, and its product with a
// code are exact in bfloat16; 2^8 remains for the sum. Codes p and p + 4 of a word are a register.
#pragma once
#include "device.cuh"

constexpr int BF16 = 0, FP8 = 1, NVFP4 = 2;

template <int KIND>
constexpr int piece_of = KIND == BF16 ? 8 : KIND == FP8 ? 16 : 32;

__device__ __forceinline__ u32 times_bf16(u32 pair, u32 factors) {
    u32 product;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factors));
    return product;
}

__device__ __forceinline__ u32 both(float value) { return pack_bf16(value, value); }

// Scales, which never change.
__device__ __forceinline__ u32 load_short(const void* p) {
    u16 bits;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(bits) : "l"(p));
    return bits;
}
__device__ __forceinline__ u32 load_word(const void* p) {
    u32 bits;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(bits) : "l"(p));
    return bits;
}

constexpr u32 E4M3_BIAS = 0x7b807b80u;  // 2^120, twice

// The first and third bytes of a word shifted left by 8, or its second and fourth unshifted, as two bfloat16.
__device__ __forceinline__ u32 e4m3_pair(u32 shifted, u32 four_right, u32 bias) {
    return times_bf16((shifted & 0x80008000u) | (four_right & 0x07f007f0u), bias);
}

// Codes p and p + 4 of a word, p being 0 or 1, times a scale: a code times 2^12 + 2^6 has its sign and its other bits
// where a bfloat16 has them.
template <int P>
__device__ __forceinline__ u32 e2m1_pair(u32 word, u32 scales) {
    return times_bf16((word & (P ? 0x00f000f0u : 0x000f000fu)) * (P ? 0x104u : 0x1040u) & 0x81c081c0u, scales);
}

// One half of a pair, twice, which is a mere way to read an operand.
template <int HALF>
__device__ __forceinline__ u32 twice(u32 pair) {
    u32 both;
    if constexpr (HALF) asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};}" : "=r"(both) : "r"(pair));
    else asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};}" : "=r"(both) : "r"(pair));
    return both;
}

// The first and the second scale of a thread's 32 codes in two rows, each twice and 2^118 times too large.
__device__ __forceinline__ void widen_scales(u32 upper, u32 lower, u32 (&upper_scales)[2], u32 (&lower_scales)[2]) {
    const u32 bytes = lower * 0x10000u + upper;
    const u32 firsts = times_bf16(e4m3_pair(bytes << 8, bytes << 4, E4M3_BIAS), 0x7a807a80u);
    const u32 seconds = times_bf16(e4m3_pair(bytes, bytes >> 4, E4M3_BIAS), 0x7a807a80u);
    upper_scales[0] = twice<0>(firsts), lower_scales[0] = twice<1>(firsts);
    upper_scales[1] = twice<0>(seconds), lower_scales[1] = twice<1>(seconds);
}

// Operand `step` of 4 * PIECE inputs: of words of a row, in registers 0 and 2, and of the row 8 below, in 1 and 3.
// Scales: of NVFP4 the two of a row, widened; of FP8 the first is 2^120, where no scale is to come with it.
template <int KIND>
__device__ __forceinline__ void operand(
    u32 (&a)[4], const u32 (&upper)[4], const u32 (&lower)[4], const u32 (&upper_scales)[2],
    const u32 (&lower_scales)[2], int step) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32(&words)[4] = half ? lower : upper;
        if constexpr (KIND == BF16) {
            a[half] = words[2 * step], a[half + 2] = words[2 * step + 1];
        } else if constexpr (KIND == FP8) {
            const u32 bias = (half ? lower_scales : upper_scales)[0];
            a[half] = e4m3_pair(words[step] << 8, words[step] << 4, bias);
            a[half + 2] = e4m3_pair(words[step], words[step] >> 4, bias);
        } else {
            const u32 word = step % 2 ? words[step / 2] >> 8 : words[step / 2];
            const u32 scale = (half ? lower_scales : upper_scales)[step / 4];
            a[half] = e2m1_pair<0>(word, scale), a[half + 2] = e2m1_pair<1>(word, scale);
        }
    }
}

// PIECE inputs of x, in pairs, put in the order of the operands: those of each step are two registers.
template <int KIND>
__device__ __forceinline__ void order_like_weights(u32 (&x)[piece_of<KIND> / 2]) {
    if constexpr (KIND == FP8) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const u32 a = x[i], b = x[i + 1];
            x[i] = __byte_perm(a, b, 0x5410), x[i + 1] = __byte_perm(a, b, 0x7632);
        }
    } else if constexpr (KIND == NVFP4) {
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const u32 a = x[i], b = x[i + 1], c = x[i + 2], d = x[i + 3];
            x[i] = __byte_perm(a, c, 0x5410), x[i + 1] = __byte_perm(a, c, 0x7632);
            x[i + 2] = __byte_perm(b, d, 0x5410), x[i + 3] = __byte_perm(b, d, 0x7632);
        }
    }
}
