// Gated residual of many tokens, first step: injection, norms and the products of the injection gates, at the speed of
// a copy.
//
// A warp takes one stream of a token whole, in registers: one read, and no barrier but its own sums. A block keeps the
// weights of its stream, of the norm and of the gates, in shared memory; it asks for them before the predecessor ends.
#include "device.cuh"

namespace {

constexpr int STREAMS = 4;
constexpr int WARPS = 8;
constexpr int CHUNKS = HIDDEN / 256;  // of eight columns a lane
static_assert(HIDDEN % 256 == 0);

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
    return v;
}

__device__ __forceinline__ void unpack(float (&to)[8], const uint4& from) {
    to[0] = low_to_float(from.x), to[1] = high_to_float(from.x), to[2] = low_to_float(from.y);
    to[3] = high_to_float(from.y), to[4] = low_to_float(from.z), to[5] = high_to_float(from.z);
    to[6] = low_to_float(from.w), to[7] = high_to_float(from.w);
}

__device__ __forceinline__ uint4 pack(const float (&v)[8]) {
    return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

}  // namespace

// `normed`: n, as x. `products`: W_inject n of each stream alone, [tokens, STREAMS, GATES].
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
prepare(u16* x, const u16* y, const float* inject, const u16* norm, const u16* w_inject, u16* normed, float* products,
        int tokens, float eps) {
    extern __shared__ __align__(128) uint4 weights[];  // [1 + GATES][HIDDEN / 8]: of the norm, then of each gate
    const int stream = blockIdx.x % STREAMS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_successor();
    for (int i = threadIdx.x; i < HIDDEN / 8; i += 32 * WARPS) {
        weights[i] = load_once(norm + stream * HIDDEN + 8 * i);
        for (int g = 0; g < GATES; g++)
            weights[(1 + g) * (HIDDEN / 8) + i] = load_once(w_inject + (g * STREAMS + stream) * HIDDEN + 8 * i);
    }
    wait_for_predecessor();
    __syncthreads();
    const int step = gridDim.x / STREAMS * WARPS;
    for (int token = blockIdx.x / STREAMS * WARPS + warp; token < tokens; token += step) {
        const u64 row = u64(token) * STREAMS + stream;
        uint4* const from_x = reinterpret_cast<uint4*>(x + row * HIDDEN) + lane;
        const uint4* const from_y = reinterpret_cast<const uint4*>(y + u64(token) * HIDDEN) + lane;
        uint4 values[CHUNKS], added[CHUNKS];
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            values[i] = from_x[32 * i];
            if (INJECTED) added[i] = from_y[32 * i];
        }
        const float share = INJECTED ? inject[row] : 0.0f;
        float square = 0.0f, sums[GATES ? GATES : 1] = {};
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            float v[8], other[8];
            unpack(v, values[i]);
            if (INJECTED) {
                unpack(other, added[i]);
#pragma unroll
                for (int e = 0; e < 8; e++) v[e] += share * other[e];
                values[i] = pack(v);
                from_x[32 * i] = values[i];
                unpack(v, values[i]);
            }
            unpack(other, weights[32 * i + lane]);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                square += v[e] * v[e];
                v[e] += v[e] * other[e];
            }
#pragma unroll
            for (int g = 0; g < GATES; g++) {
                unpack(other, weights[(1 + g) * (HIDDEN / 8) + 32 * i + lane]);
#pragma unroll
                for (int e = 0; e < 8; e++) sums[g] += v[e] * other[e];
            }
        }
        const float factor = rsqrtf(warp_sum(square) / HIDDEN + eps);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            float v[8], scale[8];
            unpack(v, values[i]);
            unpack(scale, weights[32 * i + lane]);
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] *= factor * (1.0f + scale[e]);
            reinterpret_cast<uint4*>(normed + row * HIDDEN)[lane + 32 * i] = pack(v);
        }
#pragma unroll
        for (int g = 0; g < GATES; g++) {
            const float total = warp_sum(sums[g]);
            if (lane == 0) products[row * GATES + g] = total * factor;
        }
    }
}
