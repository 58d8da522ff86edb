// Weights as they lie in memory, made operands of a matrix product in registers.
//
// A thread holds 16 bytes of a row: PIECE weights whose inputs follow one another. Four of them, and the four threads
// of a quad, are the 16 inputs of one product; which input stands where does not matter as long as x is ordered alike.
//
// FP8: sign, exponent and mantissa go where a bfloat16 has them, and a multiplication by 2^120 puts the exponent's bias
// right, also of numbers below the normal ones. Bytes 0 and 2 of a word are one register, 1 and 3 another.
// NVFP4: bits likewise, 2^126 times too small. The group's scale, taken 2^118 times too large, and its product with a
// code are exact in bfloat16; 2^8 remains for the sum. Codes p and p + 4 of a word are a register.
#pragma once
#include "device.cuh"

constexpr int FP8 = 1, NVFP4 = 2;

template <int KIND>
constexpr int piece_of = KIND == FP8 ? 16 : 32;

__device__ __forceinline__ u32 times_bf16(u32 pair, u32 factors) {
    u32 product;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factors));
    return product;
}

// The first and third bytes of a word shifted left by 8, or its second and fourth unshifted, as two bfloat16.
__device__ __forceinline__ u32 e4m3_pair(u32 shifted, u32 four_right) {
    return times_bf16((shifted & 0x80008000u) | (four_right & 0x07f007f0u), 0x7b807b80u);
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
    const u32 firsts = times_bf16(e4m3_pair(bytes << 8, bytes << 4), 0x7a807a80u);
    const u32 seconds = times_bf16(e4m3_pair(bytes, bytes >> 4), 0x7a807a80u);
    upper_scales[0] = twice<0>(firsts), lower_scales[0] = twice<1>(firsts);
    upper_scales[1] = twice<0>(seconds), lower_scales[1] = twice<1>(seconds);
}

// In words of their own: compilers would mask again what was masked and then shifted.
__device__ __forceinline__ u32 keep(u32 bits, u32 mask) {
    asm("and.b32 %0, %0, %1;" : "+r"(bits) : "r"(mask));
    return bits;
}
// The bits of `there` where the mask has ones.
__device__ __forceinline__ u32 choose(u32 mask, u32 there, u32 elsewhere) {
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(bits) : "r"(mask), "r"(there), "r"(elsewhere));
    return bits;
}

// Eight codes times a scale, as codes p and p + 4 for p of 0 to 3. A bfloat16's sign is 6 bits further from its lowest
// bits of the exponent and highest of the mantissa than a code's: those of a word and of a word shifted by 6 are put
// together and then moved to their place. Nothing else is left if signs of every other code stand alone. Shifts to the
// left are multiplications, which have units of their own.
__device__ __forceinline__ void widen_codes(u32 (&pairs)[4], u32 word, u32 scales) {
    const u32 even = keep(word, 0x08080808), odd = keep(word, 0x80808080), right = word >> 6;
    pairs[0] = times_bf16(choose(0x00070007, word, even * 64) * 64, scales);
    pairs[1] = times_bf16(choose(0x00700070, word, odd * 64) * 4, scales);
    pairs[2] = times_bf16(choose(0x001c001c, right, even) * 16, scales);
    pairs[3] = times_bf16(choose(0x01c001c0, right, odd), scales);
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
