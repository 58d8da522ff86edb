// A consuming warpgroup: 64 rows of the state S [d_v, d_k], in float32 registers from a sequence's first chunk to its
// last. Held as the other way round of the usual, values down and tokens across,
//     X = V^T - S K^T diag(f),  Delta = X T^T,  O = S Q^T diag(f) + Delta A^T,  S <- f_C S + Delta diag(w) K
// (f_i: decay from the chunk's start to token i, w_j: from token j to its end), the left operand of every product is
// what the product before left in registers, and all right ones lie in shared memory as the producers put them there.
//
// Left operands are float16, 11 bits where bfloat16 has 8, so V and S are held in a unit, a power of two at least as
// large as any |V| seen, which is fitted to S anew before every eighth chunk. Rows of S grow at most by the length of
// what is written to them, thus by the root of the number of tokens: float16's range is never left.
#pragma once

#include "prefill_stage.cuh"

// The unit is 2^(unit - 126): numbers whose biased exponent is `unit` are just below 1 in it.
constexpr int PLAIN = 126, HIGHEST = 252;
constexpr u32 JUMPING = 3;  // barrier

// V^T of a warp's 16 rows as fragments, 16 tokens each.
__device__ __forceinline__ void load_values(u32 (&v)[4][4], u32 tile, int warp, int lane) {
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        load_tiles_transposed(v[pair], piece_at(tile, 16 * pair + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
    }
}

// The largest biased exponent among a warp's values of a chunk.
__device__ __forceinline__ int exponent_of(const u32 (&v)[4][4]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) most = larger_halves(most, v[i / 4][i % 4] & 0x7fff7fffu);
    return int(largest_of_warp(larger_halves(most, most >> 16) & 0xffff) >> 7);
}

// 2^power, or 0 for what is less than any float.
__device__ __forceinline__ float power_of_two(int power) {
    return power < -126 ? 0.f : from_bits(u32(power + 127) << 23);
}

// The largest biased exponent in a warp's rows of a state.
__device__ __forceinline__ int exponent_of(const float (&s)[64]) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 64; i++) most = fmaxf(most, fabsf(s[i]));
    return int(largest_of_warp(to_bits(most)) >> 23);
}

// Brings S to the least unit that holds it and is not below `least`, and gives that.
__device__ __forceinline__ int fit_unit(float (&s)[64], int unit, int least = 0) {
    const int fitting = min(max(max(exponent_of(s) + unit - PLAIN, unit - 120), least), HIGHEST);
    const float factor = power_of_two(unit - fitting);
#pragma unroll
    for (int i = 0; i < 64; i++) s[i] *= factor;
    return fitting;
}

__device__ __forceinline__ void round_state(u32 (&operand)[8][4], const float (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 32; i++) operand[i / 4][i % 4] = pack_f16(s[2 * i], s[2 * i + 1]);
}

// d = S B^T of a tile pair B [64, 128].
__device__ __forceinline__ void read_state(float (&d)[32], const u32 (&operand)[8][4], u32 tile) {
#pragma unroll
    for (int step = 0; step < 8; step++) {
        wgmma::mma_f16(d, operand[step], wgmma::k_major(tile + step / 4 * PANEL + step % 4 * 32), step > 0);
    }
    wgmma::commit();
}

// Outputs of a chunk as bfloat16, token by token, into a warp's buffer.
__device__ __forceinline__ void gather_outputs(const float (&out)[32], float unit, u32 buffer, int lane) {
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        const int token = 16 * pair + lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
        u32 packed[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            packed[i] = pack_bf16(out[8 * pair + 2 * i] * unit, out[8 * pair + 2 * i + 1] * unit);
        }
        store_tiles_transposed(buffer + token * 32 + ((half ^ (token >> 2 & 1)) << 4), packed);
    }
    __syncwarp();
}

// From there to device memory, each warp its 16 columns.
__device__ __forceinline__ void store_outputs(u32 buffer, u16* to, int left, int lane) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const int token = 16 * part + lane / 2, half = lane % 2;
        const uint4 row = load_shared4(buffer + token * 32 + ((half ^ (token >> 2 & 1)) << 4));
        if (token < left) *reinterpret_cast<uint4*>(to + (long long)token * (V_HEADS * D) + half * 8) = row;
    }
    __syncwarp();
}

// A warp's rows of a state, in float32 in memory; null: zeros.
__device__ __forceinline__ void load_state(float (&s)[64], const float* rows) {
#pragma unroll
    for (int i = 0; i < 32; i++) {  // i even: a row's pair; odd: the pair eight rows below
        const float* at = rows + i % 2 * 8 * D + i / 2 * 8;
        const float2 pair = rows ? *reinterpret_cast<const float2*>(at) : make_float2(0.f, 0.f);
        s[2 * i] = pair.x;
        s[2 * i + 1] = pair.y;
    }
}

// S <- S M + R: past a segment, by what pass 1 found that it leaves of nothing (R) and of unit vectors (M).
__device__ __forceinline__ int jump(float (&s)[64], int unit, const float* found, int offset, u32 tile, int thread) {
#pragma unroll 8
    for (int at = thread; at < D * D / 4; at += 128) {
        const float4 m = reinterpret_cast<const float4*>(found + D * D)[at];
        const u32 row = at / 32, quad = at % 32;
        const u32 to = piece_at(tile + quad / 16 * 2 * PANEL, row, quad % 16 / 2) + quad % 2 * 8;
        store_shared2(to, pack_f16(m.x, m.y), pack_f16(m.z, m.w));
    }
    float sum[64];
    load_state(sum, found + offset);
    unit = fit_unit(s, unit, exponent_of(sum));
    u32 operand[8][4];
    round_state(operand, s);
#pragma unroll
    for (int i = 0; i < 64; i++) s[i] = sum[i] * power_of_two(PLAIN - unit);
    fence_async_shared();
    group_barrier<128>(JUMPING);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < 8; step++) {
        wgmma::mma_f16_rows(s, operand[step], wgmma::mn_major(tile + step * 2048, 2 * PANEL));
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::pin(s);
    group_barrier<128>(JUMPING);
    return unit;
}

__device__ __forceinline__ void consume(const Call& call, const Sequence& seq, const Walk& walk, u32 shared,
                                        Barriers* barriers, int first_value) {
    const int thread = threadIdx.x % 128, group = threadIdx.x / 128, warp = thread / 32, lane = thread % 32;
    const int column = 2 * (lane % 4), row = 64 * group + 16 * warp + lane / 4;
    float s[64];
    load_state(s, walk.from ? walk.from + row * D + column : nullptr);
    if (PASS == 1 && walk.of_units) {
#pragma unroll
        for (int i = 0; i < 64; i++) s[i] = row + i / 2 % 2 * 8 == column + i / 4 * 8 + i % 2 ? 1.f : 0.f;
    }
    int unit = PLAIN;
    for (int i = 0; PASS == 2 && i < walk.jump_count; i++) {
        const float* found = walk.jumps + (long long)i * JUMP;
        unit = jump(s, unit, found, (first_value + row) * D + column, shared + AT_JUMP, thread);
    }

    const u32 values = AT_V + group * PANEL, buffer = shared + AT_OUT + group * PANEL + warp * (PANEL / 4);
    u16* o = call.o + (seq.token * V_HEADS + seq.head) * D + first_value + 64 * group + 16 * warp;
    float x[32], out[32];
    u32 operand[8][4];
    int chunk = 0;
    unit = fit_unit(s, unit);
    round_state(operand, s);
    barrier_wait(&barriers->full[0], 0);
    do {
        const u32 stage = shared + chunk % STAGES * STAGE;
        wgmma::fence();
        read_state(x, operand, stage + AT_K);
        wgmma::fence();
        read_state(out, operand, stage + AT_Q);
        if (PASS != 1 && chunk > 0) {
            store_outputs(buffer, o, CHUNK, lane);
            o += CHUNK * V_HEADS * D;
        }

        u32 v[4][4];
        load_values(v, stage + values, warp, lane);
        if (PASS == 1 && walk.of_units) {
#pragma unroll
            for (int i = 0; i < 16; i++) v[i / 4][i % 4] = 0;
        }
        const int wanted = min(max(unit, exponent_of(v)), HIGHEST);
        const float shift = power_of_two(unit - wanted);
        unit = wanted;
        const u32 inverse_unit = u32(2 * PLAIN + 1 - unit << 7) * 0x10001u;
        float2 f[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            f[i] = load_shared_floats(stage + AT_FROM_START + (i * 8 + column) * 4);
            f[i].x *= shift;
            f[i].y *= shift;
        }
        wgmma::wait<1>();
        wgmma::pin(x);
        u32 left[4][4];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const u32 value = multiply_bf16(v[i / 4][i % 4], inverse_unit);
            left[i / 4][i % 4] = pack_f16(fmaf(-f[i / 2].x, x[2 * i], low_to_float(value)),
                                          fmaf(-f[i / 2].y, x[2 * i + 1], high_to_float(value)));
        }
        wgmma::fence();
#pragma unroll
        for (int step = 0; step < 4; step++) {
            wgmma::mma_f16(x, left[step], wgmma::k_major(stage + AT_T + step * 32), step > 0);
        }
        wgmma::commit();

        wgmma::wait<1>();
        wgmma::pin(out);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            out[2 * i] *= f[i / 2].x;
            out[2 * i + 1] *= f[i / 2].y;
        }
        const float decay = load_shared_float(stage + AT_FROM_START + (CHUNK - 1) * 4) * shift;
#pragma unroll
        for (int i = 0; i < 64; i++) s[i] *= decay;

        float2 to_end[8];
#pragma unroll
        for (int i = 0; i < 8; i++) to_end[i] = load_shared_floats(stage + AT_TO_END + (i * 8 + column) * 4);
        wgmma::wait<0>();
        wgmma::pin(x);
        u32 weighted[4][4], delta[4][4];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            weighted[i / 4][i % 4] = pack_f16(x[2 * i] * to_end[i / 2].x, x[2 * i + 1] * to_end[i / 2].y);
        }
        wgmma::fence();
#pragma unroll
        for (int step = 0; step < 4; step++) {
            wgmma::mma_f16_rows(s, weighted[step], wgmma::mn_major(stage + AT_K + step * 2048, PANEL));
        }
        wgmma::commit();
#pragma unroll
        for (int i = 0; i < 16; i++) delta[i / 4][i % 4] = pack_f16(x[2 * i], x[2 * i + 1]);
        wgmma::fence();
#pragma unroll
        for (int step = 0; step < 4; step++) {
            wgmma::mma_f16(out, delta[step], wgmma::k_major(stage + AT_A + step * 32), true);
        }
        wgmma::commit();

        const float output_unit = power_of_two(unit - PLAIN) * call.scale;
        u64* const empty = &barriers->empty[chunk % STAGES];
        chunk++;
        wgmma::wait<1>();
        wgmma::pin(s);
        if (chunk % 8 == 0) unit = fit_unit(s, unit);
        round_state(operand, s);
        wgmma::wait<0>();
        wgmma::pin(out);
        if (lane == 0) barrier_arrive(empty);
        gather_outputs(out, output_unit, buffer, lane);
        if (chunk < seq.chunks) barrier_wait(&barriers->full[chunk % STAGES], chunk / STAGES & 1);
    } while (chunk < seq.chunks);
    const float state_unit = power_of_two(unit - PLAIN);
    if (PASS != 1) store_outputs(buffer, o, seq.length - (seq.chunks - 1) * CHUNK, lane);
    if (walk.to == nullptr) return;
    float* const rows = walk.to + row * D + column;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        float2* const to = reinterpret_cast<float2*>(rows + i % 2 * 8 * D + i / 2 * 8);
        *to = make_float2(s[2 * i] * state_unit, s[2 * i + 1] * state_unit);
    }
}
