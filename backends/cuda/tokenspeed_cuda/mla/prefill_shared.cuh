// What the warps of a block share: tiles, the barriers that guard them, and what the consumers are to do.
#pragma once

#include "device.cuh"

constexpr u32 WARP = 0xffffffffu;  // all lanes
constexpr int QK = 192, V_DIM = 128, SLICE = 64;  // a slice is what the 128-byte swizzle holds of a row
constexpr int CONSUMERS = 2, ROWS = 64, TILE = 128, STAGES = 2;
constexpr int BLOCK = CONSUMERS * ROWS;
constexpr u32 Q_BYTES = ROWS * QK * 2, K_BYTES = TILE * QK * 2, V_BYTES = TILE * V_DIM * 2;

// What a consumer has to do: its first query in `q`, how many there are from there on in the sequence, how many keys
// the first one sees (each further one sees one more if causal), and the last one. `tiles` of keys come: the other
// consumer may see more. `tiles` < 0: nothing more to do.
struct Work {
    int head, query, queries, seen, keys, tiles;
};

struct Shared {
    u8 q[CONSUMERS][Q_BYTES];  // [slice][row][64]
    u8 k[STAGES][K_BYTES];     // [slice][key][64]
    u8 v[STAGES][V_BYTES];
    u64 q_full[CONSUMERS], q_free[CONSUMERS], k_full[STAGES], k_free[STAGES], v_full[STAGES], v_free[STAGES], v_raw;
    Work work[CONSUMERS];
};

// The place in a ring of a running number, and the parity of its phase.
struct Place {
    u32 stage, parity;
    __device__ explicit Place(u32 number) : stage(number % STAGES), parity(number / STAGES % 2) {}
};
