// MLA prefill: attention of packed sequences with keys of 192 and values of 128 numbers, each head its own.
//
// A block takes 128 queries of a head, 64 for each of two warpgroups of consumers, and walks over tiles of 128 keys.
// A producer warp fetches the tiles with the copy engine into rings of two, keys and values apart. A consumer keeps
// scores, weights and sums in registers: it issues the scores of the next tile and then the values of this one, and
// while they run turns the scores into weights. The two consumers take turns in issuing, so that the matrix units work
// for one while the other is at its exponentials. Blocks stay: the next work's tiles are fetched while this one ends.
//
// Work is handed out by a counter, in an order that lets blocks at work share what they read (prefill_schedule.cuh).
//
// Macros: CAUSAL, NEGATIVE (scores are multiplied by a negative number, so the least product is the top one).

#include "device.cuh"
#include "prefill_load.cuh"
#include "prefill_shared.cuh"
#include "prefill_softmax.cuh"
#include "prefill_store.cuh"
#include "wgmma.cuh"

// A value that is the same in all lanes, for branches around matrix instructions: the compiler must know it.
__device__ int uniform(int value) { return __shfl_sync(WARP, value, 0); }

// The consumers issue in turns: a named barrier each, at which the one before arrives when it has issued.
__device__ void take_turn(int consumer) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(256) : "memory");
}
__device__ void pass_turn(int consumer) {
    asm volatile("bar.arrive %0, %1;" ::"r"(1 + (consumer + 1) % CONSUMERS), "n"(256) : "memory");
}

// A warpgroup that has 64 queries, and what its threads keep in registers.
struct Consumer {
    Shared& m;
    const float log2_scale;
    const int consumer, thread;
    float o[V_DIM / 2];
    u32 p[TILE / 16][4];  // weights of the last tile, whose values are still to come
    Softmax softmax;

    __device__ Consumer(Shared& m, float log2_scale, int consumer, int thread)
        : m(m), log2_scale(log2_scale), consumer(consumer), thread(thread) {}

    __device__ void free(u64* barrier) const {
        if (thread % 32 == 0) barrier_arrive(barrier);
    }

    // s = queries x the first KEYS keys of a tile.
    template <int KEYS>
    __device__ void issue_scores(float (&s)[KEYS / 2], u32 stage) const {
        wgmma::Descriptor q = wgmma::k_major(shared_address(m.q[consumer]));
        wgmma::Descriptor k = wgmma::k_major(shared_address(m.k)) + stage * (K_BYTES / 16);
        wgmma::fence();
#pragma unroll
        for (int i = 0; i < QK / 16; i++) {
            int slice = i / 4, inside = i % 4 * 32;
            wgmma::mma(s, q + (slice * ROWS * 128 + inside) / 16, k + (slice * TILE * 128 + inside) / 16, i > 0);
        }
        wgmma::commit();
    }

    // o += weights x the first KEYS values of a tile.
    template <int KEYS>
    __device__ void issue_values(u32 stage) {
        wgmma::Descriptor v = wgmma::mn_major(shared_address(m.v), TILE * 128) + stage * (V_BYTES / 16);
        wgmma::fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) wgmma::mma<wgmma::MN_MAJOR>(o, p[i], v + i * 2048 / 16);
        wgmma::commit();
    }

    template <int N>
    __device__ void round_weights(const float (&s)[N]) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) p[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
    }

    // Weights of the first tile. `number`: of a tile, in all that came. `seen`: keys of it that our first query sees.
    template <int KEYS>
    __device__ void begin(u32 number, int seen) {
        float s[KEYS / 2], decay[2];
        Place at(number);
        barrier_wait(&m.k_full[at.stage], at.parity);
        take_turn(consumer);
        issue_scores<KEYS>(s, at.stage);
        pass_turn(consumer);
        wgmma::wait<0>();
        wgmma::pin(s);
        free(&m.k_free[at.stage]);
        if (seen < KEYS) mask(s, seen, thread);
        softmax.weigh(s, log2_scale, decay);
        round_weights(s);
    }

    // Weights of a further tile, and the values of the one before it.
    template <int KEYS>
    __device__ void advance(u32 number, int seen) {
        float s[KEYS / 2], decay[2];
        Place at_k(number), at_v(number - 1);
        barrier_wait(&m.k_full[at_k.stage], at_k.parity);
        take_turn(consumer);
        issue_scores<KEYS>(s, at_k.stage);
        barrier_wait(&m.v_full[at_v.stage], at_v.parity);
        issue_values<TILE>(at_v.stage);
        pass_turn(consumer);
        wgmma::wait<1>();
        wgmma::pin(s);
        free(&m.k_free[at_k.stage]);
        if (seen < KEYS) mask(s, seen, thread);
        softmax.weigh(s, log2_scale, decay);
        wgmma::pin(s);
        wgmma::wait<0>();
        wgmma::pin(o);
        free(&m.v_free[at_v.stage]);
        round_weights(s);
        if (__any_sync(WARP, decay[0] != 1 || decay[1] != 1)) {
#pragma unroll
            for (int i = 0; i < V_DIM / 2; i++) o[i] *= decay[i / 2 % 2];
        }
    }

    // The values of the last tile.
    template <int KEYS>
    __device__ void finish(u32 number) {
        Place at(number);
        barrier_wait(&m.v_full[at.stage], at.parity);
        issue_values<KEYS>(at.stage);
        wgmma::wait<0>();
        wgmma::pin(o);
        free(&m.v_free[at.stage]);
    }

    // A tile that only the other consumer's queries see.
    __device__ void pass_over(u32 number) {
        Place at(number);
        barrier_wait(&m.k_full[at.stage], at.parity);
        take_turn(consumer);
        pass_turn(consumer);
        free(&m.k_free[at.stage]);
        barrier_wait(&m.v_full[at.stage], at.parity);
        free(&m.v_free[at.stage]);
    }

    __device__ void run(u16* out, float* lse, int heads) {
        if (consumer == CONSUMERS - 1) pass_turn(consumer);
        u32 first = 0;  // number of the work's first tile
        for (u32 works = 0;; works++) {
            barrier_wait(&m.q_full[consumer], works & 1);
            Work w = m.work[consumer];
            w.seen = uniform(w.seen), w.keys = uniform(w.keys), w.tiles = uniform(w.tiles);
            if (w.tiles < 0) return;
            softmax = Softmax();
#pragma unroll
            for (int i = 0; i < V_DIM / 2; i++) o[i] = 0;
            int tiles = (w.keys + TILE - 1) / TILE, last = tiles - 1;
            bool half = w.keys - last * TILE <= TILE / 2;  // of the last tile is all that we see
            if (tiles == 1 && half) begin<TILE / 2>(first, w.seen);
            else if (tiles > 0) begin<TILE>(first, w.seen);
            for (int tile = 1; tile < tiles - half; tile++) advance<TILE>(first + tile, w.seen - tile * TILE);
            if (tiles > 1 && half) advance<TILE / 2>(first + last, w.seen - last * TILE);
            free(&m.q_free[consumer]);
            if (tiles > 0 && half) finish<TILE / 2>(first + last);
            else if (tiles > 0) finish<TILE>(first + last);
            store(o, softmax, w, heads, out, lse, thread);
            for (int tile = tiles; tile < w.tiles; tile++) pass_over(first + tile);
            first += w.tiles;
        }
    }
};

extern "C" __global__ void __launch_bounds__(384, 1)
prefill(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
        const int* q_offsets, const int* k_offsets, u16* out, float* lse, u32* counters, int seqs, int heads,
        int group, int kv_tokens, bool mirrored, float log2_scale) {
    extern __shared__ u8 raw[];
    Shared& m = *reinterpret_cast<Shared*>(raw + (-shared_address(raw) & 1023));
    int warpgroup = uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    if (threadIdx.x == 0) {
        prefetch_map(&q);
        prefetch_map(&k);
        prefetch_map(&v);
        for (int c = 0; c < CONSUMERS; c++) {
            barrier_init(&m.q_full[c], 1);
            barrier_init(&m.q_free[c], 4);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&m.k_full[i], 1);
            barrier_init(&m.v_full[i], 1);
            barrier_init(&m.k_free[i], 4 * CONSUMERS);
            barrier_init(&m.v_free[i], 4 * CONSUMERS);
        }
        barrier_init(&m.v_raw, 1);
        barrier_init_done();
    }
    __syncthreads();
    launch_successor();  // all our blocks are at work then: those of the next kernel cannot be in their way
    wait_for_predecessor();
    if (warpgroup == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        if (thread < 32) {
            produce(m, &q, &k, &v, {q_offsets, k_offsets, seqs, heads, group}, kv_tokens, mirrored, counters, thread);
            // The last block to get no more work leaves the counters as they were.
            if (thread == 0 && atomicInc(counters + ENDED, gridDim.x - 1) == gridDim.x - 1) counters[NEXT] = 0;
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        Consumer(m, log2_scale, warpgroup, thread).run(out, lse, heads);
    }
}
