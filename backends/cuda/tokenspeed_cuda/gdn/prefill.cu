// Prefill of the gated delta rule, chunks of 64 tokens: a block walks over one sequence for one value head, or half its
// values, with the state in registers. See prefill_produce.cuh and prefill_consume.cuh for its two kinds of warpgroups.
//
// A long sequence of few heads is cut into segments, in two passes. What a segment makes of a state is linear: S M + R.
// A first kernel finds R and M of every segment but the last, R from a state of zeros (the first from the true one), M
// from unit vectors and values of zero. In the second, all segments walk at once, each from the state that those before
// it give.
//
// Macros: K_HEADS, V_HEADS; CONSUMERS, the consuming warpgroups of a block, each with 64 of the 128 values: 2, or 1
// where there would be too few blocks; PRODUCERS, 1 or 2; PASS, 0 for whole sequences.
#include "prefill_consume.cuh"
#include "prefill_produce.cuh"

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + PRODUCERS), 1)
gdn_prefill(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
            const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap g,
            const __grid_constant__ TensorMap beta, float* states, const int* slots, const int* bounds, const u8* fresh,
            u16* o, float* found, int segments, float scale) {
    constexpr int PARTS = PASS == 1 ? 2 : 2 / CONSUMERS, WIDTH = 64 * CONSUMERS;
    const int part = blockIdx.x % PARTS, head = blockIdx.x / PARTS % V_HEADS, cell = blockIdx.x / (PARTS * V_HEADS);
    const int cells = PASS == 0 ? 1 : PASS == 1 ? segments - 1 : segments;
    const int segment = PASS == 0 ? 0 : cell % cells, i = cell / cells;
    const int first_value = PASS == 1 ? 0 : part * WIDTH;
    const int start = bounds[i], whole = bounds[i + 1] - start, slot = slots[i];
    int skipped = 0, length = whole;
    if (PASS != 0) {
        const int size = ((whole + CHUNK - 1) / CHUNK + segments - 1) / segments * CHUNK;
        skipped = min(segment * size, whole);
        length = min(whole - skipped, size);
    }
    const Call call{&q, &k, &v, &g, &beta, o, scale};
    const Sequence seq{start + skipped, length, (length + CHUNK - 1) / CHUNK, head};
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    if (slot < 0) {
        for (int at = threadIdx.x; PASS != 1 && at < length * (WIDTH / 8); at += blockDim.x) {
            const long long row = (seq.token + at / (WIDTH / 8)) * V_HEADS + head;
            *reinterpret_cast<uint4*>(o + row * D + first_value + at % (WIDTH / 8) * 8) = zeros;
        }
        return;
    }
    float* const state = states + (((long long)slot * V_HEADS + head) * D + first_value) * D;
    if (length == 0) {
        const bool clear = PASS != 1 && whole == 0 && segment == 0 && fresh[i];
        for (int at = threadIdx.x; clear && at < WIDTH * D / 4; at += blockDim.x) {
            reinterpret_cast<uint4*>(state)[at] = zeros;
        }
        return;
    }
    const float* const before = fresh[i] ? nullptr : state;
    Walk walk{before, state, false, nullptr, 0};
    if (PASS != 0) {
        float* const of_head = found + (long long)i * (segments - 1) * JUMP + head * 2 * D * D;
        if (PASS == 1) {
            float* const own = of_head + (long long)segment * JUMP + part * D * D;
            if (segment == 0 && part == 1) {  // the state itself, which pass 2 may overwrite before all have read it
                for (int at = threadIdx.x; at < D * D / 4; at += blockDim.x) {
                    reinterpret_cast<uint4*>(own)[at] = before ? reinterpret_cast<const uint4*>(before)[at] : zeros;
                }
                return;
            }
            walk = Walk{segment == 0 ? before : nullptr, own, part == 1, nullptr, 0};
        } else {
            const float* const from = of_head + (segment == 0 ? D * D : 0) + first_value * D;
            walk = Walk{from, skipped + length == whole ? state : nullptr, false, of_head + JUMP, segment - 1};
        }
    }

    const u32 shared = dynamic_shared();
    Barriers* const barriers = shared_pointer<Barriers>(shared + AT_BARRIERS);
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            barrier_init(&barriers->arrived[stage], 1);
            barrier_init(&barriers->full[stage], 128 * PRODUCERS);
            barrier_init(&barriers->empty[stage], 4 * CONSUMERS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= 128 * CONSUMERS) {
        if (CONSUMERS + PRODUCERS > 2) give_registers<CONSUMERS == 2 ? 88 : 136>();
        produce(call, seq, shared, barriers, first_value);
    } else {
        if (CONSUMERS + PRODUCERS > 2) take_registers<CONSUMERS == 2 ? 208 : 232>();
        consume(call, seq, walk, shared, barriers, first_value);
    }
}
