// Results, and how blocks add up those of a sequence that they share.
#pragma once
#include "few_parts.cuh"

// Sums are kept as threads hold them: groups of four numbers, (row, column), (row, column + STEP) and the same of
// row + 8.
constexpr int STEP = NARROW && FP8 ? 2 : 1;
constexpr int GROUPS = LATENT * N / 4;

struct Place {
    int row, column;
};
// Where group `i` of the adder `thread` lies; there are GROUPS / ADDERS groups a thread.
__device__ __forceinline__ Place place_of(int i, int thread) {
    const int lane = thread % 32, warp = thread / 32;
    if constexpr (NARROW) {
        const int column = FP8 ? i / 2 * 16 + lane % 4 * 4 + i % 2 : i * 8 + lane % 4 * 2;
        return {lane / 4, 64 * warp + column};
    } else {
        return {16 * (warp % 4) + lane / 4, 256 * (warp / 4) + i * 8 + lane % 4 * 2};
    }
}

// Parts of a row's latents, by warp or warpgroup, each with a power of two of its own.
constexpr int PIECES = NARROW ? 8 : 2;

struct Results {
    u16* attended;   // [batch, ROWS, LATENT]
    float* lse;      // [batch, ROWS]
    uint4* parts;    // [2 · blocks, GROUPS / ADDERS / 2, ADDERS]: two groups as float16
    float4* states;  // [2 · blocks, PIECES, N / 2]: reference and sum of the exponentials of a row and of row + 8
    int* arrived;    // [batch], zero between calls
    const float* value_scale;  // in shared memory

    __device__ void write(int sequence, Place at, float4 o) const {
        u16* to = attended + (u64(sequence) * ROWS + at.row) * LATENT + at.column;
        if constexpr (STEP == 1) {
            if (at.row < ROWS) *reinterpret_cast<u32*>(to) = pack_bf16(o.x, o.y);
            if (at.row + 8 < ROWS) *reinterpret_cast<u32*>(to + 8 * LATENT) = pack_bf16(o.z, o.w);
        } else {
            if (at.row < ROWS) to[0] = float_to_bf16(o.x), to[STEP] = float_to_bf16(o.y);
            if (at.row + 8 < ROWS) to[8 * LATENT] = float_to_bf16(o.z), to[8 * LATENT + STEP] = float_to_bf16(o.w);
        }
    }
    __device__ void write_lse(int sequence, int row, float reference, float sum) const {
        if (row < ROWS) {
            lse[u64(sequence) * ROWS + row] =
                sum == 0 ? minus_infinity() : 0.6931471805599453f * (reference + log_two(sum));
        }
    }
    __device__ float factor(float sum) const { return sum == 0 ? 0 : *value_scale / sum; }
};

// Sums of a run for other blocks, as float16 times a power of two by which the greatest of a row is about 2^12. The
// reference makes up for it. `o(i)` is group i of this thread, whose rows have `reference` and `sum`.
template <class Groups>
__device__ __forceinline__ void keep_sums(uint4* parts, int (&exponents)[2], int adder, Groups o) {
    float most[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < GROUPS / ADDERS; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            most[r] = fmaxf(most[r], fmaxf(fabsf(o(i)[2 * r]), fabsf(o(i)[2 * r + 1])));
        }
    }
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
        most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
        exponents[r] = max(min(139 - (__float_as_int(most[r]) >> 23), 64), -110);
        factor[r] = __int_as_float((127 + exponents[r]) << 23);
    }
#pragma unroll
    for (int i = 0; i < GROUPS / ADDERS; i += 2) {
        const float *a = o(i), *b = o(i + 1);
        parts[i / 2 * ADDERS + adder] =
            make_uint4(pack_f16(a[0] * factor[0], a[1] * factor[0]), pack_f16(a[2] * factor[1], a[3] * factor[1]),
                       pack_f16(b[0] * factor[0], b[1] * factor[0]), pack_f16(b[2] * factor[1], b[3] * factor[1]));
    }
}
__device__ __forceinline__ void keep_state(
    float4* states, int row, const float (&reference)[2], const float (&sum)[2], const int (&exponents)[2]
) {
    states[row / 16 * 8 + row % 8] = make_float4(
        reference[0] - exponents[0], sum[0] * __int_as_float((127 + exponents[0]) << 23),
        reference[1] - exponents[1], sum[1] * __int_as_float((127 + exponents[1]) << 23));
}

// The sequence's blocks are `first` to `first + count - 1`; each takes an equal share of the pairs of groups. LANES
// lanes share the sums of a pair, AHEAD of which are loaded at a time. By the adders.
template <int LANES, int AHEAD>
__device__ __forceinline__ void combine(const Results& results, int sequence, u32 first, u32 count, int adder) {
    constexpr int WIDTH = 32 / LANES, UNITS = GROUPS / 2 / WIDTH;
    const u32 rank = blockIdx.x - first;
    const int lane = adder % 32, part = lane / WIDTH;
    for (u32 unit = rank * UNITS / count + adder / 32; unit < (rank + 1) * UNITS / count; unit += ADDERS / 32) {
        const u32 pair = unit * WIDTH + lane % WIDTH;
        const int thread = pair % ADDERS, i = pair / ADDERS * 2;
        const Place at = place_of(i, thread);
        const float4* state = results.states + thread / (ADDERS / PIECES) * (N / 2) + at.row / 16 * 8 + at.row % 8;
        float top[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0, 0}, o[2][4] = {};  // o[row][number]
        for (u32 base = part; base < count; base += LANES * AHEAD) {
            float4 states[AHEAD];
            uint4 parts[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const u32 index = base + j * LANES;
                const u32 slot = 2 * (first + index) + (index == 0);
                states[j] = make_float4(minus_infinity(), 0, minus_infinity(), 0);
                parts[j] = make_uint4(0, 0, 0, 0);
                if (index < count) {
                    states[j] = state[slot * (PIECES * N / 2)];
                    parts[j] = results.parts[u64(slot) * (GROUPS / 2) + pair];
                }
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float now = top[r];
#pragma unroll
                for (int j = 0; j < AHEAD; j++) now = fmaxf(now, r ? states[j].z : states[j].x);
                const float reference = now == minus_infinity() ? 0 : now, decay = power_of_two(top[r] - reference);
                top[r] = now;
                sum[r] *= decay;
#pragma unroll
                for (int n = 0; n < 4; n++) o[r][n] *= decay;
#pragma unroll
                for (int j = 0; j < AHEAD; j++) {
                    const float weight = power_of_two((r ? states[j].z : states[j].x) - reference);
                    const float2 a = unpack_f16(r ? parts[j].y : parts[j].x);
                    const float2 b = unpack_f16(r ? parts[j].w : parts[j].z);
                    sum[r] += weight * (r ? states[j].w : states[j].y);
                    o[r][0] += weight * a.x, o[r][1] += weight * a.y, o[r][2] += weight * b.x, o[r][3] += weight * b.y;
                }
            }
        }
#pragma unroll
        for (int step = WIDTH; step < 32; step *= 2) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float other = __shfl_xor_sync(~0u, top[r], step), now = fmaxf(top[r], other);
                const float reference = now == minus_infinity() ? 0 : now;
                const float mine = power_of_two(top[r] - reference), theirs = power_of_two(other - reference);
                sum[r] = mine * sum[r] + theirs * __shfl_xor_sync(~0u, sum[r], step);
#pragma unroll
                for (int n = 0; n < 4; n++) o[r][n] = mine * o[r][n] + theirs * __shfl_xor_sync(~0u, o[r][n], step);
                top[r] = now;
            }
        }
        if (part == 0) {
            const float a = results.factor(sum[0]), b = results.factor(sum[1]);
            results.write(sequence, at, make_float4(o[0][0] * a, o[0][1] * a, o[1][0] * b, o[1][1] * b));
            const Place next = place_of(i + 1, thread);
            results.write(sequence, next, make_float4(o[0][2] * a, o[0][3] * a, o[1][2] * b, o[1][3] * b));
            if (at.column == 0) {
                results.write_lse(sequence, at.row, top[0], sum[0]);
                results.write_lse(sequence, at.row + 8, top[1], sum[1]);
            }
        }
    }
}

__device__ __forceinline__ void arrive(int* word) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(word) : "memory");
}

// By one thread: waits for the `count` blocks of a sequence.
__device__ __forceinline__ void wait_for_parts(int* word, u32 count) {
    u32 now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    } while (now < count);
}
// After it: the last to leave sets the word to zero.
__device__ __forceinline__ void leave(int* word, u32 count) {
    if (atomicAdd(word, 1) == int(2 * count - 1)) *word = 0;
}

// The sequences that a block has a part of: of one before others have, after others have.
struct Open {
    int sequence[2] = {-1, -1};
    u32 before[2];

    __device__ void add(bool starts, int of, u32 tiles_before) {
        if (starts) sequence[1] = of, before[1] = tiles_before;
        else sequence[0] = of, before[0] = tiles_before;
    }
};
