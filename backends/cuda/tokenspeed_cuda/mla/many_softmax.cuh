// Softmax over tiles of keys as they come, on the fragments of a warpgroup (see wgmma.cuh): a thread has parts of two
// rows, `row` and `row + 8`, and the four threads of a quad a whole row. Weights are relative to a reference of the row
// that moves only when a weight would be more than 2^8: so sums are rarely scaled again, and float32 has room for it.
#pragma once
#include "device.cuh"
#include "many_memory.cuh"

constexpr float LN2 = 0.6931471805599453f;
constexpr float NOTHING = -1e30f;  // the reference of a row that has seen no key; finite, so that differences are

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_of(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// To units of log 2.
__device__ __forceinline__ void scale_scores(float (&scores)[32], float scale) {
#pragma unroll
    for (int i = 0; i < 32; i++) scores[i] *= scale;
}

// Takes out keys from `seen` on, counted from the start of the tile; the second count is that of row + 8.
__device__ __forceinline__ void mask_scores(float (&scores)[32], int seen, int seen_below) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int key = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (key >= (i / 2 % 2 ? seen_below : seen)) scores[i] = __uint_as_float(0xff800000u);
    }
}

// Scores become weights, relative to `next`, and their sums over this thread's keys.
__device__ __forceinline__ void weigh(float (&scores)[32], const float (&reference)[2], float (&next)[2],
                                      float (&sums)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = NOTHING;
#pragma unroll
        for (int i = 2 * half; i < 32; i += 4) top = fmaxf(top, fmaxf(scores[i], scores[i + 1]));
        top = quad_max(top);
        next[half] = top > reference[half] + 8.0f ? top : reference[half];
        sums[half] = 0.0f;
#pragma unroll
        for (int i = 2 * half; i < 32; i += 4) {
            scores[i] = exp2_of(scores[i] - next[half]);
            scores[i + 1] = exp2_of(scores[i + 1] - next[half]);
            sums[half] += scores[i] + scores[i + 1];
        }
    }
}

// Weights as bfloat16, four operands of 16 keys; and into a slice of shared memory for the other warpgroup.
__device__ __forceinline__ void round_weights(const float (&scores)[32], u32 (&weights)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; i++) weights[i / 4][i % 4] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
}

__device__ __forceinline__ u32 weights_address(const u8* slice, int k) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    return shared_address(slice) + row * 128 + ((2 * k + lane / 16) ^ (row % 8)) * 16;
}

__device__ __forceinline__ void store_weights(u8* slice, const u32 (&weights)[4][4]) {
#pragma unroll
    for (int k = 0; k < 4; k++)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(weights_address(slice, k)), "r"(weights[k][0]), "r"(weights[k][1]), "r"(weights[k][2]),
                       "r"(weights[k][3])
                     : "memory");
}

__device__ __forceinline__ void load_weights(const u8* slice, u32 (&weights)[4][4]) {
#pragma unroll
    for (int k = 0; k < 4; k++)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(weights[k][0]), "=r"(weights[k][1]), "=r"(weights[k][2]), "=r"(weights[k][3])
                     : "r"(weights_address(slice, k))
                     : "memory");
}

// What was summed so far becomes relative to `next`.
__device__ __forceinline__ void move_reference(float (&attended)[128], float (&total)[2],
                                               float (&reference)[2], const float (&next)[2]) {
    const float factor[2] = {exp2_of(reference[0] - next[0]), exp2_of(reference[1] - next[1])};
#pragma unroll
    for (int i = 0; i < 128; i++) attended[i] *= factor[i / 2 % 2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] *= factor[half];
        reference[half] = next[half];
    }
}

// Values past the end of a sequence may be NaN, which no weight of zero takes away.
__device__ __forceinline__ void clear_rows(u8 (*keys)[SLICE_BYTES], int from) {
    for (int i = threadIdx.x % 128; i < (KEYS - from) * LATENT / 8; i += 128)
        *reinterpret_cast<uint4*>(keys[i / 8 % 8] + (from + i / 64) * 128 + i % 8 * 16) = uint4{0, 0, 0, 0};
}
