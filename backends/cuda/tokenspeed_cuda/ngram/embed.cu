// Hashes of n-grams and the table rows that they name, in one launch.
//
// A warp takes PAIRS pairs of a token and a head. Its lanes hash one each; then all lanes copy the rows, 8 elements at
// a time and all loads at once. A token costs a chain of three: its ids, its row, the store. So what a hash needs is
// asked for together, by guessing which sequence a token is of: the same share of sequences as of tokens, which is
// right where all have one length, as decode and verify have. And all but the store goes before the wait for the kernel
// ahead. That may still be writing ids, so they are read again, and rows of ids that have changed are loaded anew.
//
// Rows in host memory come at the rate of the link, for which a few blocks are enough: they leave the rest to others.
#include "device.cuh"

using i64 = long long;
constexpr int PIECES = DIM / 8;                    // of a row
constexpr int STEPS = (PAIRS * PIECES + 31) / 32;  // in which a warp copies its rows
constexpr int PER_ORDER = HEADS / (ORDER - 1);

// What a token's hashes are made of.
struct Window {
    i64 ids[ORDER];  // newest first
};

// Past the L1 cache, so that a second read sees what was written since the first.
__device__ __forceinline__ i64 load_fresh(const i64* p) {
    i64 value;
    asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}
__device__ __forceinline__ int load_fresh(const int* p) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

__device__ __forceinline__ Window window_of(
    int token, const i64* ids, const i64* context, const int* ends, int seqs, float seqs_per_token, i64 eos) {
    int sequence = min(static_cast<int>((token + 0.5f) * seqs_per_token), seqs - 1);
    int start = load_fresh(ends + sequence);
    const int end = load_fresh(ends + sequence + 1);
    i64 text[ORDER], before[ORDER - 1];
    for (int i = 0; i < ORDER; i++) text[i] = load_fresh(ids + max(token - i, 0));
    for (int i = 0; i < ORDER - 1; i++) before[i] = load_fresh(context + static_cast<i64>(sequence) * (ORDER - 1) + i);
    if (token < start || token >= end) {
        int low = 0, high = seqs - 1;  // the last sequence that starts at or before the token
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (load_fresh(ends + middle) <= token) low = middle;
            else high = middle - 1;
        }
        sequence = low;
        start = load_fresh(ends + sequence);
        for (int i = 0; i < ORDER - 1; i++)
            before[i] = load_fresh(context + static_cast<i64>(sequence) * (ORDER - 1) + i);
    }
    const int position = token - start;
    Window window;
    window.ids[0] = text[0];
    bool ended = false;
#pragma unroll
    for (int back = 1; back < ORDER; back++) {
        i64 previous = text[back];
#pragma unroll
        for (int i = 0; i < back; i++)
            if (position == i) previous = before[ORDER - 1 - back + i];
        ended |= previous == eos || previous == -1;
        window.ids[back] = ended ? eos : previous;
    }
    return window;
}

// A divisor and its reciprocal.
struct Modulus {
    i64 value;
    double inverse;
};

__device__ __forceinline__ Modulus prepared(i64 value) {
    const double wide = static_cast<double>(value);
    double inverse;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(inverse) : "d"(wide));
    inverse = fma(fma(-wide, inverse, 1.0), inverse, inverse);
    inverse = fma(fma(-wide, inverse, 1.0), inverse, inverse);
    return {value, inverse};
}

// The remainder of a number of 63 bits. The first quotient may be off by 2^12 / modulus, the second by one.
__device__ __forceinline__ i64 remainder_of(i64 h, Modulus m) {
    i64 rest = h - __double2ll_rn(static_cast<double>(h) * m.inverse) * m.value;
    rest -= __double2ll_rn(static_cast<double>(rest) * m.inverse) * m.value;
    if (rest < 0) rest += m.value;
    return rest >= m.value ? rest - m.value : rest;
}

__device__ __forceinline__ i64 row_of(
    const Window& window, const i64 (&factors)[ORDER], Modulus modulus, i64 offset, int head) {
    i64 hashed = window.ids[0] * factors[0];
#pragma unroll
    for (int i = 1; i < ORDER; i++)
        if (i < 2 + head / PER_ORDER) hashed ^= window.ids[i] * factors[i];
    // Of -1 - h, which is not negative where h is, the remainder counts down from the last row.
    const i64 rest = remainder_of(hashed < 0 ? ~hashed : hashed, modulus);
    return (hashed < 0 ? modulus.value - 1 - rest : rest) + offset;
}

#if FP8
using Piece = uint2;
#else
using Piece = uint4;
#endif

__device__ __forceinline__ void load_piece(uint2& piece, const u8* p) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(piece.x), "=r"(piece.y) : "l"(p));
}
__device__ __forceinline__ void load_piece(uint4& piece, const u8* p) { piece = load_once(p); }

__device__ __forceinline__ u32 scaled(u16 two, float scale) {
    const u32 halves = e4m3_to_f16(two);
    float low, high;
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(low), "=f"(high) : "r"(halves));
    return pack_bf16(low * scale, high * scale);
}
__device__ __forceinline__ uint4 widened(uint2 piece, float scale) {
    return {scaled(piece.x & 0xffff, scale), scaled(piece.x >> 16, scale), scaled(piece.y & 0xffff, scale),
            scaled(piece.y >> 16, scale)};
}
__device__ __forceinline__ u32 scaled_bf16(u32 two, float scale) {
    return pack_bf16(low_to_float(two) * scale, high_to_float(two) * scale);
}
__device__ __forceinline__ uint4 widened(uint4 piece, float scale) {
    if (SCALES == 0) return piece;
    return {scaled_bf16(piece.x, scale), scaled_bf16(piece.y, scale), scaled_bf16(piece.z, scale),
            scaled_bf16(piece.w, scale)};
}

// What is loaded of the rows of a warp's pairs.
struct Rows {
    Piece pieces[STEPS];
    float scales[SCALES == 2 ? STEPS : 1];

    // `local`: the row of the lane's pair, -1 for none.
    __device__ __forceinline__ void load(i64 local, const u8* table, const float* scale, int lane) {
        constexpr int BYTES = sizeof(Piece);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int at = i * 32 + lane;
            const i64 row = PAIRS == 1 ? local : __shfl_sync(~0u, local, at / PIECES);
            pieces[i] = {};
            if (SCALES == 2) scales[i] = 0;
            if (row >= 0 && at < PAIRS * PIECES) {
                load_piece(pieces[i], table + (row * PIECES + at % PIECES) * BYTES);
                if (SCALES == 2) scales[i] = scale[row];
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) ngram_embed(
    const i64* ids, const i64* context, const int* ends, const i64* multipliers, const i64* moduli, const i64* offsets,
    const u8* table, const float* scale, u16* o, int tokens, int seqs, float seqs_per_token, i64 table_rows,
    i64 first_row, i64 eos) {
    const int lane = threadIdx.x % 32, warp = blockIdx.x * WARPS + threadIdx.x / 32;
    launch_successor();
    i64 factors[ORDER];
    for (int i = 0; i < ORDER; i++) factors[i] = multipliers[i];
    const float factor = SCALES == 1 ? *scale : 1.0f;
    const i64 pairs = static_cast<i64>(tokens) * HEADS;
    i64 first_pair = static_cast<i64>(warp) * PAIRS;
    do {
        const i64 pair = first_pair + (PAIRS == 1 ? 0 : min(lane, PAIRS - 1));
        const bool inside = pair < pairs;
        const int token = inside ? static_cast<int>(pair / HEADS) : tokens - 1, head = static_cast<int>(pair % HEADS);
        const Modulus modulus = prepared(moduli[head]);
        const i64 offset = offsets[head];
        Window window = window_of(token, ids, context, ends, seqs, seqs_per_token, eos);
        Rows rows;
        for (bool waited = false;; waited = true) {
            i64 local = row_of(window, factors, modulus, offset, head) - first_row;
            if (!inside || window.ids[0] == -1 || local >= table_rows) local = -1;
            rows.load(local, table, scale, lane);
            if (waited) break;
            wait_for_predecessor();
            const Window now = window_of(token, ids, context, ends, seqs, seqs_per_token, eos);
            bool same = true;
            for (int i = 0; i < ORDER; i++) same &= now.ids[i] == window.ids[i];
            if (__all_sync(~0u, same)) break;
            window = now;
        }
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int in_warp = i * 32 + lane;
            const i64 at = first_pair * PIECES + in_warp;
            if (in_warp < PAIRS * PIECES && at < pairs * PIECES)
                reinterpret_cast<uint4*>(o)[at] = widened(rows.pieces[i], SCALES == 2 ? rows.scales[i] : factor);
        }
        first_pair += static_cast<i64>(gridDim.x) * (WARPS * PAIRS);
    } while (ON_HOST && first_pair < pairs);
}
