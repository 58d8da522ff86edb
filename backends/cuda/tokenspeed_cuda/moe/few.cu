// Experts of few tokens, in one launch: as fast as the weights arrive.
//
// A block, one a multiprocessor, finds out for itself which experts there are. Each warp copies the weights that it
// multiplies into a queue of its own in shared memory, stages ahead, so warps wait for each other only to add up.
// Weights of the second half are on their way before the barrier of all blocks that stands between the halves. So many
// registers and so much shared memory leave no room for a second block: all run at once, as the barrier needs.
#include "down.cuh"
#include "gate_up.cuh"

constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int QUEUE = max_of(DEPTH * gate_up::STAGE, down::STAGE);
constexpr int DOWN_DEPTH = QUEUE / down::STAGE;

struct Shared {
    Experts experts;
    gate_up::Lists lists;
    u32 flag[TEAMS];
    union {
        alignas(16) gate_up::Partial up[TEAMS];
        down::Partial down[TEAMS];
    } partial;
    alignas(128) u8 queue[WARPS][QUEUE];
    alignas(16) u16 rows[STAGED > 0 ? STAGED * TOP_K : 1][down::PITCH];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_few(
    const u16* x,                          // [tokens, HIDDEN], rows x_stride apart
    const u8* gate_up_weight,              // [EXPERTS, 2, INTER, HIDDEN] in its format
    const u8* gate_up_scales,              // FP8: [EXPERTS, 2, INTER/128, HIDDEN/128]; NVFP4: [.., INTER, HIDDEN/16]
    const float* gate_up_global_scales,    // NVFP4: [EXPERTS, 2]
    const u8* down_weight,                 // [EXPERTS, HIDDEN, INTER] in its format
    const u8* down_scales,                 // FP8: [EXPERTS, HIDDEN/128, INTER/128]; NVFP4: [.., HIDDEN, INTER/16]
    const float* down_global_scales,       // NVFP4: [EXPERTS]
    const float* weights, const int* ids,  // [tokens, TOP_K]
    u16* inner,                            // [rows, INTER], columns as `place_of` says
    float* parts,                          // [teams, 2, ALL_TOKENS, ROWS] of the second half
    u32* words,                            // the barrier's, then a zero for each ROWS rows of y
    u16* y,                                // [tokens, HIDDEN]
    int tokens, int x_stride, int first_expert) {
    extern __shared__ __align__(128) u8 raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    Experts& experts = s.experts;
    const int warp = threadIdx.x / 32, of_block = warp / TEAM, team = blockIdx.x * TEAMS + of_block;
    const int teams = gridDim.x * TEAMS;

    launch_successor();
    experts.clear();
    wait_for_predecessor();
    // x, which is needed later, comes nearer while ids and weights are read: each line by one block.
    constexpr int LINES = HIDDEN / 64;
    for (int i = threadIdx.x * gridDim.x + blockIdx.x; i < tokens * LINES; i += THREADS * gridDim.x) {
        const u16* line = x + static_cast<size_t>(i / LINES) * x_stride + i % LINES * 64;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
    }
    const u32 found = experts.find(ids, weights, tokens, first_expert);
    const int total = (found & 0x3ff) * gate_up::TILES, here = found >> 10;
    if (here == 0) {
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < tokens * HIDDEN; i += gridDim.x * THREADS) y[i] = 0;
        return;
    }
    const int begin = total * team / teams, end = total * (team + 1) / teams;
    const u32 queue = shared_address(s.queue[warp]);
    gate_up::Source up(gate_up_weight, gate_up_scales, begin, end);
    for (int d = 0; d < DEPTH; d++) up.fill(queue + d * gate_up::STAGE, experts);
    gate_up::list_rows(s.lists, experts, tokens, gate_up_global_scales, down_global_scales, found & 0x3ff);
    gate_up::run(up, begin, queue, experts, s.lists, s.partial.up[of_block], x, x_stride, inner, tokens);

    const down::Share share(here, team, teams);
    down::Source back(down_weight, down_scales, share.begin, share.end, here);
    for (int d = 0; d < DOWN_DEPTH; d++) back.fill(queue + d * down::STAGE, experts);
    grid_barrier(words, gridDim.x, blockIdx.x == 0);
    if constexpr (STAGED > 0) {
        const u32 last = experts.here[here - 1];
        const int count = experts.first_row[last] + __popc(experts.tokens_of[last]);
        for (int i = threadIdx.x; i < count * (INTER / 8); i += THREADS) {
            uint4* row = reinterpret_cast<uint4*>(s.rows[i / (INTER / 8)]);
            row[i % (INTER / 8)] = reinterpret_cast<const uint4*>(inner)[i];
        }
        __syncthreads();
    }
    down::run<DOWN_DEPTH>(
        back, share, queue, experts, s.partial.down[of_block], s.flag[of_block], inner, s.rows, parts, words, y,
        tokens);
}
