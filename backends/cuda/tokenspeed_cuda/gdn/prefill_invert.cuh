// T = (I + L)^-1 diag(beta) of 64 tokens, by the four warps of a warpgroup.
//
// It goes by blocks of 16. Its diagonal blocks D come from forward substitution in float32, a lane a column.
// Warp b then finds the blocks below D_b, transposed so that each product's left operand is the last one's result:
//     U_ab^T = -(sum over c from b to a - 1 of U_cb^T L_ac^T) D_a^T.
// No number in here is larger than the inverse's own, so float16 operands do.
#pragma once

#include "prefill_stage.cuh"

// Column j of a block, what is below the diagonal.
__device__ __forceinline__ void load_column(float (&l)[16], u32 block, int j) {
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < 16; i += 4) {
        const uint4 four = load_shared4(block + j * BLOCK_ROW + i * 4);
        l[i] = from_bits(four.x);
        l[i + 1] = from_bits(four.y);
        l[i + 2] = from_bits(four.z);
        l[i + 3] = from_bits(four.w);
    }
}

// The inverse of a warp's diagonal block of I + L, over that of L.
__device__ __forceinline__ void substitute(u32 tile, u32 block, int warp, int lane) {
    const int column = lane % 16;
    float x[16], l[2][16];
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = i == column ? 1.f : 0.f;
    load_column(l[0], block, 0);
#pragma unroll
    for (int j = 0; j < 15; j++) {
        if (j < 14) load_column(l[(j + 1) % 2], block, j + 1);
#pragma unroll
        for (int i = j + 1; i < 16; i++) x[i] = fmaf(-l[j % 2][i], x[j], x[i]);
    }
    if (lane < 16) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const u32 to = piece_at(tile, 16 * warp + i, 2 * warp + column / 8) + column % 8 * 2;
            store_shared16(to, u16(pack_f16(x[i], 0.f)));
        }
    }
}

// A block of a tile as four tiles of 8 x 8: (rows, columns) = (low, low), (low, high), (high, low), (high, high).
__device__ __forceinline__ u32 block_at(u32 tile, int a, int b, int lane) {
    return piece_at(tile, 16 * a + lane / 16 * 8 + lane % 8, 2 * b + lane / 8 % 2);
}

// c [16, 16] += a [16, 16] b^T, b a block of a tile.
__device__ __forceinline__ void add_product(float (&c)[2][4], const u32 (&a)[4], u32 address) {
    u32 b[4];
    load_tiles(b, address);
    mma_f16(c[0], a, b[0], b[1]);
    mma_f16(c[1], a, b[2], b[3]);
}

// Column B of blocks of the inverse, times beta, transposed, as fragments.
template <int B>
__device__ __forceinline__ void invert(u32 (&t)[4][4], u32 stage, int lane) {
    const u32 tile = stage + AT_T;
    const u32 betas = stage + AT_BETA + (16 * B + lane / 4) * 4;
    const float beta[2] = {load_shared_float(betas), load_shared_float(betas + 32)};
    u32 u[4][4] = {};
    load_tiles_transposed(u[B], block_at(tile, B, B, lane));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = unpack_f16(u[B][i]);
        t[B][i] = pack_f16(pair.x * beta[i % 2], pair.y * beta[i % 2]);
    }
#pragma unroll
    for (int a = B + 1; a < 4; a++) {
        float sum[2][4] = {}, product[2][4] = {};
#pragma unroll
        for (int c = B; c < a; c++) add_product(sum, u[c], block_at(tile, a, c, lane));
        const u32 left[4] = {pack_f16(sum[0][0], sum[0][1]), pack_f16(sum[0][2], sum[0][3]),
                             pack_f16(sum[1][0], sum[1][1]), pack_f16(sum[1][2], sum[1][3])};
        add_product(product, left, block_at(tile, a, a, lane));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float low = -product[i / 2][i % 2 * 2], high = -product[i / 2][i % 2 * 2 + 1];
            u[a][i] = pack_f16(low, high);
            t[a][i] = pack_f16(low * beta[i % 2], high * beta[i % 2]);
        }
    }
}
