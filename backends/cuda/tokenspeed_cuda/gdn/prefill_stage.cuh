// What producers hand to consumers: a chunk of 64 tokens of one value head, in one of three stages of shared memory.
#pragma once

#include "prefill_words.cuh"

constexpr int CHUNK = 64, D = 128;
constexpr u32 STAGES = 3;

// Tiles have rows of 128 bytes in the 128-byte swizzle; K and Q are two of them, of 64 numbers of d_k each. Bytes from
// the start of a stage. K, Q: unit vectors in float16. T, A: float16, zero above the diagonal. V: as it came, a tile
// for each consumer. Vectors of 64 floats: exp of the sum of g up to a token and from it to the chunk's end, the sums
// themselves in base 2, beta.
constexpr u32 PANEL = 64 * 128;
constexpr u32 AT_K = 0, AT_Q = 2 * PANEL, AT_T = 4 * PANEL, AT_A = 5 * PANEL, AT_V = 6 * PANEL;
constexpr u32 AT_FROM_START = AT_V + CONSUMERS * PANEL, AT_TO_END = AT_FROM_START + 256, AT_SUMS = AT_TO_END + 256,
              AT_BETA = AT_SUMS + 256;
// g and beta as they came, of four heads.
constexpr u32 GATES = 64 * 16, AT_GATES = AT_BETA + 256;
constexpr u32 STAGE = AT_GATES + 2 * GATES;

// Behind the stages: the four diagonal blocks of L in float32, outputs on their way out, barriers.
constexpr u32 BLOCK_ROW = 20 * 4, BLOCK = 16 * BLOCK_ROW;
constexpr u32 AT_BLOCKS = STAGES * STAGE, AT_OUT = AT_BLOCKS + 4 * BLOCK, AT_BARRIERS = AT_OUT + CONSUMERS * PANEL;

constexpr u32 AT_JUMP = (AT_BARRIERS + 1024) & ~1023u;  // of pass 2

__device__ __forceinline__ u32 piece_at(u32 tile, u32 row, u32 piece) {
    return tile + row * 128 + ((piece ^ (row & 7)) << 4);
}

struct Sequence {
    long long token;  // its first
    int length, chunks, head;
};

// What a kernel is given. Maps of q, k, v: boxes of 64 tokens, one head, 64 numbers; of g, beta: 64 tokens, 4 heads.
struct Call {
    const TensorMap *q, *k, *v, *g, *beta;
    u16* o;
    float scale;
};

// The state's way through a block's tokens, all [d_v, d_k] of one head.
struct Walk {
    const float* from;   // this block's rows before the first token; null: zeros
    float* to;           // and after the last; null: not kept
    bool of_units;       // pass 1: from unit vectors, and V is zero
    const float* jumps;  // pass 2: results of segments 1, 2, ... of this head in pass 1
    int jump_count;
};
constexpr int JUMP = V_HEADS * 2 * D * D;  // numbers from one segment's results to the next one's

// Arrived: bytes of the copy engine. Full: all threads of producers. Empty: the lanes 0 of all consumer warps.
struct Barriers {
    u64 arrived[STAGES], full[STAGES], empty[STAGES];
};
