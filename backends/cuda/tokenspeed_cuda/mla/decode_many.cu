// MLA decode for many query rows (heads x new tokens), where matrix products take the time.
//
// A block has 64 query rows and all 512 columns of their results: two warpgroups keep 256 columns each in registers.
// Tile t of 64 keys gets its scores and weights from warpgroup t % 2, then both add weights x values to their columns.
// So one warpgroup's softmax runs under the other's products; weights and references go through shared memory.
// A third warpgroup's only thread loads tiles into two buffers. Blocks of a cluster share the loads of keys.
#include "device.cuh"
#include "many_memory.cuh"
#include "many_results.cuh"
#include "many_schedule.cuh"
#include "many_softmax.cuh"
#include "wgmma.cuh"

struct Problem {
    int heads, q_len;
    float scale;  // of scores, to units of log 2
};

// By whole warps. So the compiler keeps one base in a uniform register, rather than each operand's descriptor.
__device__ __forceinline__ u32 uniform_address(const void* p) { return __shfl_sync(~0u, shared_address(p), 0); }

// One of the two warpgroups, and what its threads keep in registers. SIDE: half of the value columns, parity of tiles.
template <int SIDE>
struct Warpgroup {
    Shared& shared;
    float attended[128], total[2], reference[2];
    float scores[32], next[2], sums[2];
    u32 weights[4][4];
    u32 uses = 0;  // of our buffer
    bool moves;

    __device__ explicit Warpgroup(Shared& shared) : shared(shared) {}

    // scores += queries x keys, from slice to slice of the tile that comes into our buffer; a group for each.
    template <int FROM, int TO>
    __device__ __forceinline__ void issue_scores() {
        const auto queries = wgmma::k_major(uniform_address(shared.queries));
        const auto keys = wgmma::k_major(uniform_address(shared.keys[SIDE]));
#pragma unroll
        for (int i = FROM; i < TO; i++) {
            const int slice = slice_at(i);
            barrier_wait(&shared.full[SIDE][slice], uses & 1);
            wgmma::fence();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int on = slice * SLICE_BYTES + 32 * k;
                wgmma::mma(scores, wgmma::advance(queries, on), wgmma::advance(keys, on), i + k > 0);
            }
            wgmma::commit();
        }
    }

    // Our tile: weights from scores; all that the other warpgroup waits for is written.
    template <bool MASKED>
    __device__ __forceinline__ void soften(const Problem& p, const Piece& piece, int tile, const int (&seen)[2]) {
        release(&shared.empty[SIDE][ROTATED]);
        const int keys_left = piece.length - tile * KEYS;
        scale_scores(scores, p.scale);
        if (MASKED) mask_scores(scores, seen[0] - tile * KEYS, seen[1] - tile * KEYS);
        weigh(scores, reference, next, sums);
        round_weights(scores, weights);
        if (MASKED && keys_left < KEYS) {
            named_sync(ALONE + SIDE, 128);  // all four warps have their scores
            clear_rows(shared.keys[SIDE], keys_left);
            fence_async_shared();
            named_sync(ALONE + SIDE, 128);
        }
        store_weights(shared.weights, weights);
        const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        if (threadIdx.x % 4 == 0) {
            shared.reference[SIDE][row] = next[0];
            shared.reference[SIDE][row + 8] = next[1];
        }
        moves = __any_sync(~0u, next[0] != reference[0] || next[1] != reference[1]);
        if (threadIdx.x % 32 == 0) shared.moves[SIDE][threadIdx.x % 128 / 32] = moves;
        named_arrive(WEIGHTS + SIDE);
    }

    // attended += weights x values of our tile.
    __device__ __forceinline__ void issue_own_values() {
        if (moves) move_reference(attended, total, reference, next);
        total[0] += sums[0];
        total[1] += sums[1];
        issue_values(SIDE);
    }

    // The same for the other warpgroup's tile, when it has the weights.
    __device__ __forceinline__ void issue_other_values() {
        named_sync(WEIGHTS + 1 - SIDE, 256);
        load_weights(shared.weights, weights);
        const int4 moves = *reinterpret_cast<int4*>(shared.moves[1 - SIDE]);
        if (__shfl_sync(~0u, moves.x | moves.y | moves.z | moves.w, 0)) {
            if (SIDE == 1) wgmma::wait<0>();  // the compiler wants no product to run when sums are touched
            const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
            const float moved[2] = {shared.reference[1 - SIDE][row], shared.reference[1 - SIDE][row + 8]};
            move_reference(attended, total, reference, moved);
        }
        issue_values(1 - SIDE);
    }

    __device__ __forceinline__ void issue_values(int buffer) {
        const auto values = wgmma::mn_major(uniform_address(shared.keys[buffer][SIDE * HALF]), SLICE_BYTES);
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma::mma<wgmma::MN_MAJOR>(attended, weights[k], wgmma::advance(values, 2048 * k));
        wgmma::commit();
    }

    // When all groups but the last `RUNNING` are done, our half of the values of a buffer is free.
    template <int RUNNING>
    __device__ __forceinline__ void free_values(int buffer) {
        wgmma::wait<RUNNING>();
        wgmma::pin(attended);
        release(&shared.empty[buffer][SIDE]);
        if (buffer == SIDE) uses++;
    }

    // Two tiles, or the last one alone. LEFT: how many follow the first: 0, 1 or more. Even side: when the values of
    // the first are added, those of the second follow, then the scores of the third, which soon wait for their keys.
    template <int LEFT>
    __device__ __forceinline__ void step_even(const Problem& p, const Piece& piece, int tile, const int (&seen)[2]) {
        wgmma::wait<0>();
        wgmma::pin(scores);
        soften<(LEFT < 3)>(p, piece, tile, seen);
        issue_own_values();
        free_values<0>(0);
        if (LEFT == 0) return;
        issue_other_values();
        if (LEFT > 1) issue_scores<0, EARLY>();
        free_values<(LEFT > 1 ? EARLY : 0)>(1);
        if (LEFT > 1) issue_scores<EARLY, SLICES>();
    }

    // Odd side, half a step later: scores of the second run under the softmax of the first, and values of the first
    // under the softmax of the second.
    template <int LEFT>
    __device__ __forceinline__ void step_odd(const Problem& p, const Piece& piece, int tile, const int (&seen)[2]) {
        if (LEFT > 0) issue_scores<0, SLICES>();
        issue_other_values();
        if (LEFT > 0) {
            wgmma::wait<1>();
            wgmma::pin(scores);
            soften<(LEFT < 3)>(p, piece, tile + 1, seen);
        }
        free_values<0>(0);
        if (LEFT == 0) return;
        issue_own_values();
        free_values<0>(1);
    }

    template <int LEFT>
    __device__ __forceinline__ void step(const Problem& p, const Piece& piece, int tile, const int (&seen)[2]) {
        if constexpr (SIDE == 0)
            step_even<LEFT>(p, piece, tile, seen);
        else
            step_odd<LEFT>(p, piece, tile, seen);
    }

    __device__ __forceinline__ void run_tiles(const Problem& p, const Piece& piece, const int (&seen)[2]) {
        int tile = piece.first;
        const int last = piece.last;
        if (SIDE == 0) issue_scores<0, SLICES>();
        for (; tile + 3 < last; tile += 2) step<3>(p, piece, tile, seen);
        if (tile + 2 == last) {
            step<1>(p, piece, tile, seen);
        } else {
            if (tile + 3 == last) step<2>(p, piece, tile, seen), tile += 2;
            step<0>(p, piece, tile, seen);
        }
    }

    // Leaves in `parts` what of its pieces others have parts of as well.
    __device__ __forceinline__ void run(const Problem& p, Schedule& schedule, const Results& results,
                                        Part (&parts)[2]) {
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
        parts[0].count = parts[1].count = 0;
        u32 loads = 0;
        Piece piece;
        while (schedule.next(piece)) {
            const int first_row = (piece.group * CLUSTER + results.rank) * ROWS;
            int seen[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                total[half] = 0.0f;
                reference[half] = NOTHING;
                seen[half] = min(piece.length, piece.length - p.q_len + (first_row + row + 8 * half) / p.heads + 1);
            }
#pragma unroll
            for (int i = 0; i < 128; i++) attended[i] = 0.0f;
            named_sync(BOTH, 256);  // nobody reads totals of the piece before
            if (piece.length > 0) {
                barrier_wait(&shared.queries_full, loads++ & 1);
                run_tiles(p, piece, seen);
                if (lane == 0) barrier_arrive(&shared.queries_empty);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                total[half] = quad_sum(total[half]);
                if (lane % 4 == 0) shared.total[SIDE][row + 8 * half] = total[half];
            }
            named_sync(BOTH, 256);
            total[0] += shared.total[1 - SIDE][row];
            total[1] += shared.total[1 - SIDE][row + 8];
            if (piece.whole()) {
                results.write_whole(attended, total, reference, piece, SIDE);
            } else {
                const Part part = schedule.part(piece);
                results.write_part(attended, total, reference, part, SIDE);
                results.announce(part);
                if (part.order > 0)
                    parts[0] = part;  // the item began before our share
                else
                    parts[1] = part;  // it ends after it
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    attend(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap cache, const int* page_table,
           const int* lengths, const float* kv_scale, u16* attended, float* lse, float4* parts, float* part_lse,
           u32* counters, int batch, int q_len, int heads, int max_pages, float scale) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        prefetch_map(&queries);
        prefetch_map(&cache);
        init_barriers(shared);
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    wait_for_predecessor();
    launch_successor();
    const int rows = heads * q_len, groups = (rows + ROWS * CLUSTER - 1) / (ROWS * CLUSTER);
    Schedule schedule(lengths, batch, groups, blockIdx.x / CLUSTER, gridDim.x / CLUSTER);
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // barriers are there in both blocks
    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x < 288) load(shared, schedule, &queries, &cache, page_table, max_pages);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const float kv = kv_scale ? *kv_scale : 1.0f;
        const Problem problem{heads, q_len, scale * kv * 1.4426950408889634f};
        const Results results{attended, lse, parts, part_lse, counters, kv, rows, int(cluster_rank())};
        Part shared_items[2];
        if (warpgroup == 0)
            Warpgroup<0>(shared).run(problem, schedule, results, shared_items);
        else
            Warpgroup<1>(shared).run(problem, schedule, results, shared_items);
        u32 uses = 0;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (shared_items[i].count > 0) results.combine(shared, shared_items[i], uses++ & 1);
    }
    cluster_barrier();  // until nobody writes to us any more
}
