// One token of each sequence under the gated delta rule.
//
// Both products of a step run along rows of the state [D_V, 128], so rows never meet: a block is one warp with eight of
// them, each lane four columns, all loads at once. Lanes hand their partial sums over while they add them up, so that
// the sums of eight rows over the warp take nine shuffles, and end in the lanes that hold the row's value.
//
// The state may be what the kernel ahead writes, and is loaded after the wait for it. But its lines are fetched into L2
// before, and its slot is a guess until it is read again beside the load.
#include "early.cuh"

constexpr int D_K = 128, ROWS = 8;
constexpr int LANES = 32 / ROWS;  // that end with the sums of one row
constexpr int TILES = D_V / ROWS;
constexpr int FIRST_BLOCKS = 132 * 16;  // the others come when the kernel ahead has ended
constexpr float NORM_EPS = 1e-6f;
using i64 = long long;

__device__ __forceinline__ float4 widened(uint2 p) {
    return {low_to_float(p.x), high_to_float(p.x), low_to_float(p.y), high_to_float(p.y)};
}
__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// A lane's part of its rows. They are soon stored to where they came from, and had better stay in L2 until then.
struct Rows {
    float4 at[ROWS];

    __device__ __forceinline__ void load(const float* p) {
        const u64 policy = keeping();
#pragma unroll
        for (int r = 0; r < ROWS; r++) at[r] = load_state(p + r * D_K, policy);
    }
};

__device__ __forceinline__ float all_lanes(float x) {
    for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
    return x;
}

// Sums over the warp of N values a lane: lane l gets that of value l / (32 / N). Lanes `APART` from each other share.
template <int N, int APART = 16>
__device__ __forceinline__ float each_sum(float* x, int lane) {
    if constexpr (N == 1) {
        x[0] += __shfl_xor_sync(~0u, x[0], APART);
    } else {
        const bool upper = lane & APART;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const float low = x[i], high = x[i + N / 2];
            x[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, APART);
        }
    }
    if constexpr (APART > 1) each_sum<(N + 1) / 2, APART / 2>(x, lane);
    return x[0];
}

extern "C" __global__ void __launch_bounds__(32) gdn_decode(
    const u16* q, const u16* k, const u16* v, const float* g, const float* beta, float* state, const int* slots, u16* o,
    float scale, int pool, i64 q_batch, i64 q_head, i64 k_batch, i64 k_head, i64 v_batch, i64 v_head) {
    const int lane = threadIdx.x, my_row = lane / LANES;
    const int tile = blockIdx.x % TILES, head = blockIdx.x / TILES % V_HEADS, batch = blockIdx.x / (TILES * V_HEADS);
    const int gate = batch * V_HEADS + head;
    const u16* q_at = q + batch * q_batch + head / GROUP * q_head;
    const u16* k_at = k + batch * k_batch + head / GROUP * k_head;
    const u16* v_at = v + batch * v_batch + head * v_head + tile * ROWS;
    float* tile_at = state + (head * D_V + tile * ROWS) * D_K;  // of slot 0
    constexpr i64 SLOT = static_cast<i64>(V_HEADS) * D_V * D_K;

    launch_successor();
    int slot = -1;
    if (blockIdx.x < FIRST_BLOCKS) {
        slot = load_fresh(slots + batch);
        if (slot >= pool) slot = -1;
        if (lane == 0 && slot >= 0) prefetch_bulk(tile_at + slot * SLOT, ROWS * D_K * 4);
        if (lane >= 4 && lane < 6) prefetch_line(q_at + (lane - 4) * 64);
        if (lane >= 6 && lane < 8) prefetch_line(k_at + (lane - 6) * 64);
        if (lane == 8) prefetch_line(v_at);
        if (lane == 9) prefetch_line(g + gate);
        if (lane == 10) prefetch_line(beta + gate);
    }
    wait_for_predecessor();
    const int true_slot = load_fresh(slots + batch);
    const uint2 q_bits = *reinterpret_cast<const uint2*>(q_at + 4 * lane);
    const uint2 k_bits = *reinterpret_cast<const uint2*>(k_at + 4 * lane);
    const float value = bf16_to_float(v_at[my_row]), decay = __expf(g[gate]), strength = beta[gate];
    Rows s;
    for (;;) {
        if (slot >= 0) s.load(tile_at + slot * SLOT + 4 * lane);
        if (slot == true_slot) break;
        slot = true_slot;
    }
    u16* out = o + static_cast<i64>(gate) * D_V + tile * ROWS + my_row;
    if (slot < 0) {
        if (lane % LANES == 0) *out = 0;
        return;
    }

    const float4 kw = widened(k_bits), qw = widened(q_bits);
    const float kq = all_lanes(dot(kw, qw));
    float k_factor = 1, q_factor = scale;
    if (NORMALISE) {
        k_factor = rsqrtf(all_lanes(dot(kw, kw)) + NORM_EPS);
        q_factor *= rsqrtf(all_lanes(dot(qw, qw)) + NORM_EPS);
    }
    // Both products are with the state before the token: S q is exp(g) S q + delta (k q).
    float read_k[ROWS], read_q[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) read_k[r] = dot(s.at[r], kw), read_q[r] = dot(s.at[r], qw);
    const float sum_k = each_sum<ROWS>(read_k, lane), sum_q = each_sum<ROWS>(read_q, lane);
    // What the token adds along its key as it came; the factor makes that of unit length.
    const float delta = strength * (value - sum_k * (decay * k_factor)) * k_factor;
    float* to = tile_at + slot * SLOT + 4 * lane;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float d = __shfl_sync(~0u, delta, r * LANES);
        const float4 x = s.at[r];
        *reinterpret_cast<float4*>(to + r * D_K) = {x.x * decay + d * kw.x, x.y * decay + d * kw.y,
                                                    x.z * decay + d * kw.z, x.w * decay + d * kw.w};
    }
    if (lane % LANES == 0) *out = float_to_bf16((sum_q * decay + delta * kq) * q_factor);
}
