// Which block of queries comes when: a sequence's last blocks first, which see most keys if causal, so that what is
// left at the end is short. Offsets lie on the device, so every block works out its pieces itself, by a whole warp.
#pragma once

#include "prefill_shared.cuh"

struct Sequences {
    const int *q_offsets, *k_offsets;
    int seqs, heads, group;
};

// A piece of work: block number `block` of a sequence's queries, of one head.
struct Piece {
    int head, block, first_query, queries, first_key, end_key;
};

__device__ int blocks_of(int queries) { return (queries + BLOCK - 1) / BLOCK; }

__device__ int all_blocks(const Sequences& s, int lane) {
    int blocks = 0;
    for (int i = lane; i < s.seqs; i += 32) blocks += blocks_of(s.q_offsets[i + 1] - s.q_offsets[i]);
    return __reduce_add_sync(WARP, blocks);
}

// Heads come in groups; in a group all blocks, from the last one on, each for all its heads.
__device__ Piece locate(int index, int blocks, const Sequences& s, int lane) {
    int per_group = s.group * blocks;
    int first_head = index / per_group * s.group, rest = index % per_group;
    int width = min(s.group, s.heads - first_head), rank = blocks - 1 - rest / width;
    for (int base = 0;; base += 32) {
        int i = min(base + lane, s.seqs - 1);
        int first_query = s.q_offsets[i], queries = s.q_offsets[i + 1] - first_query;
        int ours = base + lane < s.seqs ? blocks_of(queries) : 0;
        int up_to = ours;  // of this lane and those before
        for (int step = 1; step < 32; step *= 2) {
            int before = __shfl_up_sync(WARP, up_to, step);
            if (lane >= step) up_to += before;
        }
        u32 beyond = __ballot_sync(WARP, up_to > rank);
        if (beyond == 0) {
            rank -= __shfl_sync(WARP, up_to, 31);
            continue;
        }
        int block = rank - (up_to - ours), lucky = __ffs(beyond) - 1;
        auto of = [&](int value) { return __shfl_sync(WARP, value, lucky); };
        int first_key = of(s.k_offsets[i]), end_key = of(s.k_offsets[i + 1]);
        return {first_head + rest % width, of(block), of(first_query), of(queries), first_key, end_key};
    }
}
