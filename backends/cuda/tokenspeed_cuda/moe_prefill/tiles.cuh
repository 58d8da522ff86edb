// Tiles of an expert's matrix: where a thread's weights are, and how they become the left operand.
//
// A tile is 128 rows: of the gate and of up 64 each, or of down. A thread has two of them, `upper` and `lower`, of
// which it loads 128 inputs at a time, as they lie in memory.
#pragma once
#include "order.cuh"

constexpr int PIECE = piece_of<FORMAT>, PAIRS = IN / 128;  // a pair of stages is 128 inputs
constexpr int CHUNKS = 32 / PIECE;                         // of a pair: 16 bytes a thread
constexpr int TILES = ROWS / (GATED ? 64 : 128);
static_assert(IN % 128 == 0 && ROWS % (GATED ? 64 : 128) == 0);

struct Problem {
    const u8* weight;           // GATED: [experts, 2, ROWS, IN], else [experts, ROWS, IN], of its format
    const u8* scales;           // FP8: a number each 128 x 128; NVFP4: each 16 inputs
    const float* global_scale;  // NVFP4: of each matrix
    const int* order;           // [pairs], see `moe_align`
    const int* table;           // [1 + blocks, 3]
};

struct Tile {
    int expert, begin, count, rows;  // of the table; the tile's place among those of a block

    __device__ __forceinline__ Tile(const int* table, int index) {
        const int* entry = table + 3 + index / TILES * 3;
        rows = index % TILES;
        expert = entry[0], begin = entry[1], count = entry[2] - begin;
    }
};

// Where a thread's weights are: the upper row of its two, and how far away the lower one is.
struct Rows {
    const u8 *weight, *scale;

    static constexpr int APART = GATED ? ROWS : 2;
    static constexpr int ROW_BYTES = IN / PIECE * 16, BLOCKS = (IN + 127) / 128;
    static constexpr size_t BYTES_APART = static_cast<size_t>(APART) * ROW_BYTES;
    static constexpr int SCALES_APART = FORMAT == NVFP4 ? APART * (IN / 16)
                                        : GATED         ? (ROWS + 127) / 128 * BLOCKS * SCALE_BYTES
                                                        : 0;

    __device__ __forceinline__ Rows(const Problem& p, const Tile& tile, int place) {
        // Rows of a warp: GATED: 8, where `down` wants them, and as many of up; else 16, of which a thread of a quad
        // gets four next to each other when they are transposed.
        const int warp = place / 32, group = place % 32 / 4;
        const int row = GATED ? source_of<FORMAT>(tile.rows * 64 + warp * 8 + group)
                              : tile.rows * 128 + warp * 16 + group / 2 * 4 + group % 2;
        const size_t matrix = GATED ? 2 * static_cast<size_t>(tile.expert) : tile.expert;
        weight = p.weight + (matrix * ROWS + row) * ROW_BYTES + place % 4 * 16;
        if constexpr (FORMAT == NVFP4) scale = p.scales + (matrix * ROWS + row) * (IN / 16) + place % 4 * 2;
        if constexpr (FORMAT == FP8) {
            scale = p.scales + (matrix * ((ROWS + 127) / 128) + row / 128) * BLOCKS * SCALE_BYTES;
        }
    }
};

// What sums of a row are counted in, with FP8: the scale of the last 128 inputs. So weights stay as they are, and it is
// sums that are multiplied, when the unit changes. Beside a far larger scale a small one is left to the weights.
struct Unit {
    float value = 0.0f, change = 0.0f;  // before the first inputs there are no sums to change
    u32 bias = E4M3_BIAS;

    __device__ __forceinline__ void take(float scale) {
        const float least = fmaxf(fabsf(value) * 0x1p-40f, 0x1p-120f), next = fabsf(scale) > least ? scale : least;
        change = __fdividef(value, next);
        bias = both(__fdividef(scale, next) * 0x1p120f);
        value = next;
    }
};

// 128 inputs of a thread's two rows.
struct Weights {
    u32 upper[CHUNKS][4], lower[CHUNKS][4];
    u32 scale[2];

    __device__ __forceinline__ void load(const Rows& rows, int pair) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const u8* at = rows.weight + (pair * CHUNKS + c) * 64;
            const uint4 u = load_once(at), l = load_once(at + Rows::BYTES_APART);
            upper[c][0] = u.x, upper[c][1] = u.y, upper[c][2] = u.z, upper[c][3] = u.w;
            lower[c][0] = l.x, lower[c][1] = l.y, lower[c][2] = l.z, lower[c][3] = l.w;
        }
        if constexpr (FORMAT == NVFP4) {
            scale[0] = load_short(rows.scale + pair * 8);
            scale[1] = load_short(rows.scale + Rows::SCALES_APART + pair * 8);
        } else if constexpr (FORMAT == FP8 && SCALE_BYTES == 2) {
            scale[0] = load_short(rows.scale + pair * 2) << 16;
            scale[1] = load_short(rows.scale + Rows::SCALES_APART + pair * 2) << 16;
        } else if constexpr (FORMAT == FP8) {
            scale[0] = load_word(rows.scale + pair * 4);
            scale[1] = load_word(rows.scale + Rows::SCALES_APART + pair * 4);
        }
    }

    // The left operands of four steps: the first half of the inputs, or the second.
    template <int HALF>
    __device__ __forceinline__ void widen(u32 (&a)[4][4], const Unit& upper_unit, const Unit& lower_unit) const {
        u32 upper_scales[2] = {upper_unit.bias}, lower_scales[2] = {lower_unit.bias};
        if constexpr (FORMAT == NVFP4) widen_scales(scale[0], scale[1], upper_scales, lower_scales);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int step = 4 * HALF + j, c = step * CHUNKS / 8;
            operand<FORMAT>(a[j], upper[c], lower[c], upper_scales, lower_scales, step % (8 / CHUNKS));
        }
    }
};
