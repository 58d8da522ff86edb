// The second half: sums of the down projections of a token's experts.
//
// An item is ROWS rows of an expert's matrix. Those of the same rows follow one another for all experts here, and teams
// share out the items evenly: a team adds up experts in registers, one set of sums for 8 tokens and 16 rows. Five warps
// share out the inputs. Where teams share rows, each writes its sums, and the last to do so adds them up in order.
#pragma once
#include "experts.cuh"

namespace down {

constexpr int ROW_BYTES = INTER * 4 / CHUNK * 16, SPLIT = 5, CHUNKS = ROW_BYTES / 64 / SPLIT;  // of a warp
constexpr int TILES = 1, ROWS = 16 * TILES * (TEAM / SPLIT), ALL_TOKENS = 8 * OCTETS;
constexpr int SCALES = FORMAT == NVFP4 ? 16 * 8 * CHUNKS : 16;  // bytes a tile
constexpr int TILE = CHUNKS * 1024 + SCALES, ITEM = TILES * TILE, STAGE = ITEMS * ITEM;
constexpr int FP8_ROWS = (HIDDEN + 127) / 128, FP8_BLOCKS = INTER / 128;
constexpr int PITCH = INTER + 32;  // of staged rows: two of them are apart in banks
static_assert(ROW_BYTES % (64 * SPLIT) == 0 && HIDDEN % ROWS == 0);
static_assert(FORMAT == NVFP4 ? CHUNKS <= 2 : CHUNKS == 2 && ROWS <= 128 && 128 % ROWS == 0);

using Partial = float4[TEAM][TILES][OCTETS][32];

// What a thread copies of the items from `item` on, in order; and how many of them, of the same rows, are a batch.
struct Source {
    const u8 *weight, *scales;  // of this thread, of expert 0
    int item, end, place, here;
    int rows;                   // FP8: the item's first

    __device__ __forceinline__ Source(const u8* w, const u8* s, int begin, int end, int here)
        : item(begin), end(end), place(begin % here), here(here), rows(begin / here * ROWS) {
        const int warp = threadIdx.x / 32 % TEAM, lane = threadIdx.x % 32, split = warp % SPLIT;
        const size_t row = rows + warp / SPLIT * TILES * 16;
        weight = w + (row + lane / 4) * ROW_BYTES + split * (CHUNKS * 64) + lane % 4 * 16;
        scales = FORMAT == NVFP4 ? s + (row + lane) * (INTER / 16) + split * 8 * CHUNKS : s + split * 4;
    }

    __device__ __forceinline__ int batch() const { return min(min(ITEMS, here - place), end - item); }

    __device__ __forceinline__ void fill(u32 to, const Experts& experts) {
        const int lane = threadIdx.x % 32, count = batch();
#pragma unroll
        for (int b = 0; b < ITEMS; b++) {
            if (b < count) copy(to + b * ITEM, experts.here[place + b], lane);
        }
        queue_commit();
        item += count, place += count;
        if (place == here) {
            place = 0, rows += ROWS, weight += ROWS * ROW_BYTES;
            if constexpr (FORMAT == NVFP4) scales += ROWS * (INTER / 16);
        }
    }

    __device__ __forceinline__ void copy(u32 to, u32 expert, int lane) const {
        const u8* from = weight + static_cast<size_t>(expert) * (HIDDEN * ROW_BYTES);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                queue_copy<16>(to + t * TILE + c * 1024 + lane * 16, from + t * 16 * ROW_BYTES + c * 64);
                queue_copy<16>(to + t * TILE + c * 1024 + 512 + lane * 16, from + (t * 16 + 8) * ROW_BYTES + c * 64);
            }
            const u32 to_scales = to + t * TILE + CHUNKS * 1024;
            if constexpr (FORMAT == NVFP4) {
                const u8* at = scales + static_cast<size_t>(expert) * (HIDDEN * (INTER / 16)) + t * 16 * (INTER / 16);
                if (lane < 16) queue_copy<8 * CHUNKS>(to_scales + lane * 8 * CHUNKS, at);
            } else if (t == 0 && lane == 0) {
                queue_copy<4>(to_scales, scales + (expert * FP8_ROWS + rows / 128) * (FP8_BLOCKS * 4));
            }
        }
    }
};

// The part of a row that a thread multiplies; zeros where there is none.
__device__ __forceinline__ void load_inputs(u32 (&x)[CHUNKS][PIECE / 2], const u16* row) {
    const int first = threadIdx.x / 32 % TEAM % SPLIT * CHUNKS * CHUNK + threadIdx.x % 4 * 8;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
        for (int i = 0; i < PIECE / 8; i++) {
            const uint4* at = reinterpret_cast<const uint4*>(row + first + c * CHUNK + i * 32);
            words_of(x[c] + 4 * i, row ? *at : uint4{0, 0, 0, 0});
        }
    }
}

__device__ __forceinline__ int first_octet(u32 mask) { return OCTETS == 1 ? 0 : (__ffs(mask) - 1) / 8; }

// sum += rows of an expert's matrix by inputs of its tokens; `x` has those of its first octet, and is then used up
template <typename InputsOf>
__device__ __forceinline__ void multiply(
    float (&sum)[TILES][OCTETS][4], u32 item, u32 mask, u32 (&x)[CHUNKS][PIECE / 2], InputsOf inputs_of) {
    u32 a[TILES][CHUNKS][STEPS][4];
    const float factor = FORMAT == FP8 ? load_shared_float(item + CHUNKS * 1024) : 1.0f;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const u32 from = item + t * TILE;
            take_chunk(a[t][c], from + c * 1024, from + CHUNKS * 1024 + c * 8, 8 * CHUNKS);
        }
    }
#pragma unroll
    for (int o = 0; o < OCTETS; o++) {
        if (OCTETS > 1 && (mask >> 8 * o & 255) == 0) continue;
        if (OCTETS > 1 && (mask & ((1u << 8 * o) - 1))) inputs_of(x, o);
        float part[TILES][4] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    mma_bf16(FORMAT == FP8 ? part[t] : sum[t][o], a[t][c][step], x[c][2 * step], x[c][2 * step + 1]);
                }
            }
        }
        if constexpr (FORMAT == FP8) {
#pragma unroll
            for (int t = 0; t < TILES; t++) {
#pragma unroll
                for (int i = 0; i < 4; i++) sum[t][o][i] += part[t][i] * factor;
            }
        }
    }
}

// Whether this team is the last of `teams` to come here; the word is then 0 again. What the others wrote before they
// came is visible to all threads of the last one.
__device__ __forceinline__ bool last_team(u32* word, u32 teams, u32& flag) {
    team_barrier();
    if (threadIdx.x % (32 * TEAM) == 0) {
        asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                     : "=r"(flag) : "l"(word), "r"(teams - 1) : "memory");
    }
    team_barrier();
    return flag == teams - 1;
}

// Which items a team has: `team` of `teams` that have any.
struct Share {
    int here, total, teams, team, begin, end;

    __device__ __forceinline__ Share(int here, int team, int most) : here(here), total(here * (HIDDEN / ROWS)) {
        teams = min(most, total), this->team = team;
        begin = total * min(team, teams) / teams, end = total * min(team + 1, teams) / teams;
    }
};

// `queue`: STAGES stages of the warp. `rows`: staged rows of `inner`, if they are.
template <int STAGES>
__device__ __forceinline__ void run(
    Source& source, const Share& share, u32 queue, const Experts& experts, Partial& partial, u32& flag,
    const u16* inner, const u16 (*rows)[PITCH], float* parts, u32* arrived, u16* y, int tokens) {
    const int warp = threadIdx.x / 32 % TEAM, lane = threadIdx.x % 32;
    const int here = share.here, total = share.total, teams = share.teams, team = share.team;
    const int begin = share.begin, end = share.end;
    // Team t has the items from total * t / teams on, so an item is that of the last team that begins there.
    auto team_of = [&](int item) { return ((item + 1) * teams - 1) / total; };
    auto inputs_of = [&](u32 (&x)[CHUNKS][PIECE / 2], u32 expert, int octet) {
        const int token = octet * 8 + lane / 4, row = experts.row_of(expert, token);
        const bool there = experts.tokens_of[expert] >> token & 1;
        if constexpr (STAGED > 0) load_inputs(x, there ? rows[row] : nullptr);
        else load_inputs(x, there ? inner + row * INTER : nullptr);
    };

    float sum[TILES][OCTETS][4] = {};
    int place = begin % here, tile = begin / here, tile_begin = begin;
    u32 stage = queue;
    for (int item = begin; item < end;) {
        const int count = min(min(ITEMS, here - place), end - item);
        queue_wait<STAGES - 1>();
        __syncwarp();  // scales are copied for others
#pragma unroll
        for (int b = 0; b < ITEMS; b++) {
            if (b < count) {
                const u32 expert = experts.here[place + b];
                const u32 mask = experts.tokens_of[expert];
                u32 x[CHUNKS][PIECE / 2];
                inputs_of(x, expert, first_octet(mask));
                multiply(sum, stage + b * ITEM, mask, x,
                         [&](u32 (&other)[CHUNKS][PIECE / 2], int octet) { inputs_of(other, expert, octet); });
            }
        }
        __syncwarp();
        source.fill(stage, experts);
        stage = stage == queue + (STAGES - 1) * STAGE ? queue : stage + STAGE;
        item += count, place += count;
        if (place < here && item < end) continue;

        // The rows are done, or the block is.
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int o = 0; o < OCTETS; o++) {
                float(&v)[4] = sum[t][o];
                partial[warp][t][o][lane] = make_float4(v[0], v[1], v[2], v[3]);
                v[0] = v[1] = v[2] = v[3] = 0;
            }
        }
        team_barrier();
        const bool whole = tile_begin == tile * here && place == here;
        float* own = parts + (team * 2 + (tile_begin != begin)) * (ALL_TOKENS * ROWS);
        for (int i = threadIdx.x % (32 * TEAM); i < tokens * ROWS; i += 32 * TEAM) {
            const int token = i / ROWS, row = i % ROWS, group = row / (16 * TILES), t = row / 16 % TILES;
            const int at = row % 8 * 4 + token % 8 / 2;
            float value = 0;
#pragma unroll
            for (int w = 0; w < SPLIT; w++) {
                const float* sums = reinterpret_cast<const float*>(&partial[group * SPLIT + w][t][token / 8][at]);
                value += sums[row % 16 / 8 * 2 + token % 2];
            }
            if (whole) y[token * HIDDEN + tile * ROWS + row] = float_to_bf16(value);
            else own[i] = value;
        }
        if (!whole) {
            const int from = tile * here, first = team_of(from), last = team_of(from + here - 1);
            if (last_team(arrived + 1 + tile, last - first + 1, flag)) {
                const bool second = total * first / teams < from;  // the first block's sums before were of other rows
                for (int i = threadIdx.x % (32 * TEAM); i < tokens * ROWS; i += 32 * TEAM) {
                    float value = parts[(first * 2 + second) * (ALL_TOKENS * ROWS) + i];
#pragma unroll 4
                    for (int b = first + 1; b <= last; b++) value += parts[b * 2 * (ALL_TOKENS * ROWS) + i];
                    y[i / ROWS * HIDDEN + tile * ROWS + i % ROWS] = float_to_bf16(value);
                }
            }
        }
        team_barrier();
        if (place == here) place = 0, tile++;
        tile_begin = item;
    }
}

}  // namespace down
