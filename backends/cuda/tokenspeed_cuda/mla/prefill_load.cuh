// The producer: a warp that takes pieces of work and fetches their tiles into rings, as far ahead as those reach.
#pragma once

#include "prefill_schedule.cuh"
#include "prefill_shared.cuh"

enum { NEXT = 1, ENDED = 2 };  // counters

template <int SLICES>
__device__ void copy_slices(u8* to, const TensorMap* map, int head, int row, int rows, u64* barrier) {
    for (int i = 0; i < SLICES; i++) copy_box(to + i * rows * 128, map, i * SLICE, row, head, barrier);
}

// Values past a sequence's end are the next one's. Their weights are 0, but 0 · NaN is not.
__device__ void load_last_values(Shared& m, const TensorMap* map, const Piece& p, int tile, u32 stage, u32& raws,
                                 int lane) {
    int row = p.first_key + tile * TILE;
    if (lane == 0) {
        barrier_expect(&m.v_raw, V_BYTES);
        copy_slices<V_DIM / SLICE>(m.v[stage], map, p.head, row, TILE, &m.v_raw);
    }
    barrier_wait(&m.v_raw, raws++ % 2);
    for (int i = p.end_key - row + lane / 16; i < TILE; i += 2) {
        u8* slice = m.v[stage] + lane / 8 % 2 * TILE * 128;
        reinterpret_cast<uint4*>(slice + i * 128)[lane % 8] = uint4{0, 0, 0, 0};
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(&m.v_full[stage]);
}

// The rows of a block for a consumer: the first or the second half of them. Or, so that all blocks take the same time
// where they all run at once, the half block as far from the sequence's end as the other's is from its start.
__device__ Work work_of(const Piece& p, int consumer, bool mirrored) {
    int half = CONSUMERS * p.block + consumer;
    if (mirrored) {
        int halves = (p.queries + ROWS - 1) / ROWS, other = halves - 1 - p.block;
        half = consumer == 0 ? p.block : other > p.block ? other : halves;
    }
    int before = half * ROWS, queries = max(p.queries - before, 0), keys = p.end_key - p.first_key;
    int seen = CAUSAL ? keys - (p.queries - before) + 1 : keys;
    int last = CAUSAL ? max(seen + min(queries, ROWS) - 1, 0) : keys;
    return {p.head, p.first_query + before, queries, seen, queries > 0 ? last : 0, 0};
}

__device__ void produce(Shared& m, const TensorMap* q, const TensorMap* k, const TensorMap* v, const Sequences& s,
                        int kv_tokens, bool mirrored, u32* counters, int lane) {
    u32 loaded_k = 0, loaded_v = 0, works = 0, raws = 0;
    int blocks = all_blocks(s, lane), total = blocks * s.heads;
    int index = blockIdx.x;
    Piece p = {}, next = {};
    if (index < total) p = locate(index, blocks, s, lane);
    for (; index < total; p = next) {
        int fetched = 0;
        if (lane == 0) fetched = gridDim.x + atomicAdd(counters + NEXT, 1u);
        auto look_ahead = [&] {  // while the consumers have enough to do
            index = __shfl_sync(WARP, fetched, 0);
            if (index < total) next = locate(index, blocks, s, lane);
        };
        auto load_keys = [&](int tile) {
            Place at(loaded_k++);
            barrier_wait(&m.k_free[at.stage], at.parity ^ 1);
            if (lane == 0) {
                barrier_expect(&m.k_full[at.stage], K_BYTES);
                copy_slices<QK / SLICE>(m.k[at.stage], k, p.head, p.first_key + tile * TILE, TILE, &m.k_full[at.stage]);
            }
        };
        int tiles = (max(work_of(p, 0, mirrored).keys, work_of(p, 1, mirrored).keys) + TILE - 1) / TILE;
        if (tiles > 0) load_keys(0);
        for (int c = 0; c < CONSUMERS; c++) {
            barrier_wait(&m.q_free[c], (works & 1) ^ 1);
            if (lane == 0) {
                Work w = work_of(p, c, mirrored);
                w.tiles = tiles;
                m.work[c] = w;
                barrier_expect(&m.q_full[c], Q_BYTES);
                copy_slices<QK / SLICE>(m.q[c], q, p.head, w.query, ROWS, &m.q_full[c]);
            }
        }
        works++;
        if (tiles == 0) look_ahead();
        for (int tile = 0; tile < tiles; tile++) {
            if (tile + 1 < tiles) load_keys(tile + 1);
            Place at(loaded_v++);
            barrier_wait(&m.v_free[at.stage], at.parity ^ 1);
            int row = p.first_key + tile * TILE;
            if (row + TILE > p.end_key && p.end_key < kv_tokens) {
                load_last_values(m, v, p, tile, at.stage, raws, lane);
            } else if (lane == 0) {
                barrier_expect(&m.v_full[at.stage], V_BYTES);
                copy_slices<V_DIM / SLICE>(m.v[at.stage], v, p.head, row, TILE, &m.v_full[at.stage]);
            }
            if (tile == 0) look_ahead();
        }
    }
    for (int c = 0; c < CONSUMERS; c++) {
        barrier_wait(&m.q_free[c], (works & 1) ^ 1);
        if (lane == 0) {
            m.work[c].tiles = -1;
            barrier_arrive(&m.q_full[c]);
        }
    }
}
