// What the parts of decode_few.cu share: sizes, shared memory, small words.
#pragma once
#include "device.cuh"

constexpr int LATENT = 512;
constexpr int SLICES = 9;  // of 64 numbers in a row: eight of latent, one of rope
constexpr int QK = 64 * SLICES;
constexpr int ROWS = HEADS * Q_LEN;
constexpr bool NARROW = ROWS <= 16;              // warps multiply; else warpgroups
constexpr int N = NARROW ? 16 : 64;
constexpr int ADDERS = 256;                      // threads that hold the sums of values
constexpr int PRODUCER = NARROW ? 256 : 384;     // first thread of the warpgroup that fetches
constexpr int HELPERS = 3;                       // warps of it that convert tiles, if that is needed; the last fetches
constexpr int CONVERTERS = 128 + 32 * HELPERS;
constexpr int THREADS = PRODUCER + 128;
constexpr int TILE = 64;
constexpr int GROUP_BYTES = 1024 * SLICES;       // eight rows of bfloat16
constexpr int TILE_BYTES = TILE / 8 * GROUP_BYTES;
constexpr int FETCHED_BYTES = FP8 ? GROUP_BYTES / 2 : GROUP_BYTES;  // eight rows in the cache
constexpr bool CONVERTED = FP8 && !NARROW;       // tiles are brought to bfloat16 in shared memory
constexpr int STAGES = FP8 && NARROW ? 5 : 2;
constexpr int PARTS = NARROW || FP8 ? 1 : 4;     // of a stage, freed one after another
constexpr float SLACK = 8;                       // what scores, in base 2, may pass the reference by

// A sequence without tokens takes a turn too: somebody writes its zeros.
__device__ __forceinline__ u32 tiles_of(int length) { return length > 0 ? (length + TILE - 1) / TILE : 1; }

// Tiles `at` to `end - 1` of the `tiles` of a sequence.
struct Run {
    int sequence, length;
    u32 before, tiles, at, end;  // `before`: tiles of the sequences before it

    __device__ bool starts() const { return at == 0; }
    __device__ bool whole() const { return at == 0 && end == tiles; }
};

struct Share {
    u32 total, blocks;  // tiles of all sequences, blocks among which they are dealt out
    u32 at, end;        // this block's tiles
    int sequence;       // that of tile `at`
    u32 before;         // tiles of the sequences before it

    __device__ bool next(Run& run, const int* lengths) {
        if (at >= end) return false;
        const int length = lengths[sequence];
        const u32 tiles = tiles_of(length), last = min(end, before + tiles);
        run = {sequence, length, before, tiles, at - before, last - before};
        at = last;
        before += tiles;
        sequence++;
        return true;
    }
    __device__ u32 start_of(u32 block) const { return block * total / blocks; }
    __device__ u32 block_of(u32 tile) const { return ((tile + 1) * blocks - 1) / total; }
};

struct Shared {
    alignas(1024) u8 keys[STAGES * TILE / 8 * FETCHED_BYTES + (CONVERTED ? TILE_BYTES : 0)];
    alignas(1024) u8 q[N / 8 * GROUP_BYTES];
    alignas(1024) u8 p[N * 128];
    float decay[N];
    float tops[NARROW ? N : 1][8];
    float reference[2][N];  // what was taken off the exponents, of one run of tiles and the next
    float sum[2][N];
    float sums[NARROW ? N : 1][8];
    Share share;
    float value_scale, unit;  // `unit` makes products scores in base 2
    u64 q_full, q_empty;
    u64 full[STAGES];
    u64 empty[STAGES][PARTS];
    u64 p_full, p_empty, tile_empty;

    __device__ u8* fetched(int stage) { return keys + stage * (TILE / 8 * FETCHED_BYTES); }
    __device__ u8* converted() { return fetched(STAGES); }
};

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log_two(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two numbers as float16, the lower half first.
__device__ __forceinline__ u32 pack_f16(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float2 unpack_f16(u32 pair) {
    float2 v;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(v.x), "=f"(v.y) : "r"(pair));
    return v;
}

__device__ __forceinline__ u32 e4m3_to_bf16(u16 pair) {
    const float2 wide = unpack_f16(e4m3_to_f16(pair));
    return pack_bf16(wide.x, wide.y);
}

// A barrier of COUNT threads.
template <int ID, int COUNT>
__device__ __forceinline__ void barrier_of() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

__device__ __forceinline__ void copy_box(void* to, const TensorMap* map, int x, int y, int z, int w, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];"
        ::"r"(shared_address(to)), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier)) : "memory");
}

// Rows of the last eight keys that lie past the end hold anything, NaN included, and would be values. COUNT threads,
// from `thread` 0 on; a barrier follows.
template <int COUNT>
__device__ __forceinline__ void clear_past(u8* tile, int valid, int thread) {
    u8* group = tile + valid / 8 * FETCHED_BYTES;
    constexpr int PIECES = FP8 ? 4 : 8;  // of 16 bytes in a row of a slice
    const int first = valid % 8 * PIECES, pieces = 8 * PIECES - first;
    for (int i = thread; i < pieces * SLICES; i += COUNT) {
        u8* to = group + i / pieces * (FETCHED_BYTES / SLICES) + (first + i % pieces) * 16;
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
    fence_async_shared();
}
