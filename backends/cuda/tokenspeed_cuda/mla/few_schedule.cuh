// Which tiles of which sequences a block takes.
#pragma once
#include "few_parts.cuh"

// By a whole warp.
__device__ __forceinline__ Share find_share(const int* lengths, int batch) {
    const int lane = threadIdx.x % 32;
    Share share{};
    const u32 first = lane < batch ? tiles_of(lengths[lane]) : 0;  // most batches are read once
    share.total = __reduce_add_sync(~0u, first);
    for (int base = 32; base < batch; base += 32) {
        const u32 tiles = base + lane < batch ? tiles_of(lengths[base + lane]) : 0;
        share.total += __reduce_add_sync(~0u, tiles);
    }
    share.blocks = min(gridDim.x, share.total);
    if (blockIdx.x >= share.blocks) return share;
    share.at = share.start_of(blockIdx.x);
    share.end = share.start_of(blockIdx.x + 1);
    for (int base = 0;; base += 32) {
        const u32 tiles = base == 0 ? first : base + lane < batch ? tiles_of(lengths[base + lane]) : 0;
        u32 through = tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += other;
        }
        const u32 past = __ballot_sync(~0u, share.before + through > share.at);
        if (past) {
            const int found = __ffs(past) - 1;
            share.sequence = base + found;
            share.before += __shfl_sync(~0u, through - tiles, found);
            return share;
        }
        share.before += __shfl_sync(~0u, through, 31);
    }
}
