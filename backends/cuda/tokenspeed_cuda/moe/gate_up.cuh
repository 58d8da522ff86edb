// The first half: silu(gate x) · up x of tokens and their experts, times the routing weight.
//
// A tile is 8 rows of an expert's gate and the same 8 of up, so that a thread has sums of both. All tiles, in the order
// of experts, are shared out evenly among teams: a team reads one stretch of memory and seldom changes its expert. Its
// warps share out the inputs and keep their part of up to 8 rows of x in registers.
#pragma once
#include "experts.cuh"

namespace gate_up {

constexpr int ROW_BYTES = HIDDEN * 4 / CHUNK * 16, CHUNKS = ROW_BYTES / 64 / TEAM, TILES = INTER / 8;
constexpr int SCALE_ROW = 8 * CHUNKS;  // NVFP4: of a warp, in bytes
constexpr int STAGE = CHUNKS * 1024 + (FORMAT == NVFP4 ? 16 * SCALE_ROW : 64);  // a tile, a warp's part
constexpr int FP8_ROWS = (INTER + 127) / 128, FP8_BLOCKS = HIDDEN / 128;
static_assert(ROW_BYTES % (64 * TEAM) == 0 && INTER % 8 == 0);
static_assert(CHUNKS % 2 == 0 && (FORMAT != NVFP4 || SCALE_ROW == 16));

struct Lists {
    float factor_of[MOST_ROWS];   // of rows: routing weight and scale of down
    float2 scale_of[MOST_ROWS];   // of entries: scales of gate and of up
    u8 token_of[MOST_ROWS];       // of rows
};
using Partial = float4[2][TEAM][32];

// What a thread copies of the tiles from `item` on, in order.
struct Source {
    const u8 *weight, *scales;        // of this thread, for the first tile of expert 0
    const u8 *weight_at, *scales_at;  // for the next tile
    int item, end, left;              // tiles left in the entry

    __device__ __forceinline__ Source(const u8* w, const u8* s, int begin, int end) : item(begin), end(end), left(0) {
        const int warp = threadIdx.x / 32 % TEAM, lane = threadIdx.x % 32;
        weight = w + lane / 8 * ROW_BYTES + warp * (CHUNKS * 64) + lane % 8 * 16;  // whole lines of 4 rows at a time
        if constexpr (FORMAT == NVFP4) {
            scales = s + (lane / 8 % 2 * INTER + lane % 8) * (HIDDEN / 16) + warp * SCALE_ROW;
        } else {
            constexpr int BLOCKS = CHUNKS / 2;  // of 128 inputs, of gate and of up
            scales = s + (lane / BLOCKS % 2 * FP8_ROWS * FP8_BLOCKS + warp * BLOCKS + lane % BLOCKS) * 4;
        }
    }

    __device__ __forceinline__ void copy_next(u32 to, const Experts& experts) {
        if (item >= end) return;
        const int lane = threadIdx.x % 32;
        if (left == 0) {
            const u32 expert = experts.entries[item / TILES] & 0xffff, tile = item % TILES;
            left = TILES - tile;
            weight_at = weight + (static_cast<size_t>(expert) * (2 * INTER) + tile * 8) * ROW_BYTES;
            scales_at = FORMAT == NVFP4
                ? scales + (static_cast<size_t>(expert) * (2 * INTER) + tile * 8) * (HIDDEN / 16)
                : scales + static_cast<size_t>(expert) * (2 * FP8_ROWS * FP8_BLOCKS * 4);
        }
        const u32 at = to + lane % 8 / 4 * 1024 + lane / 8 * 64 + lane % 4 * 16;
#pragma unroll
        for (int c = 0; c < CHUNKS; c += 2) {
#pragma unroll
            for (int rows = 0; rows < 8; rows += 4) {
                const u8* from = weight_at + rows * ROW_BYTES + c * 64;
                queue_copy<16>(at + c * 1024 + rows * 64, from);
                queue_copy<16>(at + c * 1024 + 512 + rows * 64, from + INTER * ROW_BYTES);
            }
        }
        weight_at += 8 * ROW_BYTES;
        if constexpr (FORMAT == NVFP4) {
            if (lane < 16) queue_copy<SCALE_ROW>(to + CHUNKS * 1024 + lane * SCALE_ROW, scales_at);
            scales_at += 8 * (HIDDEN / 16);
        } else if (lane < CHUNKS) {
            queue_copy<4>(to + CHUNKS * 1024 + lane * 4, scales_at + (TILES - left) / 16 * (FP8_BLOCKS * 4));
        }
        item++, left--;
    }

    __device__ __forceinline__ void fill(u32 stage, const Experts& experts) {
        copy_next(stage, experts);
        queue_commit();
    }
};

__device__ __forceinline__ void multiply(float (&sum)[4], u32 stage, const u32 (&x)[CHUNKS][PIECE / 2]) {
    const u32 scales = stage + CHUNKS * 1024;
    if constexpr (FORMAT == NVFP4) {
        float part[2][4] = {};  // two chains of products are faster than one
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            u32 a[STEPS][4];
            take_chunk(a, stage + c * 1024, scales + c * 8, SCALE_ROW);
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                mma_bf16(part[step % 2], a[step], x[c][2 * step], x[c][2 * step + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = part[0][i] + part[1][i];
    } else {
#pragma unroll
        for (int block = 0; block < CHUNKS / 2; block++) {
            float part[4] = {};
#pragma unroll
            for (int c = 2 * block; c < 2 * block + 2; c++) {
                u32 a[STEPS][4];
                take_chunk(a, stage + c * 1024, 0, 0);
#pragma unroll
                for (int step = 0; step < STEPS; step++) mma_bf16(part, a[step], x[c][2 * step], x[c][2 * step + 1]);
            }
            const float gate = load_shared_float(scales + block * 4);
            const float up = load_shared_float(scales + (CHUNKS / 2 + block) * 4);
            sum[0] += part[0] * gate, sum[1] += part[1] * gate, sum[2] += part[2] * up, sum[3] += part[3] * up;
        }
    }
}

// Where a column of `inner` is: those that a quad of threads multiplies at once stand together, in their order.
__device__ __forceinline__ int place_of(int column) {
    const int i = column % 8, within = FORMAT == NVFP4 ? i % 4 * 2 + i / 4 : i / 4 * 4 + i % 2 * 2 + i % 4 / 2;
    return column / CHUNK * CHUNK + column % PIECE / 8 * 32 + column % CHUNK / PIECE * 8 + within;
}

// What is known of rows and entries. Scales are read while the first weights are on their way.
__device__ __forceinline__ void list_rows(
    Lists& lists, const Experts& experts, int tokens, const float* gate_up_scales, const float* down_scales,
    int entries) {
    for (int p = threadIdx.x; p < tokens * TOP_K; p += THREADS) {
        const int expert = experts.expert_at[p], token = p / TOP_K;
        if (expert != 0xffff) {
            float sum = 0;  // an expert may occur twice
            for (int i = token * TOP_K; i < (token + 1) * TOP_K; i++) {
                if (experts.expert_at[i] == expert) sum += experts.weight_at[i];
            }
            const int row = experts.row_of(expert, token);
            lists.token_of[row] = token;
            lists.factor_of[row] = FORMAT == NVFP4 ? sum * (down_scales[expert] * 256.0f) : sum;
        }
    }
    for (int i = threadIdx.x; i < entries; i += THREADS) {
        const int expert = experts.entries[i] & 0xffff;
        const float* own = gate_up_scales + expert * 2;
        lists.scale_of[i] = FORMAT == NVFP4 ? make_float2(own[0] * 256.0f, own[1] * 256.0f) : make_float2(1.0f, 1.0f);
    }
    __syncthreads();
}

// A thread's part of the entry's rows of x.
__device__ __forceinline__ void load_x(
    u32 (&part)[CHUNKS][PIECE / 2], const Experts& experts, const u8* token_of, int entry, const u16* x, int x_stride) {
    const int warp = threadIdx.x / 32 % TEAM, lane = threadIdx.x % 32;
    const int expert = experts.entries[entry] & 0xffff, nth = (experts.entries[entry] >> 16) * 8 + lane / 4;
    const bool there = nth < __popc(experts.tokens_of[expert]);
    const int token = there ? token_of[experts.first_row[expert] + nth] : 0;
    const u16* from = x + static_cast<size_t>(token) * x_stride + warp * (CHUNKS * CHUNK) + lane % 4 * PIECE;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
        for (int i = 0; i < PIECE / 8; i++) {
            const uint4* at = reinterpret_cast<const uint4*>(from + c * CHUNK) + i;
            words_of(part[c] + 4 * i, there ? *at : uint4{0, 0, 0, 0});
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) order_like_weights<FORMAT>(part[c]);
    __syncwarp();
}

// Copies and multiplies a team's tiles. `queue`: DEPTH stages of the warp.
__device__ __forceinline__ void run(
    Source& source, int begin, u32 queue, const Experts& experts, const Lists& lists, Partial& partial, const u16* x,
    int x_stride, u16* inner, int tokens) {
    const int warp = threadIdx.x / 32 % TEAM, lane = threadIdx.x % 32, end = source.end;
    u32 part_of_x[CHUNKS][PIECE / 2];
    int left = 0, entry = begin / TILES - 1, buffer = 0;  // tiles left in the entry
    u32 stage = queue;
    for (int item = begin, turn = 0; item < end; item++, turn++, buffer ^= 1) {
        queue_wait<DEPTH - 1>();
        __syncwarp();  // threads copy for each other
        if (left == 0) {
            entry++, left = item == begin ? TILES - begin % TILES : TILES;
            if (tokens > 1 || item == begin) load_x(part_of_x, experts, lists.token_of, entry, x, x_stride);
        }
        left--;
        float sum[4] = {};
        multiply(sum, stage, part_of_x);
        partial[buffer][warp][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        __syncwarp();
        source.fill(stage, experts);
        stage = stage == queue + (DEPTH - 1) * STAGE ? queue : stage + STAGE;
        team_barrier();  // the other buffer is free again one round later

        // Four columns by a warp, and not always by the same one; others often have nothing to do.
        for (int i = (warp + turn) % TEAM * 32 + lane; i < 64; i += 32 * TEAM) {
            const int row = i % 8, column = i / 8;
            const u32 of = experts.entries[entry];
            const int expert = of & 0xffff, nth = (of >> 16) * 8 + column;
            if (nth >= __popc(experts.tokens_of[expert])) continue;
            const float* sums = reinterpret_cast<const float*>(&partial[buffer][0][row * 4 + column / 2]) + column % 2;
            float gate = 0, up = 0;
#pragma unroll
            for (int w = 0; w < TEAM; w++) gate += sums[w * 128], up += sums[w * 128 + 2];
            const float2 scale = lists.scale_of[entry];
            gate *= scale.x, up *= scale.y;
            const int at = experts.first_row[expert] + nth;
            const float value = gate / (1.0f + __expf(-gate)) * up * lists.factor_of[at];
            inner[static_cast<size_t>(at) * INTER + place_of(item % TILES * 8 + row)] = float_to_bf16(value);
        }
    }
}

}  // namespace gate_up
