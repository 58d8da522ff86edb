// x · weightᵀ for at most 16 rows of x: as fast as the weight arrives.
//
// A tile is 16 rows of the weight. A block takes tiles in turn, its warps share out their inputs, and where outputs are
// few, so do the blocks of a cluster. A warp keeps its part of x in registers for good and loads weights of DEPTH tiles
// ahead straight into registers, 16 bytes a thread, as the left operand of 16 x 8 x 16 products. Weights do not wait
// for the kernel before; only x does. Warps, then blocks of the cluster, are added up in order: always the same result.
#include "weights.cuh"

constexpr int PIECE = piece_of<FORMAT>, CHUNK = 4 * PIECE, STEPS = PIECE / 4;  // inputs of 64 bytes of a row
constexpr int PIECES = IN / PIECE, SHARE = CHUNK * WARPS * CLUSTER;            // of a row; inputs, a chunk a warp
constexpr int CHUNKS = (IN + SHARE - 1) / SHARE;                               // of a warp
constexpr int THREADS = 32 * WARPS, PLACES = OCTETS * 32;
static_assert(IN % PIECE == 0);

// Whether a piece is one of the row. Only where warps share a row unevenly is there any doubt.
__device__ __forceinline__ bool inside(int piece) { return IN % SHARE == 0 || piece < PIECES; }

// Asks for a line in the L2 cache.
__device__ __forceinline__ void draw(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// A barrier of the cluster in two halves.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Sends a number to shared memory of another block of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void send(float4* to, float4 v, u64* barrier, u32 rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(address_in(shared_address(to), rank)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w),
                 "r"(address_in(shared_address(barrier), rank)) : "memory");
}

// What a thread holds of a tile: of 16 bytes of two rows of each chunk, and scales as they lie in memory.
struct Tile {
    u32 upper[CHUNKS][4], lower[CHUNKS][4];
    u32 scale[CHUNKS][2];

    __device__ __forceinline__ void load(const u8* weight, const u8* scales, int outputs, int tile, int first_chunk) {
        const int group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
        const size_t row = min(tile * 16 + group, outputs - 1), apart = min(tile * 16 + group + 8, outputs - 1) - row;
        const u8* at = weight + (row * PIECES + 4 * first_chunk + member) * 16;
        const u8* scale_at = scales + (row * PIECES + 4 * first_chunk + member) * 2;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const bool there = inside(4 * (first_chunk + c) + member);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const size_t piece = half * apart * PIECES + 4 * c;
                const uint4 v = there ? load_once(at + piece * 16) : uint4{0, 0, 0, 0};
                u32(&words)[4] = half ? lower[c] : upper[c];
                words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
                if constexpr (FORMAT == NVFP4) scale[c][half] = there ? load_short(scale_at + piece * 2) : 0;
            }
            if constexpr (FORMAT == FP8) {
                const size_t block = static_cast<size_t>(tile / 8) * ((IN + 127) / 128) + (first_chunk + c) / 2;
                if (!inside(4 * (first_chunk + c))) scale[c][0] = 0;
                else if constexpr (SCALE_BYTES == 2) scale[c][0] = load_short(scales + block * 2) << 16;
                else scale[c][0] = load_word(scales + block * 4);
            }
        }
    }

    // The sums of the warp's inputs: rows of the weight by 8 rows of x, OCTETS times.
    __device__ __forceinline__ void multiply(
        float (&sum)[OCTETS][4], const u32 (&x)[OCTETS][CHUNKS][PIECE / 2]) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            u32 upper_scales[2], lower_scales[2];
            if constexpr (FORMAT == NVFP4) widen_scales(scale[c][0], scale[c][1], upper_scales, lower_scales);
            if constexpr (FORMAT == FP8) upper_scales[0] = lower_scales[0] = E4M3_BIAS;
            float part[OCTETS][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                u32 a[4];
                operand<FORMAT>(a, upper[c], lower[c], upper_scales, lower_scales, step);
#pragma unroll
                for (int o = 0; o < OCTETS; o++) mma_bf16(part[o], a, x[o][c][2 * step], x[o][c][2 * step + 1]);
            }
            const float factor = FORMAT == FP8 ? __uint_as_float(scale[c][0]) : 1.0f;
#pragma unroll
            for (int o = 0; o < OCTETS; o++) {
#pragma unroll
                for (int i = 0; i < 4; i++) sum[o][i] += part[o][i] * factor;
            }
        }
    }
};

__device__ __forceinline__ void add(float4& sum, float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

// A thread's four sums of a tile, by their place among OCTETS * 32: rows 8 apart, tokens next to each other.
__device__ __forceinline__ void store(
    void* out, const u16* bias, int tokens, int outputs, int tile, int place, float4 sum, float factor) {
    const int token = place / 32 * 8 + place % 4 * 2;
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = tile * 16 + place % 32 / 4 + i / 2 * 8;
        if (row < outputs && token + i % 2 < tokens) {
            const size_t at = static_cast<size_t>(token + i % 2) * outputs + row;
            const float value = values[i] * factor + (bias ? bf16_to_float(bias[row]) : 0.0f);
            if constexpr (OUT_BYTES == 4) static_cast<float*>(out)[at] = value;
            else static_cast<u16*>(out)[at] = float_to_bf16(value);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) linear_few(
    const u16* x,               // [tokens, IN], rows x_stride apart
    const u8* weight,           // [outputs, IN] in its format
    const u8* scales,           // FP8: [⌈outputs/128⌉, ⌈IN/128⌉]; NVFP4: [outputs, IN/16]
    const float* global_scale,  // NVFP4: [1]
    const u16* bias,            // [outputs] or null
    void* out,                  // [tokens, outputs]
    int tokens, int x_stride, int outputs) {
    extern __shared__ float4 shared[];
    float4(*partial)[DEPTH][WARPS][PLACES] = reinterpret_cast<float4(*)[DEPTH][WARPS][PLACES]>(shared);
    // What the blocks of the cluster send of tiles that are ours to add up: every CLUSTER-th of the cluster's.
    float4(*inbox)[CLUSTER][PLACES] = reinterpret_cast<float4(*)[CLUSTER][PLACES]>(shared + 2 * DEPTH * WARPS * PLACES);
    __shared__ u64 all_sent;

    launch_successor();
    const int tiles = (outputs + 15) / 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
    const int first_chunk = (rank * WARPS + warp) * CHUNKS, first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    const int ours = ((tiles - first + stride - 1) / stride - rank + CLUSTER - 1) / CLUSTER;
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x == 0) {
            barrier_init(&all_sent, 1);
            barrier_init_done();
            barrier_expect(&all_sent, ours * sizeof(inbox[0]));
        }
        cluster_arrive();
    }
    // x is asked for first of all, or it would queue behind the weights. The L2 cache may have it before the wait: all
    // that writes x writes it there.
    // Each cluster draws a part.
    constexpr int LINES = (IN / CLUSTER * 2 + 127) / 128;
    for (int i = threadIdx.x * stride + first; i < tokens * LINES; i += THREADS * stride) {
        draw(x + static_cast<size_t>(i / LINES) * x_stride + min(rank * (IN / CLUSTER) + i % LINES * 64, IN - 1));
    }
    Tile ahead[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        if (first + d * stride < tiles) ahead[d].load(weight, scales, outputs, first + d * stride, first_chunk);
    }
    const float factor = FORMAT == NVFP4 ? *global_scale * 256.0f : 1.0f;

    wait_for_predecessor();
    u32 part_of_x[OCTETS][CHUNKS][PIECE / 2];
#pragma unroll
    for (int o = 0; o < OCTETS; o++) {
        const int token = 8 * o + lane / 4;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int piece = 4 * (first_chunk + c) + lane % 4;
            const u16* at = x + static_cast<size_t>(token) * x_stride + piece * PIECE;
#pragma unroll
            for (int i = 0; i < PIECE / 8; i++) {
                const bool there = token < tokens && inside(piece);
                const uint4 v = there ? reinterpret_cast<const uint4*>(at)[i] : uint4{0, 0, 0, 0};
                u32* pairs = part_of_x[o][c] + 4 * i;
                pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
            }
        }
    }
#pragma unroll
    for (int o = 0; o < OCTETS; o++) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) order_like_weights<FORMAT>(part_of_x[o][c]);
    }

    if constexpr (CLUSTER > 1) cluster_wait();  // all have their barriers
    int buffer = 0;
    for (int base = first, local = 0; base < tiles; base += DEPTH * stride, local += DEPTH, buffer ^= 1) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int tile = base + d * stride, next = tile + DEPTH * stride;
            if (tile < tiles) {
                float sum[OCTETS][4] = {};
                ahead[d].multiply(sum, part_of_x);
                if (next < tiles) ahead[d].load(weight, scales, outputs, next, first_chunk);
#pragma unroll
                for (int o = 0; o < OCTETS; o++) {
                    partial[buffer][d][warp][o * 32 + lane] = make_float4(sum[o][0], sum[o][1], sum[o][2], sum[o][3]);
                }
            }
        }
        __syncthreads();  // the other buffer is free again one round later
        for (int i = threadIdx.x; i < DEPTH * PLACES; i += THREADS) {
            const int d = i / PLACES, place = i % PLACES, tile = base + d * stride;
            if (tile < tiles) {
                float4 sum = partial[buffer][d][0][place];
#pragma unroll
                for (int w = 1; w < WARPS; w++) add(sum, partial[buffer][d][w][place]);
                if constexpr (CLUSTER == 1) store(out, bias, tokens, outputs, tile, place, sum, factor);
                else send(&inbox[(local + d) / CLUSTER][rank][place], sum, &all_sent, (local + d) % CLUSTER);
            }
        }
    }
    if constexpr (CLUSTER > 1) {
        if (ours > 0) barrier_wait(&all_sent, 0);
        for (int i = threadIdx.x; i < ours * PLACES; i += THREADS) {
            const int own = i / PLACES, place = i % PLACES;
            float4 sum = inbox[own][0][place];
#pragma unroll
            for (int r = 1; r < CLUSTER; r++) add(sum, inbox[own][r][place]);
            store(out, bias, tokens, outputs, first + (own * CLUSTER + rank) * stride, place, sum, factor);
        }
    }
}
