// MLA prefill: attention of packed sequences with keys of 192 and values of 128 numbers, each head its own.
//
// A block takes 128 queries of a head, 64 for each of two warpgroups of consumers, and walks over tiles of 128 keys.
// A producer warp fetches the tiles with the copy engine into rings of two, keys and values apart. A consumer keeps
// scores, weights and sums in registers: it issues the scores of the next tile and then the values of this one, and
// while they run turns the scores into weights. The two consumers take turns in issuing, so that the matrix units work
// for one while the other is at its exponentials. Blocks stay: the next work's tiles are fetched while this one ends.
//
// Work is handed out by a counter, blocks with most keys first, and heads in groups whose keys and values fit L2.
//
// Macros: HEADS, CAUSAL, NEGATIVE (scores are multiplied by a negative number, so the least product is the top one).

#include "device.cuh"
#include "wgmma.cuh"

constexpr int QK = 192, V_DIM = 128, SLICE = 64;  // a slice is what the 128-byte swizzle holds of a row
constexpr int CONSUMERS = 2, ROWS = 64, TILE = 128, STAGES = 2;
constexpr int BLOCK = CONSUMERS * ROWS;
constexpr u32 Q_BYTES = ROWS * QK * 2, K_BYTES = TILE * QK * 2, V_BYTES = TILE * V_DIM * 2;
constexpr float INFINITE = __builtin_huge_valf(), LOWEST = NEGATIVE ? INFINITE : -INFINITE;

// What a consumer has to do: its first query in `q`, how many there are from there on in the sequence, the tiles of keys,
// and how many keys the first query sees, each further one sees one more if causal. Tiles < 0: nothing more to do.
struct Work {
    int head, query, queries, tiles, seen;
};

struct Shared {
    u8 q[CONSUMERS][Q_BYTES];  // [slice][row][64]
    u8 k[STAGES][K_BYTES];     // [slice][key][64]
    u8 v[STAGES][V_BYTES];
    u64 q_full[CONSUMERS], q_free[CONSUMERS], k_full[STAGES], k_free[STAGES], v_full[STAGES], v_free[STAGES], v_raw;
    Work work[CONSUMERS];
};

struct Sequences {
    const int *q_offsets, *k_offsets;
    int seqs, slots, group;
};

// The place in a ring of a running number, and the parity of its phase.
struct Place {
    u32 stage, parity;
    __device__ explicit Place(u32 number) : stage(number % STAGES), parity(number / STAGES % 2) {}
};

// ---- the producer

// A piece of work: a block of queries of a head, the first row of its sequence's keys, and of the sequence after it.
struct Piece {
    int head, query, queries, seen, keys, first_key, end_key;
};

// Heads come in groups; in a group all slots of queries, from the last to the first, each for all heads. A sequence's
// slots start at `offset / BLOCK + number`: room for all, at the price of some that are empty.
__device__ Piece locate(int index, const Sequences& s) {
    int per_group = s.group * s.slots;
    int first_head = index / per_group * s.group, rest = index % per_group;
    int width = min(s.group, HEADS - first_head);
    int slot = s.slots - 1 - rest / width;
    int low = 0, high = s.seqs;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (s.q_offsets[middle] / BLOCK + middle <= slot) low = middle;
        else high = middle;
    }
    int start = s.q_offsets[low], queries = s.q_offsets[low + 1] - start, first_key = s.k_offsets[low];
    int before = (slot - (start / BLOCK + low)) * BLOCK;
    Piece piece;
    piece.head = first_head + rest % width;
    piece.query = start + before;
    piece.queries = queries - before;
    piece.first_key = first_key;
    piece.end_key = s.k_offsets[low + 1];
    piece.keys = piece.end_key - first_key;
    piece.seen = CAUSAL ? piece.keys - queries + before + 1 : piece.keys;
    return piece;
}

template <int SLICES>
__device__ void copy_slices(u8* to, const TensorMap* map, int head, int row, int rows, u64* barrier) {
    for (int i = 0; i < SLICES; i++) copy_box(to + i * rows * 128, map, i * SLICE, row, head, barrier);
}

// Values past a sequence's end are the next one's. Their weights are 0, but 0 · NaN is not.
__device__ void load_last_values(Shared& m, const TensorMap* map, const Piece& p, int tile, u32 stage, u32& raws, int lane) {
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

__device__ void produce(Shared& m, const TensorMap* q, const TensorMap* k, const TensorMap* v, const Sequences& s,
                        int kv_tokens, u32* counter, int lane) {
    u32 loaded_k = 0, loaded_v = 0, works = 0, raws = 0;
    int total = s.slots * HEADS;
    for (int index = blockIdx.x; index < total;) {
        int next = 0;
        if (lane == 0) next = gridDim.x + atomicAdd(counter, 1u);
        Piece p = locate(index, s);
        if (p.queries > 0) {
            int last = CAUSAL ? p.seen + min(BLOCK, p.queries) - 1 : p.keys;
            int tiles = max(last + TILE - 1, 0) / TILE;
            auto load_keys = [&](int tile) {
                Place at(loaded_k++);
                barrier_wait(&m.k_free[at.stage], at.parity ^ 1);
                if (lane == 0) {
                    barrier_expect(&m.k_full[at.stage], K_BYTES);
                    copy_slices<QK / SLICE>(m.k[at.stage], k, p.head, p.first_key + tile * TILE, TILE, &m.k_full[at.stage]);
                }
            };
            if (tiles > 0) load_keys(0);
            for (int c = 0; c < CONSUMERS; c++) {
                barrier_wait(&m.q_free[c], (works & 1) ^ 1);
                if (lane == 0) {
                    int down = c * ROWS;
                    m.work[c] = {p.head, p.query + down, p.queries - down, tiles, p.seen + (CAUSAL ? down : 0)};
                    barrier_expect(&m.q_full[c], Q_BYTES);
                    copy_slices<QK / SLICE>(m.q[c], q, p.head, p.query + down, ROWS, &m.q_full[c]);
                }
            }
            works++;
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
            }
        }
        index = __shfl_sync(0xffffffffu, next, 0);
    }
    for (int c = 0; c < CONSUMERS; c++) {
        barrier_wait(&m.q_free[c], (works & 1) ^ 1);
        if (lane == 0) {
            m.work[c].tiles = -1;
            barrier_arrive(&m.q_full[c]);
        }
    }
}

// ---- the consumers

__device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ float top_of(float a, float b) { return NEGATIVE ? fminf(a, b) : fmaxf(a, b); }

// A value that is the same in all lanes, for branches around matrix instructions: the compiler must know it.
__device__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// The consumers issue in turns: a named barrier each, at which the one before arrives when it has issued.
__device__ void take_turn(int consumer) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(256) : "memory");
}
__device__ void pass_turn(int consumer) {
    asm volatile("bar.arrive %0, %1;" ::"r"(1 + (consumer + 1) % CONSUMERS), "n"(256) : "memory");
}

struct Softmax {
    float top[2] = {LOWEST, LOWEST}, sum[2] = {0, 0};  // of rows lane / 4 and 8 below, the sum only of our columns

    // Scores to weights, in place. `decay` is what earlier sums and outputs are to be multiplied by.
    __device__ void step(float (&s)[TILE / 2], float log2_scale, float (&decay)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float even = top[h], odd = top[h];
#pragma unroll
            for (int i = 0; i < TILE / 8; i++) {
                even = top_of(even, s[4 * i + 2 * h]);
                odd = top_of(odd, s[4 * i + 2 * h + 1]);
            }
            float best = top_of(even, odd);
            best = top_of(best, __shfl_xor_sync(0xffffffffu, best, 1));
            best = top_of(best, __shfl_xor_sync(0xffffffffu, best, 2));
            float base = best == LOWEST ? 0.0f : best * log2_scale;
            decay[h] = exp2_fast(top[h] * log2_scale - base);
            top[h] = best;
            even = 0, odd = 0;
#pragma unroll
            for (int i = 0; i < TILE / 8; i++) {
                float& a = s[4 * i + 2 * h];
                float& b = s[4 * i + 2 * h + 1];
                even += a = exp2_fast(fmaf(a, log2_scale, -base));
                odd += b = exp2_fast(fmaf(b, log2_scale, -base));
            }
            sum[h] = fmaf(sum[h], decay[h], even + odd);
        }
    }
};

// Row i of a fragment sees the keys before `seen` + i if causal, those before `seen` if not.
__device__ void mask(float (&s)[TILE / 2], int seen, int thread) {
    int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int limit = seen - column + (CAUSAL ? row + 8 * h : 0);
#pragma unroll
        for (int i = 0; i < TILE / 8; i++) {
            if (8 * i >= limit) s[4 * i + 2 * h] = LOWEST;
            if (8 * i + 1 >= limit) s[4 * i + 2 * h + 1] = LOWEST;
        }
    }
}

// Four lanes hold a word each of four pieces; lane l gets all of piece l.
__device__ uint4 gather_piece(u32 a, u32 b, u32 c, u32 d, int lane) {
    bool odd = lane & 1, high = lane & 2;
    u32 ab = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1), cd = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
    if (odd) a = ab, c = cd;
    else b = ab, d = cd;
    u32 ac = __shfl_xor_sync(0xffffffffu, high ? a : c, 2), bd = __shfl_xor_sync(0xffffffffu, high ? b : d, 2);
    return high ? uint4{ac, bd, c, d} : uint4{a, b, ac, bd};
}

__device__ void store(const float (&o)[V_DIM / 2], const Softmax& softmax, const Work& w, float log2_scale, u16* out,
                      float* lse, int thread) {
    int lane = thread % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = softmax.sum[h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        float share = sum == 0 ? 0.0f : 1.0f / sum;
        int row = thread / 32 * 16 + lane / 4 + 8 * h;
        long long to = static_cast<long long>(w.query + row) * HEADS + w.head;
        bool inside = row < w.queries;
        if (inside && lane % 4 == 0) {
            lse[to] = sum == 0 ? -INFINITE : (softmax.top[h] * log2_scale + log2f(sum)) * 0.6931471805599453f;
        }
#pragma unroll
        for (int j = 0; j < V_DIM / 32; j++) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = &o[4 * (4 * j + i) + 2 * h];
                words[i] = pack_bf16(pair[0] * share, pair[1] * share);
            }
            uint4 piece = gather_piece(words[0], words[1], words[2], words[3], lane);
            if (inside) reinterpret_cast<uint4*>(out + to * V_DIM)[4 * j + lane % 4] = piece;
        }
    }
}

__device__ void consume(Shared& m, float log2_scale, u16* out, float* lse, int consumer, int thread) {
    using namespace wgmma;
    const Descriptor q = k_major(shared_address(m.q[consumer]));
    const Descriptor k = k_major(shared_address(m.k)), v = mn_major(shared_address(m.v), TILE * 128);
    auto free = [&](u64* barrier) {
        if (thread % 32 == 0) barrier_arrive(barrier);
    };
    float s[TILE / 2], o[V_DIM / 2];
    u32 p[TILE / 16][4];

    auto issue_scores = [&](u32 stage) {
#pragma unroll
        for (int i = 0; i < QK / 16; i++) {
            int slice = i / 4, inside = i % 4 * 32;
            mma<K_MAJOR, K_MAJOR>(s, q + (slice * ROWS * 128 + inside) / 16,
                                  k + (stage * K_BYTES + slice * TILE * 128 + inside) / 16, i > 0);
        }
        commit();
    };
    auto issue_values = [&](u32 stage, bool add) {
#pragma unroll
        for (int i = 0; i < TILE / 16; i++) mma<MN_MAJOR>(o, p[i], v + (stage * V_BYTES + i * 2048) / 16, i > 0 || add);
        commit();
    };
    auto round_weights = [&] {
#pragma unroll
        for (int i = 0; i < TILE / 4; i++) p[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
    };

    if (consumer == CONSUMERS - 1) pass_turn(consumer);
    u32 used_k = 0, used_v = 0;
    for (u32 works = 0;; works++) {
        barrier_wait(&m.q_full[consumer], works & 1);
        Work w = m.work[consumer];
        w.tiles = uniform(w.tiles), w.seen = uniform(w.seen);
        if (w.tiles < 0) return;
        Softmax softmax;
        float decay[2];
        if (w.tiles > 0) {
            Place at(used_k++);
            barrier_wait(&m.k_full[at.stage], at.parity);
            take_turn(consumer);
            fence();
            issue_scores(at.stage);
            pass_turn(consumer);
            wait<0>();
            pin(s);
            free(&m.k_free[at.stage]);
            if (w.seen < TILE) mask(s, w.seen, thread);
            softmax.step(s, log2_scale, decay);
            round_weights();
        }
#pragma unroll
        for (int i = 0; i < V_DIM / 2; i++) o[i] = 0;
        for (int tile = 1; tile < w.tiles; tile++) {
            Place at_k(used_k++), at_v(used_v++);
            barrier_wait(&m.k_full[at_k.stage], at_k.parity);
            take_turn(consumer);
            fence();
            issue_scores(at_k.stage);
            barrier_wait(&m.v_full[at_v.stage], at_v.parity);
            issue_values(at_v.stage, true);
            pass_turn(consumer);
            wait<1>();
            pin(s);
            free(&m.k_free[at_k.stage]);
            int seen = w.seen - tile * TILE;
            if (seen < TILE) mask(s, seen, thread);
            softmax.step(s, log2_scale, decay);
            wait<0>();
            pin(o);
            free(&m.v_free[at_v.stage]);
            round_weights();
#pragma unroll
            for (int i = 0; i < V_DIM / 2; i++) o[i] *= decay[i / 2 % 2];
        }
        free(&m.q_free[consumer]);
        if (w.tiles > 0) {
            Place at(used_v++);
            barrier_wait(&m.v_full[at.stage], at.parity);
            fence();
            issue_values(at.stage, true);
            wait<0>();
            pin(o);
            free(&m.v_free[at.stage]);
        }
        store(o, softmax, w, log2_scale, out, lse, thread);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
prefill(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
        const int* q_offsets, const int* k_offsets, u16* out, float* lse, u32* counters, int seqs, int slots, int group,
        int kv_tokens, float log2_scale) {
    extern __shared__ u8 raw[];
    Shared& m = *reinterpret_cast<Shared*>(raw + (-shared_address(raw) & 1023));
    int warpgroup = uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    if (threadIdx.x == 0) {
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
    wait_for_predecessor();
    if (warpgroup == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread < 32) {
            produce(m, &q, &k, &v, {q_offsets, k_offsets, seqs, slots, group}, kv_tokens, counters, thread);
            // The last block to get no more work leaves the counters as they were.
            if (thread == 0 && atomicInc(counters + 1, gridDim.x - 1) == gridDim.x - 1) *counters = 0;
            launch_successor();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume(m, log2_scale, out, lse, warpgroup, thread);
    }
}
