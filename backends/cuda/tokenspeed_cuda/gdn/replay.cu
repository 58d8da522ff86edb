// Verifies drafted tokens of the gated delta rule from a state that is only read, after replaying tokens kept before.
//
// Nothing is done to the state S token by token. What token j adds along its key is
//     d_j = beta_j (v_j - decay(0..j) S k_j - sum over i < j of decay(i..j) (k_i k_j) d_i)
// and a query reads likewise: every product with S is one of keys that are known from the start. So a warp multiplies
// rows of S once, on tensor cores, with all of them: 8 kept keys, 4 new ones and 4 queries are the 16 rows of A, 8 rows
// of S the columns of B. Keys in bfloat16 are exact there; S goes as two bfloat16 parts. The products of keys with each
// other come from the same instructions. The triangular system is inverted once for all rows, so that an output is a
// sum of 12 values and 13 reads with weights that all rows share.
//
// Where the kept tokens leave no room for the new ones, S advances by them while it lies in registers: again a product
// on tensor cores, of what they add, in three bfloat16 parts, and their keys.
//
// Keys and gates of new tokens are stored by one block. After a fold they go to rows that other blocks read in this
// call, and the last of these stores them.
#include "replay_system.cuh"

struct Rows {
    float4 at[8];  // of row lane / 4: columns 16 s + 4 (lane % 4) to + 3

    __device__ __forceinline__ void load(const float* p, u64 policy) {
#pragma unroll
        for (int s = 0; s < 8; s++) at[s] = load_state(p + 16 * s, policy);
    }

    // Products with all keys and queries: reads[row][token].
    __device__ __forceinline__ void multiply(float (*reads)[ALL + 4], const Shared& sh, int lane) const {
        float c[4][4] = {};
#pragma unroll
        for (int s = 0; s < 8; s++) {
            u32 keys[4];
            load_keys(keys, sh, s, lane);
            const float4 x = at[s];
            const u32 b0 = pack_bf16(x.x, x.y), b1 = pack_bf16(x.z, x.w);
            const u32 rest0 = pack_bf16(x.x - low_to_float(b0), x.y - high_to_float(b0));
            const u32 rest1 = pack_bf16(x.z - low_to_float(b1), x.w - high_to_float(b1));
            mma_bf16(c[s % 2], keys, b0, b1);
            mma_bf16(c[2 + s % 2], keys, rest0, rest1);
        }
        const int token = lane / 4, row = lane % 4 * 2;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++)
            reads[row + i % 2][token + i / 2 * 8] = (c[2][i] + c[3][i]) + (c[0][i] + c[1][i]);
        __syncwarp();
    }

    // S = whole S + sum of what kept tokens 2 t and 2 t + 1 (t = lane % 4) add, d0 and d1, along their keys.
    __device__ __forceinline__ void advance(
        float* to, float whole, float d0, float d1, const Shared& sh, int lane) const {
        u32 a[4];  // rows 0 to 7: the first part, and for the same keys once more the third; rows 8 to 15: the second
        a[0] = pack_bf16(d0, d1);
        d0 -= low_to_float(a[0]), d1 -= high_to_float(a[0]);
        a[1] = pack_bf16(d0, d1);
        a[2] = pack_bf16(d0 - low_to_float(a[1]), d1 - high_to_float(a[1]));
        a[3] = 0;
#pragma unroll
        for (int s = 0; s < 8; s += 2) {
            u32 keys[4];
            load_transposed(keys, &sh.keys[lane % 8][16 * s + lane / 8 * 8]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 x = at[s + i];
                float low[4] = {x.x * whole, x.y * whole}, high[4] = {x.z * whole, x.w * whole};
                mma_bf16(low, a, keys[2 * i], keys[2 * i]);
                mma_bf16(high, a, keys[2 * i + 1], keys[2 * i + 1]);
                const float4 sum = {low[0] + low[2], low[1] + low[3], high[0] + high[2], high[1] + high[3]};
                *reinterpret_cast<float4*>(to + 16 * (s + i)) = sum;
            }
        }
    }
};

__device__ __forceinline__ void prefetch_line_of(const u16* p, int at) {
    if (p != nullptr) prefetch_line(p + at);
}

// How many came here before; the word is 0 again after the last of `blocks`.
__device__ __forceinline__ u32 count_arrival(u32* word, u32 blocks) {
    u32 before;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(word), "r"(blocks - 1) : "memory");
    return before;
}

__device__ __forceinline__ void preparing_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(SHARE) : "memory"); }

// Where a block finds its tokens.
struct Where {
    const u16 *q, *k, *v;       // of the sequence and head, first token
    u16 *kept_k, *kept_v;       // of the slot and head, first row
    float *kept_g, *kept_beta;  // of the slot, first row, all heads
    i64 q_token, k_token, v_token;

    __device__ __forceinline__ const u16* key(int j, int count) const {
        if (j < KEPT) return j < count ? kept_k + j * (K_HEADS * D_K) : nullptr;
        if (j < TOKENS) return j - KEPT < Q_LEN ? k + (j - KEPT) * k_token : nullptr;
        return j - TOKENS < Q_LEN ? q + (j - TOKENS) * q_token : nullptr;
    }
    __device__ __forceinline__ const u16* value(int j, int count) const {
        if (j < KEPT) return j < count ? kept_v + j * (V_HEADS * D_V) : nullptr;
        return j - KEPT < Q_LEN ? v + (j - KEPT) * v_token : nullptr;
    }
};

__device__ __forceinline__ uint4 load_or_zero(const u16* p, int at) {
    return p == nullptr ? uint4{} : *reinterpret_cast<const uint4*>(p + at);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gdn_verify_replay(
    const u16* q, const u16* k, const u16* v, const float* g, const float* beta, float* state, u16* kept_k, u16* kept_v,
    float* kept_g, float* kept_beta, const int* slots, const int* kept, u16* o, u32* arrivals, float scale, int pool,
    i64 q_batch, i64 q_token, i64 q_head, i64 k_batch, i64 k_token, i64 k_head, i64 v_batch, i64 v_token, i64 v_head) {
    __shared__ Shared sh;
    const bool holds = !APART || threadIdx.x < SHARE, prepares = !APART || !holds;
    const int thread = threadIdx.x % SHARE, lane = thread % 32, warp = thread / 32;
    const int tile = blockIdx.x % TILES, head = blockIdx.x / TILES % V_HEADS, batch = blockIdx.x / (TILES * V_HEADS);
    const int key_head = head / GROUP;
    constexpr i64 SLOT = static_cast<i64>(V_HEADS) * D_V * D_K;
    const float* new_g = g + static_cast<i64>(batch) * (Q_LEN * V_HEADS);
    const float* new_beta = beta + static_cast<i64>(batch) * (Q_LEN * V_HEADS);
    float* tile_at = state + (head * D_V + tile * ROWS) * D_K;  // of slot 0
    const auto where = [&](i64 slot) {
        const i64 first = slot * CAPACITY;
        return Where{q + batch * q_batch + key_head * q_head, k + batch * k_batch + key_head * k_head,
                     v + batch * v_batch + head * v_head + tile * ROWS,
                     kept_k + (first * K_HEADS + key_head) * D_K, kept_v + (first * V_HEADS + head) * D_V + tile * ROWS,
                     kept_g + first * V_HEADS, kept_beta + first * V_HEADS, q_token, k_token, v_token};
    };
    const bool is_new = thread >= KEPT && thread < KEPT + Q_LEN;  // has the gates of a new token
    const int gate_at = (is_new ? thread - KEPT : thread) * V_HEADS + head;

    launch_successor();
    int slot = -1, count = 0;
    if (APART) {
        slot = load_fresh(slots + batch), count = load_fresh(kept + batch);
        if (slot >= pool || count < 0 || count > CAPACITY) slot = -1;
        if (slot >= 0 && prepares) {
            const Where at = where(slot);
            if (thread == 0) prefetch_bulk(tile_at + slot * SLOT, ROWS * D_K * 4);
            if (warp == 1) prefetch_line_of(at.key(lane / 2, count), lane % 2 * 64);
            if (warp == 2 && lane < TOKENS) prefetch_line_of(at.value(lane, count), 0);
            if (thread < count) prefetch_line(at.kept_g + gate_at), prefetch_line(at.kept_beta + gate_at);
            if (is_new) prefetch_line(new_g + gate_at), prefetch_line(new_beta + gate_at);
        }
    }
    wait_for_predecessor();
    const int true_slot = load_fresh(slots + batch), true_count = load_fresh(kept + batch);
    const int row = warp * (8 * GROUPS) + lane / 4;  // of the tile, in the first group
    constexpr int PER_TOKEN = ROWS / 8, CHUNKS = TOKENS * PER_TOKEN, CHUNK_STEPS = (CHUNKS + SHARE - 1) / SHARE;
    uint4 key_chunks[2], value_chunks[CHUNK_STEPS];
    float gate = 0, strength = 0;
    constexpr int AHEAD = GROUPS > 1 ? 2 : 1;  // groups that are held or on their way
    Rows rows[AHEAD];
    Where at;
    float* rows_at;
    u64 policy;
    for (;;) {
        if (slot >= 0) {
            at = where(slot);
            rows_at = tile_at + slot * SLOT + row * D_K + lane % 4 * 4;
            policy = count + Q_LEN > CAPACITY ? keeping() : as_usual();
            if (prepares) {
                for (int i = 0; i < 2; i++)
                    key_chunks[i] = load_or_zero(at.key(thread / 16 + 8 * i, count), thread % 16 * 8);
                gate = 0, strength = 0;
                if (is_new) gate = new_g[gate_at], strength = new_beta[gate_at];
                if (thread < count) gate = at.kept_g[gate_at], strength = at.kept_beta[gate_at];
            }
            if (holds) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++) rows[i].load(rows_at + i * (8 * D_K), policy);
            }
            for (int i = 0; prepares && i < CHUNK_STEPS; i++) {
                const int chunk = thread + i * SHARE;
                if (chunk < CHUNKS)
                    value_chunks[i] = load_or_zero(at.value(chunk / PER_TOKEN, count), chunk % PER_TOKEN * 8);
            }
        }
        if (slot == true_slot && count == true_count) break;
        slot = true_slot, count = true_count;
    }
    u16* out = o + (static_cast<i64>(batch) * (Q_LEN * V_HEADS) + head) * D_V + tile * ROWS;
    if (slot < 0) {
        for (int i = thread; i < Q_LEN * ROWS; i += SHARE) out[i / ROWS * (V_HEADS * D_V) + i % ROWS] = 0;
        return;
    }
    const bool folds = count + Q_LEN > CAPACITY;
    const int first = folds ? 0 : count;  // row of the buffers that the first new token goes to

    if (prepares) {
        if (thread < TOKENS) sh.decays[thread] = gate, sh.strengths[thread] = strength;
        for (int i = 0; i < 2; i++) {
            u16* to = &sh.keys[thread / 16 + 8 * i][thread % 16 / 2 * 16 + thread % 2 * 4];
            *reinterpret_cast<uint2*>(to) = {key_chunks[i].x, key_chunks[i].z};
            *reinterpret_cast<uint2*>(to + 8) = {key_chunks[i].y, key_chunks[i].w};
        }
        for (int i = 0; i < CHUNK_STEPS; i++) {
            const int chunk = thread + i * SHARE;
            if (chunk < CHUNKS)
                *reinterpret_cast<uint4*>(&sh.values[chunk / PER_TOKEN][chunk % PER_TOKEN * 8]) = value_chunks[i];
        }
    }
    __syncthreads();  // all that this block reads of the buffers has been read

    constexpr u32 READERS = GROUP * TILES;
    u32 arrived = 0;
    if (prepares) {
        multiply_keys(sh, warp, lane);
        if (folds && thread == 0) arrived = count_arrival(arrivals + batch * K_HEADS + key_head, READERS);
        for (int i = 0; i < CHUNK_STEPS; i++) {
            const int chunk = thread + i * SHARE, token = chunk / PER_TOKEN - KEPT;
            if (token >= 0 && token < Q_LEN) {
                u16* to = at.kept_v + (first + token) * (V_HEADS * D_V) + chunk % PER_TOKEN * 8;
                *reinterpret_cast<uint4*>(to) = value_chunks[i];
            }
        }
        if (!folds && tile == 0) {
            if (head % GROUP == 0 && thread / 16 < Q_LEN) {
                u16* to = at.kept_k + (first + thread / 16) * (K_HEADS * D_K) + thread % 16 * 8;
                *reinterpret_cast<uint4*>(to) = key_chunks[1];
            }
            if (is_new) at.kept_g[first * V_HEADS + gate_at] = gate, at.kept_beta[first * V_HEADS + gate_at] = strength;
        }
        const Equation equation(sh);
        preparing_barrier();
        equation.write(sh, scale);
        preparing_barrier();
        if (thread < TOKENS) solve(sh, thread);
        __syncwarp();
    }
    if (holds) rows[0].multiply(sh.reads[warp], sh, lane);
    __syncthreads();

#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (!holds) break;
        Rows& mine = rows[group % AHEAD];
        if (group > 0) mine.multiply(sh.reads[warp], sh, lane);
        const int tile_row = row + 8 * group, query = lane % 4;
        float reads[TOKENS], values[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
            reads[i] = sh.reads[warp][lane / 4][i];
            values[i] = bf16_to_float(sh.values[i][tile_row]);
        }
        const float* weights = sh.weights[KEPT + query];
        float sum = sh.from_read[TOKENS + query] * sh.reads[warp][lane / 4][TOKENS + query];
#pragma unroll
        for (int i = 0; i < TOKENS; i++) sum += weights[i] * values[i] + weights[TOKENS + i] * reads[i];
        if (query < Q_LEN) out[query * (V_HEADS * D_V) + tile_row] = float_to_bf16(sum);
        if (folds) {
            float d[2] = {0, 0};
            const float *even = sh.weights[2 * query], *odd = sh.weights[2 * query + 1];
#pragma unroll
            for (int i = 0; i < KEPT; i++) {
                d[0] += even[i] * values[i] + even[TOKENS + i] * reads[i];
                d[1] += odd[i] * values[i] + odd[TOKENS + i] * reads[i];
            }
            mine.advance(rows_at + group * (8 * D_K), sh.whole, d[0], d[1], sh, lane);
        }
        if (group + AHEAD < GROUPS) mine.load(rows_at + (group + AHEAD) * (8 * D_K), policy);
    }

    if (folds && prepares && warp == 0 && __shfl_sync(~0u, arrived, 0) == READERS - 1) {
        for (int i = lane; i < Q_LEN * (D_K / 8); i += 32) {
            const int token = i / (D_K / 8), chunk = i % (D_K / 8) * 8;
            u16* to = at.kept_k + token * (K_HEADS * D_K) + chunk;
            *reinterpret_cast<uint4*>(to) = load_or_zero(at.k + token * k_token, chunk);
        }
        for (int i = lane; i < Q_LEN * GROUP; i += 32) {
            const int gates = i / GROUP * V_HEADS + key_head * GROUP + i % GROUP;
            at.kept_g[gates] = new_g[gates], at.kept_beta[gates] = new_beta[gates];
        }
    }
}
