// Results from the registers of a warpgroup to memory.
#pragma once

#include "prefill_shared.cuh"
#include "prefill_softmax.cuh"

// Four lanes hold a word each of four pieces; lane l gets all of piece l.
__device__ uint4 gather_piece(u32 a, u32 b, u32 c, u32 d, int lane) {
    bool odd = lane & 1, high = lane & 2;
    u32 ab = __shfl_xor_sync(WARP, odd ? a : b, 1), cd = __shfl_xor_sync(WARP, odd ? c : d, 1);
    if (odd) a = ab, c = cd;
    else b = ab, d = cd;
    u32 ac = __shfl_xor_sync(WARP, high ? a : c, 2), bd = __shfl_xor_sync(WARP, high ? b : d, 2);
    return high ? uint4{ac, bd, c, d} : uint4{a, b, ac, bd};
}

__device__ void store(const float (&o)[V_DIM / 2], const Softmax& softmax, const Work& w, int heads, u16* out,
                      float* lse, int thread) {
    int lane = thread % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = softmax.sum[h];
        sum += __shfl_xor_sync(WARP, sum, 1);
        sum += __shfl_xor_sync(WARP, sum, 2);
        float share = sum == 0 ? 0.0f : reciprocal(sum);
        int row = thread / 32 * 16 + lane / 4 + 8 * h;
        long long to = static_cast<long long>(w.query + row) * heads + w.head;
        bool inside = row < w.queries;
        if (inside && lane % 4 == 0) {
            lse[to] = sum == 0 ? -infinity() : (softmax.reference[h] + log2_fast(sum)) * 0.6931471805599453f;
        }
#pragma unroll
        for (int j = 0; j < V_DIM / 32; j++) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = &o[4 * (4 * j + i) + 2 * h];
                words[i] = pack_bf16(pair[0] * share, pair[1] * share);
            }
            uint4 piece = gather_piece(words[0], words[1], words[2], words[3], lane);
            if (inside) reinterpret_cast<uint4*>(out + to * V_DIM)[4 * j + lane % 4] = piece;
        }
    }
}
