// The producing warpgroups: for each chunk, everything that does not need the state. With k, q unit vectors,
//     L_ij = beta_i exp(G_i - G_j) k_i . k_j  for i > j,   T = (I + L)^-1 diag(beta),
//     A_ij = exp(G_i - G_j) q_i . k_j         for i >= j.
#pragma once

#include "prefill_invert.cuh"

constexpr bool EARLY = CONSUMERS == 1;  // decays before the products are there, where registers allow it
constexpr u32 ALL = 1, INVERTING = 2;  // barriers of all producers and of those that invert

// One warp: prefix sums in float64, so that their differences are good after large ones. exp(-50) counts as nothing.
__device__ __forceinline__ void sum_gates(const Sequence& seq, int chunk, u32 stage, int lane) {
    const u32 own = stage + AT_GATES + 2 * lane * 16 + seq.head % 4 * 4;  // of token 2 lane; four heads lie together
    const int left = seq.length - chunk * CHUNK - 2 * lane;
    const float2 g = make_float2(left > 0 ? load_shared_float(own) : 0.f, left > 1 ? load_shared_float(own + 16) : 0.f);
    constexpr double LOG2_E = 1.4426950408889634;
    const double first = double(fmaxf(g.x, -50.f)) * LOG2_E;
    const double both = first + double(fmaxf(g.y, -50.f)) * LOG2_E;
    double upto = both;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double before = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += before;
    }
    const double all = __shfl_sync(~0u, upto, 31);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const double sum = i ? upto : upto - both + first;
        const u32 at = stage + (2 * lane + i) * 4;
        store_shared_float(at + AT_SUMS, float(sum));
        store_shared_float(at + AT_FROM_START, exp2_fast(float(sum)));
        store_shared_float(at + AT_TO_END, exp2_fast(float(all - sum)));
        store_shared_float(at + AT_BETA, left > i ? load_shared_float(own + GATES + i * 16) : 0.f);
    }
}

// By one thread: asks for the rows of a chunk, and calls those of the next one into the L2 cache. Rows beyond the
// sequence come too, where there are some.
__device__ __forceinline__ void request(const Call& call, const Sequence& seq, int chunk, int first_value, u32 stage,
                                        u64* arrived) {
    const int token = int(seq.token) + chunk * CHUNK, key_head = seq.head / (V_HEADS / K_HEADS);
    barrier_expect(arrived, (4 + CONSUMERS) * PANEL + 2 * GATES);
    copy_box(shared_pointer<u8>(stage + AT_GATES), call.g, seq.head / 4 * 4, token, arrived);
    copy_box(shared_pointer<u8>(stage + AT_GATES + GATES), call.beta, seq.head / 4 * 4, token, arrived);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        copy_box(shared_pointer<u8>(stage + AT_K + half * PANEL), call.k, 64 * half, key_head, token, arrived);
        copy_box(shared_pointer<u8>(stage + AT_Q + half * PANEL), call.q, 64 * half, key_head, token, arrived);
        if (half < CONSUMERS) {
            u8* const to = shared_pointer<u8>(stage + AT_V + half * PANEL);
            copy_box(to, call.v, first_value + 64 * half, seq.head, token, arrived);
        }
    }
    if ((chunk + 1) * CHUNK >= seq.length) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        prefetch_box(call.k, 64 * half, key_head, token + CHUNK);
        prefetch_box(call.q, 64 * half, key_head, token + CHUNK);
        if (half < CONSUMERS) prefetch_box(call.v, first_value + 64 * half, seq.head, token + CHUNK);
    }
}

// Rows of all six tiles from `left` on become zeros.
__device__ __forceinline__ void clear_rows(u32 stage, int left, int thread) {
    for (int at = left * 8 + thread; at < CHUNK * 8; at += 128) {
        for (u32 tile = AT_K; tile < AT_V + CONSUMERS * PANEL; tile += PANEL) {
            if (tile != AT_T && tile != AT_A) store_shared4(stage + tile + at * 16, make_uint4(0, 0, 0, 0));
        }
    }
}

// bfloat16 to float16 in place, divided by its length: 16 rows of K or Q, as fragments. The squared lengths are the
// diagonal of the rows' products with one another.
__device__ __forceinline__ void normalise(u32 tile, int warp, int lane) {
    const u32 first = piece_at(tile, 16 * warp + lane % 16, lane / 16);
    u32 words[8][4];
    float low[2][4] = {}, high[2][4] = {};  // products of rows 0 to 7, 8 to 15; even and odd steps
#pragma unroll
    for (int step = 0; step < 8; step++) {
        load_tiles(words[step], (first ^ step % 4 << 5) + step / 4 * PANEL);
        mma_bf16(low[step % 2], words[step], words[step][0], words[step][2]);
        mma_bf16(high[step % 2], words[step], words[step][1], words[step][3]);
    }
    const int holder = lane / 4 * 4 + lane / 8;  // of the diagonal, for this lane's rows
    const bool odd = lane & 4;
    const float first_square = odd ? low[0][1] + low[1][1] : low[0][0] + low[1][0];
    const float second_square = odd ? high[0][3] + high[1][3] : high[0][2] + high[1][2];
    const float factors[2] = {inverse_root(__shfl_sync(~0u, first_square, holder) + 1e-6f),
                              inverse_root(__shfl_sync(~0u, second_square, holder) + 1e-6f)};
#pragma unroll
    for (int step = 0; step < 8; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32& word = words[step][i];
            word = pack_f16(low_to_float(word) * factors[i % 2], high_to_float(word) * factors[i % 2]);
        }
        store_tiles((first ^ step % 4 << 5) + step / 4 * PANEL, words[step]);
    }
}

// Starts the products of rows of `tile` (Q or K) and K.
__device__ __forceinline__ void start_products(float (&products)[32], u32 tile, u32 keys) {
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < 8; step++) {
        const u32 at = step / 4 * PANEL + step % 4 * 32;
        wgmma::mma_f16(products, wgmma::k_major(tile + at), wgmma::k_major(keys + at), step > 0);
    }
    wgmma::commit();
}

// exp(G_i - G_j), zero above the diagonal, as a product's fragment.
__device__ __forceinline__ void find_decays(float (&decays)[32], u32 stage, int warp, int lane) {
    const int row = 16 * warp + lane / 4, below = row - 2 * (lane % 4);
    const u32 own = stage + AT_SUMS + row * 4;
    const float sum[2] = {load_shared_float(own), load_shared_float(own + 32)};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int column = i / 2 * 8, h = i % 2;
        const float2 other = load_shared_floats(stage + AT_SUMS + (column + 2 * (lane % 4)) * 4);
        const float left = exp2_fast(fminf(sum[h] - other.x, 0.f)), right = exp2_fast(fminf(sum[h] - other.y, 0.f));
        decays[2 * i] = below >= column - 8 * h ? left : 0.f;
        decays[2 * i + 1] = below >= column - 8 * h + 1 ? right : 0.f;
    }
}

__device__ __forceinline__ void store_square(u32 tile, const float (&x)[32], int warp, int lane) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 packed[4];
#pragma unroll
        for (int i = 0; i < 4; i++) packed[i] = pack_f16(x[8 * j + 2 * i], x[8 * j + 2 * i + 1]);
        store_tiles(piece_at(tile, 16 * warp + lane % 16, 2 * j + lane / 16), packed);
    }
}

// The products become L (with its diagonal, which nobody reads), stored in the place of T; the diagonal block of each
// warp also in float32, transposed.
__device__ __forceinline__ void finish_l(float (&products)[32], const float (&decays)[32], u32 stage, u32 block,
                                         int warp, int lane) {
    const u32 betas = stage + AT_BETA + (16 * warp + lane / 4) * 4;
    const float beta[2] = {load_shared_float(betas), load_shared_float(betas + 32)};
#pragma unroll
    for (int i = 0; i < 32; i++) products[i] *= decays[i] * beta[i / 2 % 2];
    store_square(stage + AT_T, products, warp, lane);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
        const float upper = warp == 0 ? products[i] : products[8 + i];
        const float lower = warp == 2 ? products[16 + i] : products[24 + i];
        const float own = warp < 2 ? upper : lower;
        store_shared_float(block + column * BLOCK_ROW + (lane / 4 + i / 2 % 2 * 8) * 4, own);
    }
}

// One group of producers does everything. Of two, the first has K, L and T, the other Q, A, the copies and the gates.
__device__ __forceinline__ void produce(const Call& call, const Sequence& seq, u32 shared, Barriers* barriers,
                                        int first_value) {
    const int thread = threadIdx.x % 128, warp = thread / 32;
    int lane = thread % 32;
    const int group = PRODUCERS == 1 ? 0 : threadIdx.x / 128 - CONSUMERS;
    const bool copies = group == PRODUCERS - 1, inverts = group == 0, sums = copies && warp == 3;
    const u32 block = shared + AT_BLOCKS + warp * BLOCK;
    if (copies && thread == 0) request(call, seq, 0, first_value, shared, &barriers->arrived[0]);
    if (sums) {
        barrier_wait(&barriers->arrived[0], 0);
        sum_gates(seq, 0, shared, lane);
    }
    for (int chunk = 0; chunk < seq.chunks; chunk++) {
        const u32 stage = shared + chunk % STAGES * STAGE, next = shared + (chunk + 1) % STAGES * STAGE;
        const bool more = chunk + 1 < seq.chunks;
        read_lane(lane);  // or the compiler keeps every address inside a tile in a register of its own
        const int following = chunk + 1;
        if (copies && thread == 0 && more) {
            if (following >= STAGES) barrier_wait(&barriers->empty[following % STAGES], (following / STAGES - 1) & 1);
            request(call, seq, following, first_value, next, &barriers->arrived[following % STAGES]);
        }
        barrier_wait(&barriers->arrived[chunk % STAGES], chunk / STAGES & 1);
        if (!more && seq.length % CHUNK > 0) {
            if (copies) clear_rows(stage, seq.length % CHUNK, thread);
            group_barrier<128 * PRODUCERS>(ALL);
        }
        if (inverts) normalise(stage + AT_K, warp, lane);
        if (copies) normalise(stage + AT_Q, warp, lane);
        fence_async_shared();
        group_barrier<128 * PRODUCERS>(ALL);
        float products[32], decays[32];
        if (copies) {
            start_products(products, stage + AT_Q, stage + AT_K);
            if (EARLY) find_decays(decays, stage, warp, lane);
            wgmma::wait<0>();
            wgmma::pin(products);
            if (!EARLY) find_decays(decays, stage, warp, lane);
#pragma unroll
            for (int i = 0; i < 32; i++) products[i] *= decays[i];
            store_square(stage + AT_A, products, warp, lane);
        }
        u32 t[4][4] = {};
        if (inverts) {
            start_products(products, stage + AT_K, stage + AT_K);
            if (EARLY) find_decays(decays, stage, warp, lane);
            wgmma::wait<0>();
            wgmma::pin(products);
            if (!EARLY) find_decays(decays, stage, warp, lane);
            finish_l(products, decays, stage, block, warp, lane);
            __syncwarp();
            substitute(stage + AT_T, block, warp, lane);
            group_barrier<128>(INVERTING);
            if (warp == 0) {
                invert<0>(t, stage, lane);
            } else if (warp == 1) {
                invert<1>(t, stage, lane);
            } else if (warp == 2) {
                invert<2>(t, stage, lane);
            } else {
                invert<3>(t, stage, lane);
            }
        }
        if (sums && more) {  // warp 3 has least to invert
            barrier_wait(&barriers->arrived[following % STAGES], following / STAGES & 1);
            sum_gates(seq, following, next, lane);
        }
        if (inverts) {
            group_barrier<128>(INVERTING);
#pragma unroll
            for (int a = 0; a < 4; a++) {
                if (a >= warp) store_tiles_transposed(block_at(stage + AT_T, a, warp, lane), t[a]);
            }
        }
        fence_async_shared();
        barrier_arrive(&barriers->full[chunk % STAGES]);
    }
}
