// Which experts a few tokens have, as every block finds out for itself, and the queue by which weights reach a warp.
//
// An expert's tokens are a mask of 32 bits; an expert that occurs twice in a token is one with the sum of its weights.
// A row is a token's vector at one of its experts; rows lie in the order of experts, an expert's in that of its tokens.
#pragma once
#include "weights.cuh"

constexpr int MOST_TOKENS = 32, MOST_ROWS = MOST_TOKENS * TOP_K;
constexpr int TEAM = 10, TEAMS = 2, WARPS = TEAM * TEAMS, THREADS = 32 * WARPS;  // a team of warps works on its own
constexpr int EACH = (EXPERTS + THREADS - 1) / THREADS;                           // experts a thread looks at
constexpr int PIECE = piece_of<FORMAT>, CHUNK = 4 * PIECE, STEPS = PIECE / 4;     // inputs of 64 bytes of a row

__device__ __forceinline__ void team_barrier() {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / (32 * TEAM)), "n"(32 * TEAM) : "memory");
}

struct Experts {
    u32 tokens_of[EACH * THREADS];
    u32 entries[MOST_ROWS];  // an expert once for every 8 of its rows; from bit 16 on which 8
    u16 here[MOST_ROWS];     // an expert once
    u16 expert_at[MOST_ROWS], first_row[EACH * THREADS];
    float weight_at[MOST_ROWS];
    u32 total[WARPS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < EACH; i++) tokens_of[i * THREADS + threadIdx.x] = 0;
        __syncthreads();
    }

    // Lists the experts here. Returns how many entries there are, and from bit 10 on how many experts. After `clear`.
    __device__ __forceinline__ u32 find(const int* ids, const float* weights, int tokens, int first_expert) {
        for (int p = threadIdx.x; p < tokens * TOP_K; p += THREADS) {
            const u32 expert = static_cast<u32>(ids[p]) - static_cast<u32>(first_expert);
            weight_at[p] = weights[p];  // used only if the expert is here
            expert_at[p] = expert < EXPERTS ? expert : 0xffff;
            if (expert < EXPERTS) atomicOr(&tokens_of[expert], 1u << (p / TOP_K));
        }
        __syncthreads();
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        u32 own = 0, sum;  // entries, from bit 10 on experts, from bit 20 on rows
#pragma unroll
        for (int i = 0; i < EACH; i++) own += counts(__popc(tokens_of[threadIdx.x * EACH + i]));
        sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == 31) total[warp] = sum;
        __syncthreads();
        u32 at = sum - own, all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w < warp) at += total[w];
            all += total[w];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int expert = threadIdx.x * EACH + i, rows = __popc(tokens_of[expert]);
            first_row[expert] = at >> 20;
            if (rows > 0) here[at >> 10 & 0x3ff] = expert;
            for (int part = 0; part * 8 < rows; part++) entries[(at & 0x3ff) + part] = expert | part << 16;
            at += counts(rows);
        }
        __syncthreads();
        return all & 0xfffff;
    }

    static __device__ __forceinline__ u32 counts(u32 rows) { return (rows + 7) / 8 | (rows > 0) << 10 | rows << 20; }

    __device__ __forceinline__ int row_of(int expert, int token) const {
        return first_row[expert] + __popc(tokens_of[expert] & ((1u << token) - 1));
    }
};

// Copies that arrive in the order of `queue_commit`s; a thread waits only for its own.
template <int BYTES>
__device__ __forceinline__ void queue_copy(u32 to, const void* from) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
    }
}
__device__ __forceinline__ void queue_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void queue_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

__device__ __forceinline__ uint4 load_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ u32 load_shared_short(u32 at) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ float load_shared_float(u32 at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ void words_of(u32* words, uint4 v) {
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}

// Operands of 16 rows of 64 bytes, this thread's two pieces at its place in 512 bytes each; of their scales 8 bytes a
// row are `scale_stride` apart.
__device__ __forceinline__ void take_chunk(u32 (&a)[STEPS][4], u32 weights, u32 scales, int scale_stride) {
    const int lane = threadIdx.x % 32;
    u32 words[2][4], factors[2][2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) words_of(words[half], load_shared(weights + half * 512 + lane * 16));
    if constexpr (FORMAT == NVFP4) {
        const u32 at = scales + lane / 4 * scale_stride + lane % 4 * 2;
        widen_scales(load_shared_short(at), load_shared_short(at + 8 * scale_stride), factors[0], factors[1]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int w = 0; w < 4; w++) {
                u32 pairs[4];
                widen_codes(pairs, words[half][w], factors[half][w / 2]);
                a[2 * w][half] = pairs[0], a[2 * w][half + 2] = pairs[1];
                a[2 * w + 1][half] = pairs[2], a[2 * w + 1][half + 2] = pairs[3];
            }
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const u32 word = words[half][step];
                a[step][half] = e4m3_pair(word << 8, word << 4), a[step][half + 2] = e4m3_pair(word, word >> 4);
            }
        }
    }
}
