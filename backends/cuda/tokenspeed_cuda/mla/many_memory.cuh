// Shared memory of a block and the thread that fills it. A tile of 64 rows of 576 numbers lies as nine slices of
// 64 x 64 in the 128-byte swizzle, each with its own barriers, so that products begin with the first that is there. The
// row of a key is its value too: a tile is loaded once. The two blocks of a cluster have different queries and the same
// keys: each loads every other slice, and the copy engine writes it to both.
#pragma once
#include "device.cuh"
#include "many_schedule.cuh"

constexpr int CLUSTER = 2;
constexpr int ROWS = 64, LATENT = 512, QK = 576;
constexpr int SLICES = QK / 64, SLICE_BYTES = 64 * 64 * 2;
constexpr int HALF = LATENT / 64 / 2;  // slices of a half of the values; the last slice, rotated keys, is no value
constexpr int EARLY = 4;               // slices of scores to issue before values are waited for

// Slices become free one after another: the rotated keys after the scores, each half of the values when a warpgroup has
// added it. In this order they are loaded and multiplied.
enum { LEFT_HALF, RIGHT_HALF, ROTATED, REGIONS };
__device__ __forceinline__ constexpr int slice_at(int i) { return i == 0 ? SLICES - 1 : i - 1; }
__device__ __forceinline__ constexpr int region_of(int slice) { return slice / HALF; }

struct Shared {
    u8 queries[SLICES][SLICE_BYTES];
    u8 keys[2][SLICES][SLICE_BYTES];  // tile t in buffer t % 2
    u8 weights[SLICE_BYTES];          // of the tile at hand; a warp overwrites only rows that it has read
    float reference[2][ROWS];         // of tile t in t % 2: what its weights are relative to
    int moves[2][4];                  // whether that is new for a row of one of the four warps
    float total[2][ROWS];
    u64 queries_full, queries_empty, full[2][SLICES], empty[2][REGIONS], parts_full;
};

// Named barriers: the weights of even and odd tiles; both warpgroups; each warpgroup alone.
enum { WEIGHTS = 1, BOTH = 3, ALONE = 4 };

__device__ __forceinline__ void named_arrive(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void init_barriers(Shared& shared) {
    barrier_init(&shared.queries_full, 1);
    barrier_init(&shared.queries_empty, 8);
    barrier_init(&shared.parts_full, 1);
    for (int buffer = 0; buffer < 2; buffer++) {
        for (int slice = 0; slice < SLICES; slice++) barrier_init(&shared.full[buffer][slice], 1);
        for (int region = 0; region < REGIONS; region++) barrier_init(&shared.empty[buffer][region], 4 * CLUSTER);
    }
    barrier_init_done();
}

// This warp is done with slices: said to both blocks, which write to them.
__device__ __forceinline__ void release(u64* barrier) {
    const u32 lane = threadIdx.x % 32;
    if (lane < CLUSTER) {
        const u32 there = address_in(shared_address(barrier), lane);
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
    }
}

// A slice of a tile into both blocks, to the same place and barrier in each.
__device__ __forceinline__ void copy_to_cluster(void* to, const TensorMap* map, int x, int y, int z, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(u16((1 << CLUSTER) - 1))
        : "memory");
}

// By one thread; the `loads`th time.
__device__ __forceinline__ void load_queries(Shared& shared, const Piece& piece, const TensorMap* queries, u32 loads) {
    barrier_wait(&shared.queries_empty, ~loads & 1);
    barrier_expect(&shared.queries_full, SLICES * SLICE_BYTES);
    for (int slice = 0; slice < SLICES; slice++)
        copy_box(shared.queries[slice], queries, slice * 64, (piece.group * CLUSTER + cluster_rank()) * ROWS,
                 piece.sequence, &shared.queries_full);
}

// One thread of a warp loads all that the block needs, as early as there is room.
__device__ void load(Shared& shared, Schedule& schedule, const TensorMap* queries, const TensorMap* cache,
                     const int* page_table, int max_pages) {
    const int rank = cluster_rank();
    u32 uses[2] = {0, 0}, loads = 0;
    Piece piece;
    while (schedule.next(piece)) {
        if (piece.length > 0 && threadIdx.x % 32 == 0) {
            const int* pages = page_table + (long long)piece.sequence * max_pages;
            int page = pages[piece.first * KEYS / PAGE];
            load_queries(shared, piece, queries, loads++);
            for (int tile = piece.first; tile < piece.last; tile++) {
                const int next = tile + 1 < piece.last ? pages[(tile + 1) * KEYS / PAGE] : 0;
                const int buffer = (tile - piece.first) % 2, row = tile * KEYS % PAGE;
                const u32 parity = ~uses[buffer]++ & 1;
                for (int i = 0; i < SLICES; i++) {
                    const int slice = slice_at(i);
                    barrier_wait(&shared.empty[buffer][region_of(slice)], parity);
                    barrier_expect(&shared.full[buffer][slice], SLICE_BYTES);
                    if (i % 2 == (tile + rank) % 2)
                        copy_to_cluster(shared.keys[buffer][slice], cache, slice * 64, row, page,
                                        &shared.full[buffer][slice]);
                }
                page = next;
            }
        }
        __syncwarp();
    }
}
