// Scores to weights in the registers of a warpgroup, with what the rows so far gave.
#pragma once

#include "prefill_shared.cuh"

__device__ float infinity() { return __int_as_float(0x7f800000); }
__device__ float lowest() { return NEGATIVE ? infinity() : -infinity(); }  // of products, as they rank as scores

__device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ float top_of(float a, float b) { return NEGATIVE ? fminf(a, b) : fmaxf(a, b); }

// A weight is 2^(score - reference), scores in units of log 2. The reference of a row is its highest score at first
// and changes only when a score exceeds it by GROWTH: weights stay far from overflow, and sums and results, which must
// follow the reference, are rarely touched.
constexpr float GROWTH = 8;

struct Softmax {
    float reference[2] = {-infinity(), -infinity()}, sum[2] = {0, 0};  // of rows lane / 4 and 8 below, sum: our columns

    // Scores of two rows to weights, in place. `decay`: what earlier sums and results are to be multiplied by.
    template <int N>
    __device__ void weigh(float (&s)[N], float log2_scale, float (&decay)[2]) {
        float best[2][2], base[2], even_odd[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
        for (int i = 0; i < N; i++) {
            float& top = best[i / 2 % 2][i % 2];
            top = i < 4 ? s[i] : top_of(top, s[i]);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = top_of(best[h][0], best[h][1]);
            top = top_of(top, __shfl_xor_sync(WARP, top, 1));
            top = top_of(top, __shfl_xor_sync(WARP, top, 2)) * log2_scale;
            float next = top - reference[h] > GROWTH ? top : reference[h];
            base[h] = next == -infinity() ? 0.0f : next;
            decay[h] = exp2_fast(reference[h] - base[h]);
            reference[h] = next;
        }
#pragma unroll
        for (int i = 0; i < N; i++) s[i] = exp2_fast(fmaf(s[i], log2_scale, -base[i / 2 % 2]));
#pragma unroll
        for (int i = 0; i < N; i++) even_odd[i / 2 % 2][i % 2] += s[i];
#pragma unroll
        for (int h = 0; h < 2; h++) sum[h] = fmaf(sum[h], decay[h], even_odd[h][0] + even_odd[h][1]);
    }
};

// Row i of a fragment sees the keys before `seen` + i if causal, those before `seen` if not.
template <int N>
__device__ void mask(float (&s)[N], int seen, int thread) {
    int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int limit = seen - column + (CAUSAL ? row + 8 * h : 0);
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            if (8 * i >= limit) s[4 * i + 2 * h] = lowest();
            if (8 * i + 1 >= limit) s[4 * i + 2 * h + 1] = lowest();
        }
    }
}
