// MLA decode for few query rows, in one launch: a tile of 64 keys is read once for all of them.
//
// The tiles of all sequences, one after another, are dealt out to the blocks in equal runs; every block finds its own
// from the lengths. The copy engine brings tiles as groups of eight keys x nine slices of 64 numbers, a layout that
// matrix instructions read as keys and as values.
//
// A sequence that lies in one run is written at once. Of others each block leaves its sum in memory, waits for the
// other blocks of the sequence, and adds its part of the numbers of all sums in their order.
#include "few_combine.cuh"
#include "few_narrow.cuh"
#include "few_schedule.cuh"
#include "few_wide.cuh"

// A lane fetches eight keys of each tile. Rows of queries past a sequence's may be those of the next; nobody asks what
// they attend to.
__device__ __forceinline__ void fetch(
    Shared& shared, Share share, const TensorMap* queries, const TensorMap* cache, const int* table,
    const int* lengths, int max_pages
) {
    const int group = threadIdx.x % 32;
    u32 count = 0, turn = 0;
    Run run;
    while (share.next(run, lengths)) {
        if (run.length > 0 && group < N / 8) {
            if (turn > 0) barrier_wait(&shared.q_empty, (turn + 1) % 2);
            turn++;
            barrier_expect(&shared.q_full, GROUP_BYTES);
            copy_box(shared.q + group * GROUP_BYTES, queries, 0, run.sequence * ROWS + 8 * group, 0, 0, &shared.q_full);
        }
        for (u32 at = run.at; at < run.end && run.length > 0; at++, count++) {
            const int key = at * TILE + 8 * group;
            // A box outside of the cache is filled with zeros.
            const int page = key < run.length ? table[u64(run.sequence) * max_pages + key / PAGE] : -1;
            const u32 stage = count % STAGES;
            if (count >= STAGES) barrier_wait(&shared.empty[stage][group * PARTS / 8], (count / STAGES + 1) % 2);
            barrier_expect(&shared.full[stage], FETCHED_BYTES);
            u8* to = shared.fetched(stage) + group * FETCHED_BYTES;
            copy_box(to, cache, 0, key % PAGE, 0, page, &shared.full[stage]);
        }
    }
}

// What is left to do for sequences that this block has only a part of.
__device__ __forceinline__ void finish(
    const Results& results, const Share& share, const Open& open, const int* lengths
) {
    const int adder = threadIdx.x - (NARROW ? 0 : 128);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (open.sequence[i] < 0) continue;
        const u32 first = share.block_of(open.before[i]);
        const u32 blocks = share.block_of(open.before[i] + tiles_of(lengths[open.sequence[i]]) - 1) - first + 1;
        if (adder == 0) wait_for_parts(results.arrived + open.sequence[i], blocks);
        barrier_of<3, ADDERS>();
        // So that most sums are loaded at once.
        if (blocks > 32) combine<8, 17>(results, open.sequence[i], first, blocks, adder);
        else if (blocks > 8) combine<2, 16>(results, open.sequence[i], first, blocks, adder);
        else combine<1, 8>(results, open.sequence[i], first, blocks, adder);
        if (adder == 0) leave(results.arrived + open.sequence[i], blocks);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mla_decode_few(
    const __grid_constant__ TensorMap queries,  // [1, 9 slices, batch · ROWS, 64], boxes of 8 rows
    const __grid_constant__ TensorMap cache,    // [pages, 9 slices, PAGE, 64], boxes of 8 keys
    const int* table,                           // [batch, max_pages]
    const int* lengths,                         // [batch]
    const float* cache_scale,                   // [1] or null
    u16* attended, float* lse, uint4* parts, float4* states, int* arrived, int batch, int max_pages, float scale
) {
    extern __shared__ u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-shared_address(memory) & 1023));
    if (threadIdx.x == PRODUCER) {
        prefetch_map(&queries);
        prefetch_map(&cache);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(&shared.full[stage], 8);
            for (int i = 0; i < PARTS; i++) barrier_init(&shared.empty[stage][i], CONVERTED ? CONVERTERS : 8);
        }
        barrier_init(&shared.q_full, N / 8);
        barrier_init(&shared.q_empty, NARROW ? 8 : 4);
        barrier_init(&shared.p_full, 128);
        barrier_init(&shared.p_empty, 8);
        barrier_init(&shared.tile_empty, 8);
        barrier_init_done();
    }
    __syncthreads();
    wait_for_predecessor();
    launch_successor();
    if (threadIdx.x < 32) {
        const Share found = find_share(lengths, batch);
        if (threadIdx.x == 0) {
            shared.share = found;
            shared.value_scale = cache_scale ? *cache_scale : 1;
            shared.unit = scale * shared.value_scale * 1.4426950408889634f;
        }
    }
    __syncthreads();
    if (blockIdx.x >= shared.share.blocks) return;
    const Results results{attended, lse, parts, states, arrived, &shared.value_scale};
    // Warpgroups take the registers that others give back, no more: (168 - 40) · 128 = (232 - 168) · 256, and
    // (128 - 56) · 128 + (128 - 88) · 128 = (184 - 128) · 256.
    Open open;
    if constexpr (NARROW) {
        if (threadIdx.x >= PRODUCER) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
            if (threadIdx.x < PRODUCER + 8) fetch(shared, shared.share, &queries, &cache, table, lengths, max_pages);
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
            narrow::consume(shared, shared.share, lengths, results, open);
            finish(results, shared.share, open, lengths);
        }
    } else {
        if (threadIdx.x >= PRODUCER) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
            if (threadIdx.x >= PRODUCER + 32 * HELPERS) {
                if (threadIdx.x < PRODUCER + 32 * HELPERS + 8) {
                    fetch(shared, shared.share, &queries, &cache, table, lengths, max_pages);
                }
            } else if (CONVERTED) {
                wide::help(shared, shared.share, lengths);
            }
        } else if (threadIdx.x < 128) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
            wide::score(shared, shared.share, lengths, results);
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 184;");
            wide::add(shared, shared.share, lengths, results, open);
            finish(results, shared.share, open, lengths);
        }
    }
}
