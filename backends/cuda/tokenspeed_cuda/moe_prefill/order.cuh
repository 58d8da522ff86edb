// The order of inputs in which products with weights of a format take them: see `linear/weights.cuh`.
#pragma once
#include "../linear/weights.cuh"

// The column that lies at `position` of a reordered row. Four threads have a piece each of 4 * PIECE columns; a step
// takes 16 positions: a thread's first two numbers are at 2 * thread, its other two 8 further on.
template <int KIND>
__device__ __forceinline__ int source_of(int position) {
    constexpr int piece = piece_of<KIND>;
    const int in_chunk = position % (4 * piece), step = in_chunk / 16, other = in_chunk / 8 % 2, second = in_chunk % 2;
    const int start = position - in_chunk + in_chunk % 8 / 2 * piece;
    if constexpr (KIND == BF16) return start + 4 * step + 2 * other + second;
    else if constexpr (KIND == FP8) return start + 4 * step + other + 2 * second;
    else return start + 8 * (step / 2) + 2 * (step % 2) + other + 4 * second;
}
