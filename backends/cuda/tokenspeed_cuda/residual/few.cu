// Gated residual of few tokens in one kernel: 128 blocks, no two of which read the same weight, and one exchange.
//
// A block owns RANKS ranks of the down projection over a slice of their columns, half a stream, and a few columns of
// all streams of the up projection. One warp asks for both pieces of weights, into shared memory, before the
// predecessor ends: two blocks fit on a multiprocessor, so all of them are there by then. (All blocks must run at once;
// 64 multiprocessors are enough for that.)
// 1. A stream's norm is one factor on all its columns, so W n = sum over streams of r · W (x (1 + w)): the block
//    multiplies its slice of the injected streams before r is known, and publishes its sums.
// 2. All blocks read all sums as they come, one trip through the L2 and no barrier, and add them up in fixed order.
//    Of the two buffers in `state` the other one is cleared for the next call. The successor may start now, not
//    earlier: step 1 would find the memory busy with its weights.
// 3. Whoever has all sums knows that all blocks have read x, and may store its columns of it.
//
// Matrix products are m16n8k16 with tokens as rows. Inside a chunk of 32 columns a thread takes the 8 of its quad's
// place, for two products: the order of a sum is free, and they are one 16-byte load.
#include "exchange.cuh"

namespace {

constexpr int STREAMS = 4;
constexpr int BLOCKS = 128;
constexpr int TOKENS = 8;
constexpr int WARPS = HIDDEN / 256;  // that compute
constexpr int THREADS = 32 * WARPS;
constexpr bool FLOAT8 = WEIGHT_BYTES == 1;

constexpr int SLICES = 2 * STREAMS;
constexpr int SLICE = HIDDEN / 2;
constexpr int CHUNKS = SLICE / 32 / WARPS;  // of 32 columns, a warp
constexpr int RANKS = RANK * SLICES / BLOCKS;
constexpr int PAIRS = RANKS / 2;
constexpr int PART_STRIDE = RANKS;
constexpr int TILES = (RANKS + 7) / 8;
constexpr int UP_ROWS = STREAMS * HIDDEN / BLOCKS;
constexpr int UP_CHUNKS = RANK / 32, EARLY = UP_CHUNKS / 3;  // of these, in registers before the exchange
constexpr int VECTORS = RANK / 8;  // of a token's ranks, 16 bytes each

static_assert(HIDDEN % 256 == 0 && CHUNKS * 32 * WARPS == SLICE && RANKS % 4 == 0 && RANK % 64 == 0);
static_assert(TOKENS * VECTORS <= THREADS);

// Words of a buffer: sums of pairs of ranks, sums of squares, sums for gates.
constexpr int SUMS = SLICES * TOKENS * (RANK / 2), SQUARES = TOKENS * SLICES, GATE_SUMS = TOKENS * GATES * SLICES;
constexpr int CLEARED = (SUMS + SQUARES + GATE_SUMS + BLOCKS - 1) / BLOCKS;  // by a block

// Rows of weights in shared memory, odd ones apart from even ones: then eight threads that read 16 bytes each of two
// neighbouring rows (or 16 that read 8 bytes of four) meet all banks.
template <int COLUMNS, int ROWS>
struct Rows {
    static constexpr int BYTES = COLUMNS * WEIGHT_BYTES;
    static constexpr int STRIDE = FLOAT8 && BYTES % 128 == 0 ? BYTES + 64 : BYTES;
    static constexpr int ODD = ROWS / 2 * STRIDE + 32 * WEIGHT_BYTES;
    static constexpr int SIZE = 2 * ODD;
    static_assert(STRIDE % 128 == (FLOAT8 ? 64 : 0) && ROWS % 2 == 0);
    __device__ static int at(int row) { return (row >> 1) * STRIDE + (row & 1) * ODD; }
};
using Down = Rows<SLICE, RANKS>;
using Up = Rows<RANK, UP_ROWS>;

// The fetches: the norm's and a gate's slice and the scales, pairs of rows of W_down, the tiles of 8 rows of W_up, one
// a warp.
constexpr int DOWN_FETCHES = RANKS / 2, FETCHES = 1 + DOWN_FETCHES + WARPS;

constexpr int LOW_STRIDE = RANK * 2 + (RANK * 2 % 128 == 0 ? 64 : 0);
constexpr int SCALES = FLOAT8 ? RANK : 0;  // that lie in shared memory
constexpr int UP_AT = Down::SIZE;
constexpr int PART_AT = UP_AT + Up::SIZE;
constexpr int NORM_AT = PART_AT + WARPS * TOKENS * RANKS * 4;
constexpr int GATE_AT = NORM_AT + SLICE * 2;
constexpr int SCALES_AT = GATE_AT + SLICE * 2;
constexpr int SQUARES_AT = SCALES_AT + SCALES * 4;
constexpr int RMS_AT = SQUARES_AT + WARPS * TOKENS * 8;
constexpr int BARRIERS_AT = RMS_AT + TOKENS * STREAMS * 4;
static_assert(SHARED == BARRIERS_AT + FETCHES * 8 && TOKENS * LOW_STRIDE <= Down::SIZE);

// The elements of 8 that make word p of a fragment. Words of float8 unpack with fewer instructions into every other
// one.
__device__ constexpr int first(int p) { return FLOAT8 ? p / 2 * 4 + p % 2 : 2 * p; }
__device__ constexpr int second(int p) { return first(p) + (FLOAT8 ? 2 : 1); }

// Eight weights as fragments, two words a product.
__device__ __forceinline__ uint4 weights(const char* p) {
    if constexpr (!FLOAT8) return *reinterpret_cast<const uint4*>(p);
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    // The bits of e4m3 are those of a bfloat16 that is 2^120 times as small.
    constexpr u32 SIGN = 0x80008000u, REST = 0x07f007f0u, SCALE = 0x7b807b80u;
    uint4 w;
    w.x = multiply_pairs((v.x << 8 & SIGN) | (v.x << 4 & REST), SCALE);
    w.y = multiply_pairs((v.x & SIGN) | (v.x >> 4 & REST), SCALE);
    w.z = multiply_pairs((v.y << 8 & SIGN) | (v.y << 4 & REST), SCALE);
    w.w = multiply_pairs((v.y & SIGN) | (v.y >> 4 & REST), SCALE);
    return w;
}

// Eight bfloat16 in the order of fragments.
__device__ __forceinline__ uint4 paired(const uint4& v) {
    if constexpr (!FLOAT8) return v;
    return make_uint4((v.x & 0xffffu) | v.y << 16, v.x >> 16 | (v.y & 0xffff0000u), (v.z & 0xffffu) | v.w << 16,
                      v.z >> 16 | (v.w & 0xffff0000u));
}

// Eight tokens times a tile of weights, over 32 columns.
__device__ __forceinline__ void multiply(float (&sums)[4], const uint4& a, const uint4& w) {
    mma_bf16(sums, {a.x, 0, a.y, 0}, w.x, w.y);
    mma_bf16(sums, {a.z, 0, a.w, 0}, w.z, w.w);
}

__device__ __forceinline__ void unpack(float (&to)[8], const uint4& from) {
    to[0] = low_to_float(from.x), to[1] = high_to_float(from.x), to[2] = low_to_float(from.y);
    to[3] = high_to_float(from.y), to[4] = low_to_float(from.z), to[5] = high_to_float(from.z);
    to[6] = low_to_float(from.w), to[7] = high_to_float(from.w);
}

__device__ __forceinline__ float quad_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// Within 2^-12 of it, by one instruction of the slow unit.
__device__ __forceinline__ float sigmoid(float v) { return 0.5f + 0.5f * tanh_about(0.5f * v); }

__device__ __forceinline__ u32 injected(u32 pair, u32 added, float share) {
    return pack_bf16(low_to_float(pair) + share * low_to_float(added),
                     high_to_float(pair) + share * high_to_float(added));
}

// The eight words of two vectors, one a slice.
__device__ __forceinline__ void spread(float (&to)[SLICES], const uint4& a, const uint4& b) {
    const u32 words[SLICES] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int s = 0; s < SLICES; s++) to[s] = __uint_as_float(words[s]);
}

// r of each stream, from the sums of squares of its slices.
__device__ __forceinline__ void norm_factors(float (&r)[STREAMS], const float (&squares)[SLICES], float eps) {
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
        r[s] = inverse_root((squares[2 * s] + squares[2 * s + 1]) * (1.0f / HIDDEN) + eps);
}

struct Sources {
    const u16 *norm, *w_inject;
    const char *down, *up;
    const float* down_scale;
};

__device__ __forceinline__ void fetch(char* shared, const Sources& sources, int group, int slice, int lane) {
    u64* const barriers = reinterpret_cast<u64*>(shared + BARRIERS_AT);
    const char* const from_down =
        sources.down + (u64(group * RANKS) * (STREAMS * HIDDEN) + slice * SLICE) * WEIGHT_BYTES;
    const char* const from_up = sources.up + u64(blockIdx.x * (2 * WARPS)) * Up::BYTES;
    if (lane == 0) {
        const bool scaled = SCALES && sources.down_scale;
        barrier_expect(&barriers[0], SLICE * 2 * (group < GATES ? 2 : 1) + (scaled ? SCALES * 4 : 0));
        copy_bulk(shared + NORM_AT, sources.norm + slice * SLICE, SLICE * 2, &barriers[0]);
        if (group < GATES)
            copy_bulk(shared + GATE_AT, sources.w_inject + (group * SLICES + slice) * SLICE, SLICE * 2, &barriers[0]);
        if (scaled) copy_bulk(shared + SCALES_AT, sources.down_scale, SCALES * 4, &barriers[0]);
    }
#pragma unroll 1
    for (int i = 0; i < FETCHES - 1; i++) {
        u64* const barrier = &barriers[1 + i];
        const int tile = i - DOWN_FETCHES;
        if (lane == 0) barrier_expect(barrier, tile < 0 ? 2 * Down::BYTES : 8 * Up::BYTES);
        __syncwarp();
        if (tile < 0 && lane < 2)
            copy_bulk(shared + Down::at(2 * i + lane), from_down + (2 * i + lane) * (STREAMS * HIDDEN * WEIGHT_BYTES),
                      Down::BYTES, barrier);
        if (tile >= 0 && lane < 8)  // a pair of columns in each stream
            copy_bulk(shared + UP_AT + Up::at(8 * tile + lane),
                      from_up + (lane / 2 * HIDDEN + tile * 2 + lane % 2) * Up::BYTES, Up::BYTES, barrier);
    }
}

}  // namespace

// `state`: the count of calls so far in word 0 and, from word 4 on, two buffers.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 2)
inject_mix(u16* x, const u16* y, const float* inject, const u16* norm, const char* down, const char* up,
           const u16* w_inject, const float* down_scale, const float* up_scale, u16* mixed, float* gates, u32* state,
           int tokens, float eps) {
    extern __shared__ __align__(128) char shared[];
    float* const part = reinterpret_cast<float*>(shared + PART_AT);          // [WARPS][TOKENS][PART_STRIDE]
    float2* const squares = reinterpret_cast<float2*>(shared + SQUARES_AT);  // [WARPS][TOKENS]; and gate sums
    float* const rms = reinterpret_cast<float*>(shared + RMS_AT);            // [TOKENS][STREAMS]
    u64* const barriers = reinterpret_cast<u64*>(shared + BARRIERS_AT);      // [FETCHES]
    char* const s_low = shared;                                              // [TOKENS][LOW_STRIDE], over used weights

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int group = blockIdx.x / SLICES, slice = blockIdx.x % SLICES, stream = slice / 2;
    if (threadIdx.x < FETCHES) {
        barrier_init(&barriers[threadIdx.x], 1);
        barrier_init_done();
    }
    __syncthreads();
    if (warp == WARPS) {
        fetch(shared, {norm, w_inject, down, up, down_scale}, group, slice, lane);
        return;
    }

    const int first_column = warp * (CHUNKS * 32) + 8 * t;   // in the slice
    const int column = blockIdx.x * (2 * WARPS) + 2 * warp;  // this warp's pair; t is the stream, in step 3
    const int token = threadIdx.x / VECTORS, vector = threadIdx.x % VECTORS;  // of step 2
    prefetch(norm + t * HIDDEN + column);
    if (up_scale) prefetch(up_scale + t * HIDDEN + column);
    wait_for_predecessor();

    // ---- 1: the slice of the streams, as rows of matrix products
    uint4 xs[CHUNKS], ys[CHUNKS];
    float share = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        xs[c] = ys[c] = make_uint4(0, 0, 0, 0);
        if (g < tokens) {
            xs[c] = *reinterpret_cast<const uint4*>(x + g * (STREAMS * HIDDEN) + slice * SLICE + first_column + 32 * c);
            if (INJECTED)
                ys[c] = *reinterpret_cast<const uint4*>(y + g * HIDDEN + slice % 2 * SLICE + first_column + 32 * c);
        }
    }
    if (INJECTED && g < tokens) share = inject[g * STREAMS + stream];
    const u32 calls = *reinterpret_cast<volatile u32*>(state);
#pragma unroll
    for (int i = 0; i < 1 + DOWN_FETCHES; i++) barrier_wait(&barriers[i], 0);
    float square = 0.0f, gate_sums[4] = {};
    uint4 rows[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        if (INJECTED) {
            xs[c].x = injected(xs[c].x, ys[c].x, share), xs[c].y = injected(xs[c].y, ys[c].y, share);
            xs[c].z = injected(xs[c].z, ys[c].z, share), xs[c].w = injected(xs[c].w, ys[c].w, share);
        }
        float v[8], scale[8];
        unpack(v, xs[c]);
        unpack(scale, *reinterpret_cast<const uint4*>(shared + NORM_AT + (first_column + 32 * c) * 2));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            square += v[i] * v[i];
            v[i] += v[i] * scale[i];
        }
        rows[c].x = pack_bf16(v[first(0)], v[second(0)]), rows[c].y = pack_bf16(v[first(1)], v[second(1)]);
        rows[c].z = pack_bf16(v[first(2)], v[second(2)]), rows[c].w = pack_bf16(v[first(3)], v[second(3)]);
    }
    float sums[TILES][4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < TILES; i++)
            multiply(sums[i], rows[c], weights(shared + Down::at(8 * i + g) + (first_column + 32 * c) * WEIGHT_BYTES));
    if (group < GATES)  // a tile of which only the first row is there
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            uint4 w = make_uint4(0, 0, 0, 0);
            if (g == 0) w = paired(*reinterpret_cast<const uint4*>(shared + GATE_AT + (first_column + 32 * c) * 2));
            multiply(gate_sums, rows[c], w);
        }
#pragma unroll
    for (int i = 0; i < TILES; i++)
        if (8 * i + 2 * t < RANKS)
            *reinterpret_cast<float2*>(part + (warp * TOKENS + g) * PART_STRIDE + 8 * i + 2 * t) =
                make_float2(sums[i][0], sums[i][1]);
    square = quad_sum(square);
    if (t == 0) squares[warp * TOKENS + g] = make_float2(square, gate_sums[0]);
    compute_barrier<THREADS>();
    launch_successor();

    u32* const buffer = state + 4 + (calls & 1) * (CLEARED * BLOCKS);  // [SLICES][TOKENS][RANK / 2]
    u32* const all_squares = buffer + SUMS;                            // [TOKENS][SLICES]
    u32* const all_gates = all_squares + SQUARES;                      // [TOKENS][GATES][SLICES]
    if (threadIdx.x < tokens * PAIRS) {
        const int from_token = threadIdx.x / PAIRS, pair = threadIdx.x % PAIRS;
        const float* from = part + from_token * PART_STRIDE;
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            a += from[w * TOKENS * PART_STRIDE + first(pair)];
            b += from[w * TOKENS * PART_STRIDE + second(pair)];
        }
        publish(buffer + (slice * TOKENS + from_token) * (RANK / 2) + group * PAIRS + pair, pack_bf16(a, b));
    }
    const int last = THREADS - 1 - threadIdx.x;
    if (last < tokens && (group == 0 || group < GATES)) {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum.x += squares[w * TOKENS + last].x, sum.y += squares[w * TOKENS + last].y;
        if (group == 0) publish(all_squares + last * SLICES + slice, __float_as_uint(sum.x));
        if (group < GATES) publish(all_gates + (last * GATES + group) * SLICES + slice, __float_as_uint(sum.y));
    }

    // While these are on their way: the columns of step 3, and the other buffer for the next call.
    u32 values = 0, added = 0;
    share = 0.0f;
    if (g < tokens) {
        values = *reinterpret_cast<const u32*>(x + (g * STREAMS + t) * HIDDEN + column);
        if (INJECTED) {
            added = *reinterpret_cast<const u32*>(y + g * HIDDEN + column);
            share = inject[g * STREAMS + t];
        }
    }
    if (threadIdx.x < CLEARED)
        state[4 + (~calls & 1) * (CLEARED * BLOCKS) + blockIdx.x * CLEARED + threadIdx.x] = 0;
    const u32 norm_pair = *reinterpret_cast<const u32*>(norm + t * HIDDEN + column);
    float2 up_scales = make_float2(1.0f, 1.0f);
    if (up_scale) up_scales = *reinterpret_cast<const float2*>(up_scale + t * HIDDEN + column);
    uint4 tile[UP_CHUNKS];
    const char* const from_tile = shared + UP_AT + Up::at(8 * warp + g) + 8 * t * WEIGHT_BYTES;
    barrier_wait(&barriers[1 + DOWN_FETCHES + warp], 0);
#pragma unroll
    for (int c = 0; c < EARLY; c++) tile[c] = weights(from_tile + 32 * c * WEIGHT_BYTES);

    // ---- 2: eight low-rank activations of a token
    if (token < tokens) {
        float squared[SLICES], r[STREAMS], totals[8] = {};
        uint4 sums[SLICES + 2];
        const u32* const from = buffer + token * (RANK / 2) + 4 * vector;
        const u32* const from_squares = all_squares + token * SLICES;
        receive(sums, [&](int i) {
            return i < SLICES ? from + i * (TOKENS * (RANK / 2)) : from_squares + 4 * (i - SLICES);
        });
        spread(squared, sums[SLICES], sums[SLICES + 1]);
        norm_factors(r, squared, eps);
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
            float v[8];
            unpack(v, sums[s]);
#pragma unroll
            for (int i = 0; i < 8; i++) totals[i] += r[s / 2] * v[i];
        }
        if (down_scale) {
            const float* const scales =
                (SCALES ? reinterpret_cast<const float*>(shared + SCALES_AT) : down_scale) + 8 * vector;
#pragma unroll
            for (int p = 0; p < 4; p++) totals[2 * p] *= scales[first(p)], totals[2 * p + 1] *= scales[second(p)];
        }
        const auto activated = [&](int p) {
            const float a = totals[2 * p] / STREAMS, b = totals[2 * p + 1] / STREAMS;
            return pack_bf16(a * sigmoid(a), b * sigmoid(b));
        };
        *reinterpret_cast<uint4*>(s_low + token * LOW_STRIDE + 16 * vector) =
            make_uint4(activated(0), activated(1), activated(2), activated(3));
        if (vector == 0) *reinterpret_cast<float4*>(rms + token * STREAMS) = make_float4(r[0], r[1], r[2], r[3]);
    }
#pragma unroll
    for (int c = EARLY; c < UP_CHUNKS; c++) tile[c] = weights(from_tile + 32 * c * WEIGHT_BYTES);
    compute_barrier<THREADS>();

    // ---- 3: the columns of this block
    float logits[2][4] = {};  // two chains of products
#pragma unroll
    for (int c = 0; c < UP_CHUNKS; c++) {
        uint4 a = make_uint4(0, 0, 0, 0);
        if (g < tokens) a = *reinterpret_cast<const uint4*>(s_low + g * LOW_STRIDE + (32 * c + 8 * t) * 2);
        multiply(logits[c % 2], a, tile[c]);
    }
    float a = 0.0f, b = 0.0f;
    if (g < tokens) {
        if (INJECTED) {
            values = injected(values, added, share);
            *reinterpret_cast<u32*>(x + (g * STREAMS + t) * HIDDEN + column) = values;
        }
        const float r = rms[g * STREAMS + t] / STREAMS;
        const float low = low_to_float(values) * r * (1.0f + low_to_float(norm_pair));
        const float high = high_to_float(values) * r * (1.0f + high_to_float(norm_pair));
        a = sigmoid((logits[0][0] + logits[1][0]) * up_scales.x) * low;
        b = sigmoid((logits[0][1] + logits[1][1]) * up_scales.y) * high;
    }
    a = quad_sum(a);
    b = quad_sum(b);
    if (t == 0 && g < tokens) *reinterpret_cast<u32*>(mixed + g * HIDDEN + column) = pack_bf16(a, b);

    if (blockIdx.x == BLOCKS - 1 && last < tokens * GATES) {
        const int gate_token = last / (GATES ? GATES : 1);
        const u32* const from = all_gates + last * SLICES;
        const u32* const from_squares = all_squares + gate_token * SLICES;
        float sums[SLICES], r[STREAMS], total = 0.0f;
        uint4 v[4];
        receive(v, [&](int i) { return i < 2 ? from_squares + 4 * i : from + 4 * (i - 2); });
        spread(sums, v[0], v[1]);
        norm_factors(r, sums, eps);
        spread(sums, v[2], v[3]);
#pragma unroll
        for (int s = 0; s < SLICES; s++) total += r[s / 2] * sums[s];
        gates[last] = __fdividef(2.0f, 1.0f + __expf(-total / STREAMS));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) state[0] = calls + 1;
}
