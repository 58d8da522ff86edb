// One of the two products of experts with many tokens each: weights as they lie in memory times blocks of tokens.
//
// A tile is 128 rows of an expert's matrix by a block of up to N tokens. Two warpgroups have 64 rows each as the left
// operand, which they load and widen in registers while the product before still runs; so a weight is widened once a
// block. Tokens are the right operand, 64 inputs of each a stage, brought into shared memory by four more warps, which
// are ahead by several stages and draw weights into the cache. Inputs lie in the order that `weights.cuh` wants; the
// gate's rows and those of up are 8 apart in a tile, so that a thread has both numbers of what it joins.
//
// Tiles of one block follow each other, so blocks that run at the same time share tokens in the cache.
#include "tiles.cuh"
#include "wgmma.cuh"

constexpr int STAGE = N * 128;
// No more stages than a tile has: what is said of a tile's tokens is kept for two tiles.
constexpr int MOST_STAGES = N > 128 ? 6 : 8;
constexpr int STAGES = 2 * PAIRS < MOST_STAGES ? 2 * PAIRS : MOST_STAGES, LAG = STAGES > 3 ? 3 : STAGES - 1;

struct Shared {
    u8 x[STAGES][STAGE];
    u64 full[STAGES], empty[STAGES];
    int pair[2][N];
    float weight[2][N];
};

__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 t;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(pair));
    return t;
}

__device__ __forceinline__ float silu_times(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

template <int WIDTH>
__device__ __forceinline__ void store_tile(
    const float (&d)[WIDTH / 2], const Problem& p, const Tile& tile, const Shared& s, int buffer, float upper,
    float lower, u16* out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, member = lane % 4;
    if constexpr (FORMAT == NVFP4) {
        upper = p.global_scale[GATED ? 2 * tile.expert : tile.expert] * 256.0f;
        lower = GATED ? p.global_scale[2 * tile.expert + 1] * 256.0f : upper;
    }
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++) {
        const int token = 8 * j + group;
        if constexpr (GATED) {
            const u32 inner = transposed(pack_bf16(silu_times(d[4 * j] * upper, d[4 * j + 2] * lower),
                                                   silu_times(d[4 * j + 1] * upper, d[4 * j + 3] * lower)));
            u16* at = out + static_cast<size_t>(tile.begin + token) * ROWS + tile.rows * 64 + warp * 8 + member * 2;
            if (token < tile.count) *reinterpret_cast<u32*>(at) = inner;
        } else {
            const float2 w = *reinterpret_cast<const float2*>(&s.weight[buffer][8 * j + 2 * member]);
            const u32 first = transposed(pack_bf16(d[4 * j] * upper * w.x, d[4 * j + 1] * upper * w.y));
            const u32 second = transposed(pack_bf16(d[4 * j + 2] * lower * w.x, d[4 * j + 3] * lower * w.y));
            const size_t pair = s.pair[buffer][token];
            u16* at = out + pair * ROWS + tile.rows * 128 + warp * 16 + member * 4;
            if (token < tile.count) *reinterpret_cast<uint2*>(at) = make_uint2(first, second);
        }
    }
}

// Where a warpgroup is in the ring of stages.
struct Ring {
    Shared& s;
    int stage = 0;
    u32 parity = 0;

    template <int R>
    __device__ __forceinline__ void multiply(float (&d)[R], const u32 (&a)[4][4]) {
        barrier_wait(&s.full[stage], parity);
        wgmma::fence();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            wgmma::mma(d, a[j], wgmma::k_major(shared_address(s.x[stage]) + 32 * j));
        }
        wgmma::commit();
    }
    __device__ __forceinline__ void release() {
        wgmma::wait<0>();
        if (threadIdx.x % 32 == 0) barrier_arrive(&s.empty[stage]);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// A tile of up to WIDTH tokens. `now` holds its first weights, and those of the next one afterwards.
template <int WIDTH>
__device__ __forceinline__ void multiply_tile(
    Ring& ring, Weights& now, const Rows& rows, const Rows& next, const Problem& p, const Tile& tile, int buffer,
    u16* out) {
    float d[WIDTH / 2] = {};
    u32 first[4][4], second[4][4];
    Weights ahead;
    Unit upper, lower;
    const auto begin_pair = [&] {
        if constexpr (FORMAT == FP8) {
            upper.take(__uint_as_float(now.scale[0])), lower.take(__uint_as_float(now.scale[1]));
        }
        now.widen<0>(first, upper, lower);
    };
    begin_pair();
#pragma unroll 1
    for (int pair = 0; pair < PAIRS; pair++) {
        if (pair + 1 < PAIRS) ahead.load(rows, pair + 1);
        else ahead.load(next, 0);
        ring.multiply(d, first);
        now.widen<1>(second, upper, lower);
        ring.release();
        ring.multiply(d, second);
        now = ahead;
        if (pair + 1 < PAIRS) begin_pair();
        ring.release();
        if (FORMAT == FP8 && pair + 1 < PAIRS) {
            wgmma::pin(d);
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i++) d[i] *= i % 4 < 2 ? upper.change : lower.change;
        }
    }
    wgmma::pin(d);
    store_tile<WIDTH>(d, p, tile, ring.s, buffer, upper.value, lower.value, out);
}

__device__ __forceinline__ void consume(const Problem& p, Shared& s, int tiles, u16* out) {
    if (blockIdx.x >= tiles) return;
    Tile tile(p.table, blockIdx.x);
    Rows rows(p, tile, threadIdx.x);
    Weights now;
    now.load(rows, 0);
    Ring ring{s};
    int buffer = 0;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x, buffer ^= 1) {
        const Tile next(p.table, min(index + static_cast<int>(gridDim.x), tiles - 1));
        const Rows next_rows(p, next, threadIdx.x);
        // What an expert has left may be far less than N.
        constexpr int MIDDLE = N < 128 ? N : 128, LEAST = N < 64 ? N : 64;
        if (tile.count > MIDDLE) multiply_tile<N>(ring, now, rows, next_rows, p, tile, buffer, out);
        else if (tile.count > LEAST) multiply_tile<MIDDLE>(ring, now, rows, next_rows, p, tile, buffer, out);
        else multiply_tile<LEAST>(ring, now, rows, next_rows, p, tile, buffer, out);
        tile = next, rows = next_rows;
    }
}

constexpr u32 NOTHING = ~0u;
constexpr int DRAWN = 4;                     // pairs ahead
constexpr int NAMED = (N + 127) / 128;       // pairs of a tile that a thread says
constexpr int ASKED = PAIRS > 1 ? 2 * PAIRS - 4 : 0;  // stage at which it asks for the next tile's

__device__ __forceinline__ void draw(const u8* row, int pair) {
#pragma unroll
    for (int at = 0; at < CHUNKS * 64; at += 128) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + pair * CHUNKS * 64 + at));
    }
}

__device__ __forceinline__ void produce(
    const Problem& p, Shared& s, int tiles, const u16* x, const float* token_weights) {
    const int thread = threadIdx.x - 256, piece = thread % 8, first = thread / 8;
    int stage = 0, ready = 0, under_way = 0, buffer = 0;
    u32 parity = 1;
    const auto arrive = [&] {
        fence_async_shared();
        barrier_arrive(&s.full[ready]);
        if (++ready == STAGES) ready = 0;
    };
    // Of the next tile, asked for while this one's stages go out: the pairs whose rows, and whose names, are ours.
    int row_pair[N / 16], named[NAMED];
    float weight[NAMED];
    const auto ask_pairs = [&](const Tile& tile) {
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            const int slot = first + 16 * i;
            row_pair[i] = GATED && slot < tile.count ? p.order[tile.begin + slot] : -1;
        }
#pragma unroll
        for (int i = 0; i < NAMED; i++) {
            const int slot = thread + 128 * i;
            named[i] = !GATED && slot < tile.count ? p.order[tile.begin + slot] : -1;
        }
    };
    const auto ask_weights = [&] {
#pragma unroll
        for (int i = 0; i < NAMED; i++) weight[i] = named[i] >= 0 ? token_weights[named[i]] : 0.0f;
    };
    if (blockIdx.x >= tiles) return;
    Tile tile(p.table, blockIdx.x);
    ask_pairs(tile), ask_weights();
    for (int index = blockIdx.x; index < tiles; index += gridDim.x, buffer ^= 1) {
        u32 at[N / 16];
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            const int slot = first + 16 * i;
            const u32 row = GATED ? row_pair[i] / TOP_K : tile.begin + slot;
            at[i] = slot < tile.count ? row * (IN / 8) + piece : NOTHING;
        }
        // Each of the 128 threads draws a row of weights into the cache.
        const u8* row = Rows(p, tile, thread % 64 * 4).weight + (thread / 64 ? Rows::BYTES_APART : 0);
        for (int pair = 0; pair < DRAWN && pair < PAIRS; pair++) draw(row, pair);
        const Tile next(p.table, min(index + static_cast<int>(gridDim.x), tiles - 1));
#pragma unroll 1
        for (int half = 0; half < 2 * PAIRS; half++) {
            if (half % 2 == 0 && half / 2 + DRAWN < PAIRS) draw(row, half / 2 + DRAWN);
            barrier_wait(&s.empty[stage], parity);
            if (half == 0) {
#pragma unroll
                for (int i = 0; i < NAMED; i++) {
                    const int slot = thread + 128 * i;
                    if (named[i] >= 0) s.pair[buffer][slot] = named[i], s.weight[buffer][slot] = weight[i];
                }
            }
            if (half == ASKED) ask_pairs(next);
            if (half == 2 * PAIRS - 1) ask_weights();
#pragma unroll
            for (int i = 0; i < N / 16; i++) {
                const int slot = first + 16 * i;
                if (at[i] != NOTHING) {
                    const u32 to = shared_address(s.x[stage]) + slot * 128 + (piece ^ slot % 8) * 16;
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                                 ::"r"(to), "l"(x + (static_cast<size_t>(at[i]) + half * 8) * 8) : "memory");
                }
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (under_way == LAG) {
                asm volatile("cp.async.wait_group %0;" ::"n"(LAG) : "memory");
                arrive();
            } else {
                under_way++;
            }
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        tile = next;
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    for (; under_way > 0; under_way--) arrive();
}

extern "C" __global__ void __launch_bounds__(384, 1) experts_product(
    const u16* x,  // GATED: [tokens, IN], else [pairs, IN] in the order of slots; columns in the order of the operands
    const u8* weight, const u8* scales, const float* global_scale,
    const float* token_weights,  // [pairs]; not GATED
    const int* order, const int* table,
    u16* out) {  // GATED: [pairs, ROWS] in the order of slots, columns as `down` takes them; else [pairs, ROWS]
    extern __shared__ __align__(1024) u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const Problem p{weight, scales, global_scale, order, table};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 128), barrier_init(&s.empty[i], 8);
        barrier_init_done();
    }
    __syncthreads();
    const int tiles = table[0] * TILES;
    if (threadIdx.x < 256) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        consume(p, s, tiles, out);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        produce(p, s, tiles, x, token_weights);
    }
}
