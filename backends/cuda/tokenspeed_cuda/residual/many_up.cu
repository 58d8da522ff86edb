// Gated residual of many tokens, last step: mixed = mean over streams of sigmoid(low W_upᵀ) ⊙ n, with the gates in
// registers all the way.
//
// A block keeps the rows of W_up for 64 columns of each stream in shared memory, 160 KB, and walks over tokens. Its two
// warpgroups take tiles of 64 tokens each on their own: while one gates and writes, the other multiplies. A tile of the
// low-rank activations comes in pieces of 64 ranks through a ring of four; n goes from memory to registers, asked for
// before the products.
//
// The rows of W_up lie in an order that gives a thread eight neighbouring columns: where the fragment of a product has
// columns 8 j + 2 t + e of thread t, the row of column 8 t + 2 j + e lies. The copy engine does that, by a map of five
// dims.
#include "device.cuh"
#include "wgmma.cuh"

namespace {

constexpr int STREAMS = 4;
constexpr int COLUMNS = 64;                    // of each stream
constexpr int N = STREAMS * COLUMNS;           // of a product
constexpr int TILE = 64;                       // tokens
constexpr int PIECES = RANK / 64;
constexpr int RING = 4;
constexpr int B_PIECE = N * 128, A_PIECE = TILE * 128;  // bytes
static_assert(RANK % 64 == 0 && HIDDEN % COLUMNS == 0 && PIECES > RING - 1);

__device__ __forceinline__ void copy_rows(void* to, const TensorMap* map, int k, int rows, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %3, %3, %4}], [%5];"
                 ::"r"(shared_address(to)), "l"(map), "r"(k), "r"(0), "r"(rows), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void warpgroup_barrier(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// One instruction of the slow unit where an exponential and a division are two; within 2^-11 of it.
__device__ __forceinline__ float tanh_half(float v) {
    float result;
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(0.5f * v));
    return result;
}

__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

}  // namespace

// `low_map`: [tokens, RANK] in boxes of [64, 64]; `up_map`: W_up as [rows / 32, j, t, e, RANK] in boxes of
// [1, 4, 4, 2, 64]. `products`: W_inject n of each stream alone, [tokens, STREAMS, GATES].
extern "C" __global__ void __launch_bounds__(256, 1)
gate_up(const __grid_constant__ TensorMap low_map, const __grid_constant__ TensorMap up_map, const u16* normed,
        const float* products, u16* mixed, float* gates, int tokens) {
    extern __shared__ __align__(1024) char shared[];
    char* const s_up = shared;  // [PIECES][N][64]
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    char* const ring = shared + PIECES * B_PIECE + group * (RING * A_PIECE);
    u64* const barriers = reinterpret_cast<u64*>(shared + PIECES * B_PIECE + 2 * RING * A_PIECE);
    u64* const full = barriers + 1 + group * RING;

    const int first_column = blockIdx.x * COLUMNS;
    const int tiles = (tokens + TILE - 1) / TILE, step = 2 * gridDim.y, first_tile = 2 * blockIdx.y + group;
    launch_successor();
    if (threadIdx.x == 0) {
        for (int i = 0; i < 1 + 2 * RING; i++) barrier_init(&barriers[i], 1);
        barrier_init_done();
        barrier_expect(&barriers[0], PIECES * B_PIECE);
        for (int k = 0; k < PIECES; k++)
            for (int i = 0; i < N / 32; i++)
                copy_rows(s_up + k * B_PIECE + i * 4096, &up_map, 64 * k,
                          (i / 2 * HIDDEN + first_column) / 32 + i % 2, &barriers[0]);
    }
    __syncthreads();
    wait_for_predecessor();

    const auto ask = [&](int tile, int piece, int count) {
        u64* barrier = &full[count % RING];
        barrier_expect(barrier, A_PIECE);
        copy_box(ring + count % RING * A_PIECE, &low_map, 64 * piece, tile * TILE, barrier);
    };
    if (thread == 0 && first_tile < tiles)
        for (int i = 0; i < RING; i++) ask(first_tile, i, i);
    barrier_wait(&barriers[0], 0);

    int count = 0;  // pieces used
    for (int tile = first_tile; tile < tiles; tile += step) {
        const int token = tile * TILE + 16 * warp + lane / 4;  // and the eighth after it
        const int column = first_column + 8 * (lane % 4);      // eight of them, and those 32 on
        uint4 values[2][STREAMS][2];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int s = 0; s < STREAMS; s++)
#pragma unroll
                for (int q = 0; q < 2; q++)
                    if (token + 8 * h < tokens)
                        values[h][s][q] =
                            load_once(normed + (u64(token + 8 * h) * STREAMS + s) * HIDDEN + column + 32 * q);

        float logits[N / 2];
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++, count++) {
            barrier_wait(&full[count % RING], count / RING & 1);
            wgmma::fence();
#pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma::mma(logits, wgmma::k_major(shared_address(ring) + count % RING * A_PIECE + 32 * k),
                           wgmma::k_major(shared_address(s_up) + piece * B_PIECE + 32 * k), piece + k > 0);
            wgmma::commit();
            if (piece >= 1 && piece + RING - 1 < PIECES) {  // the slot of the piece before is free
                wgmma::wait<1>();
                warpgroup_barrier(group);
                if (thread == 0) ask(tile, piece + RING - 1, count + RING - 1);
            }
        }
        wgmma::wait<0>();
        wgmma::pin(logits);
        warpgroup_barrier(group);
        if (thread == 0 && tile + step < tiles)
            for (int i = 0; i < RING; i++) ask(tile + step, i, count + i);

#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int q = 0; q < 2; q++) {
                float sums[8] = {};  // of n (1 + tanh(logit / 2)), twice the sigmoid
#pragma unroll
                for (int s = 0; s < STREAMS; s++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int at = 4 * (8 * s + 4 * q + j) + 2 * h;
                        const u32 pair = word(values[h][s][q], j);
                        const float low = low_to_float(pair), high = high_to_float(pair);
                        sums[2 * j] += low + tanh_half(logits[at]) * low;
                        sums[2 * j + 1] += high + tanh_half(logits[at + 1]) * high;
                    }
                const auto mean = [&](int j) {
                    return pack_bf16(0.5f / STREAMS * sums[2 * j], 0.5f / STREAMS * sums[2 * j + 1]);
                };
                const uint4 out = make_uint4(mean(0), mean(1), mean(2), mean(3));
                if (token + 8 * h < tokens)
                    *reinterpret_cast<uint4*>(mixed + u64(token + 8 * h) * HIDDEN + column + 32 * q) = out;
            }
        if (blockIdx.x == 0)
            for (int i = thread; i < TILE * GATES; i += 128) {
                constexpr int EACH = GATES ? GATES : 1;
                const int at = tile * TILE + i / EACH, gate = i % EACH;
                if (at < tokens) {
                    float sum = 0.0f;
                    for (int s = 0; s < STREAMS; s++) sum += products[(u64(at) * STREAMS + s) * EACH + gate];
                    gates[u64(at) * EACH + gate] = __fdividef(2.0f, 1.0f + __expf(-sum / STREAMS));
                }
            }
    }
}
