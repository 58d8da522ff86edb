// 17 to 64 query rows: one warpgroup scores a tile of keys while two sum the values of the tile before, 256 latents
// each. Scores of a row lie in four threads, so that nothing but weights and decays passes through shared memory.
#pragma once
#include "few_combine.cuh"
#include "few_schedule.cuh"
#include "wgmma.cuh"

namespace wide {

__device__ __forceinline__ const u8* tile_of(Shared& shared, u32 count) {
    return CONVERTED ? shared.converted() : shared.fetched(count % STAGES);
}

// A tile of float8 as one of bfloat16, keys from `valid` on as zeros, by warps of two warpgroups. A warp takes a slice
// of eight keys at a time, so that both layouts are read and written without bank conflicts.
__device__ __forceinline__ void convert(Shared& shared, u32 count, int valid, int warp) {
    const u32 stage = count % STAGES;
    barrier_wait(&shared.full[stage], count / STAGES % 2);
    if (count > 0) barrier_wait(&shared.tile_empty, (count + 1) % 2);
    const u8* fetched = shared.fetched(stage);
    u8* tile = shared.converted();
    const int row = threadIdx.x % 8, part = threadIdx.x % 32 / 8;
#pragma unroll 3
    for (int i = warp; i < TILE / 8 * SLICES; i += CONVERTERS / 32) {
        uint4 v = *reinterpret_cast<const uint4*>(fetched + i * 512 + row * 64 + (part ^ row / 2) * 16);
        if (i / SLICES * 8 + row >= valid) v = make_uint4(0, 0, 0, 0);
        const u32 from[4] = {v.x, v.y, v.z, v.w};
        u32 to[8];
#pragma unroll
        for (int j = 0; j < 8; j++) to[j] = e4m3_to_bf16(u16(from[j / 2] >> j % 2 * 16));
        uint4* line = reinterpret_cast<uint4*>(tile + i * 1024 + row * 128);
        line[2 * part ^ row] = make_uint4(to[0], to[1], to[2], to[3]);
        line[(2 * part + 1) ^ row] = make_uint4(to[4], to[5], to[6], to[7]);
    }
    fence_async_shared();
    barrier_arrive(&shared.empty[stage][0]);
    barrier_of<4, CONVERTERS>();
}

// The part of it that the producer's warpgroup does.
__device__ __forceinline__ void help(Shared& shared, Share share, const int* lengths) {
    u32 count = 0;
    Run run;
    while (share.next(run, lengths)) {
        for (u32 at = run.at; at < run.end && run.length > 0; at++, count++) {
            convert(shared, count, run.length - at * TILE, threadIdx.x % 128 / 32);
        }
    }
}

struct Scorer {
    float top[2], sum[2];  // of rows `row` and `row + 8`
    int warp, lane, row;

    // A constant STAGE keeps the addresses of operands in uniform registers.
    template <int STAGE>
    __device__ void score(float (&s)[32], Shared& shared) {
        const wgmma::Descriptor q = wgmma::k_major(shared_address(shared.q), GROUP_BYTES);
        const wgmma::Descriptor k = wgmma::k_major(shared_address(tile_of(shared, STAGE)), GROUP_BYTES);
        wgmma::fence();
#pragma unroll
        for (int step = 0; step < 4 * SLICES; step++) {
            const int offset = (step / 4 * 1024 + step % 4 * 32) / 16;
            wgmma::mma(s, q + offset, k + offset, step > 0);
        }
        wgmma::commit();
        wgmma::wait<0>();
        wgmma::pin(s);
    }

    // Scores to weights in shared memory.
    __device__ void weigh(float (&s)[32], Shared& shared, u32 count, float unit, int key, int hidden_from) {
        const bool masked = key + TILE > hidden_from;
        float now[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int r = i / 2 % 2;
            s[i] *= unit;
            if (masked && key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= hidden_from + (row + 8 * r) / HEADS) {
                s[i] = minus_infinity();
            }
            now[r] = fmaxf(now[r], s[i]);
        }
        float decay[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 1));
            now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 2));
            decay[r] = 1;
            if (now[r] > top[r] + SLACK) {
                decay[r] = power_of_two(top[r] - now[r]);
                top[r] = now[r];
            }
            sum[r] *= decay[r];
        }
        const float bases[2] = {top[0] == minus_infinity() ? 0 : top[0], top[1] == minus_infinity() ? 0 : top[1]};
#pragma unroll
        for (int i = 0; i < 32; i++) {
            s[i] = power_of_two(s[i] - bases[i / 2 % 2]);
            sum[i / 2 % 2] += s[i];
        }
        if (count > 0) barrier_wait(&shared.p_empty, (count + 1) % 2);
        if (lane % 4 == 0) shared.decay[row] = decay[0], shared.decay[row + 8] = decay[1];
        const int to_row = 16 * warp + lane % 16;
#pragma unroll
        for (int i = 0; i < 32; i += 8) {
            const u32 to = shared_address(shared.p) + to_row * 128 + ((i / 4 + lane / 16) ^ to_row % 8) * 16;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                         ::"r"(to), "r"(pack_bf16(s[i], s[i + 1])), "r"(pack_bf16(s[i + 2], s[i + 3])),
                         "r"(pack_bf16(s[i + 4], s[i + 5])), "r"(pack_bf16(s[i + 6], s[i + 7])) : "memory");
        }
        fence_async_shared();
        barrier_arrive(&shared.p_full);
    }
};

__device__ __forceinline__ void score(Shared& shared, Share share, const int* lengths, const Results& results) {
    Scorer self;
    self.warp = threadIdx.x / 32;
    self.lane = threadIdx.x % 32;
    self.row = 16 * self.warp + self.lane / 4;
    const float unit = shared.unit;
    u32 count = 0, queries = 0;
    Run run;
    for (int turn = 0; share.next(run, lengths); turn ^= 1) {
        self.top[0] = self.top[1] = minus_infinity();
        self.sum[0] = self.sum[1] = 0;
        if (run.length > 0) barrier_wait(&shared.q_full, queries++ % 2);
        for (u32 at = run.at; at < run.end && run.length > 0; at++, count++) {
            const int key = at * TILE;
            if constexpr (CONVERTED) {
                convert(shared, count, run.length - key, HELPERS + self.warp);
            } else {
                barrier_wait(&shared.full[count % STAGES], count / STAGES % 2);
                if (key + TILE > run.length && run.length % 8) {
                    clear_past<128>(shared.fetched(count % STAGES), run.length - key, threadIdx.x);
                    barrier_of<1, 128>();
                }
            }
            float s[32];
            if (CONVERTED || count % STAGES == 0) self.score<0>(s, shared);
            else self.score<1>(s, shared);
            self.weigh(s, shared, count, unit, key, run.length - Q_LEN + 1);
        }
        if (self.lane == 0 && run.length > 0) barrier_arrive(&shared.q_empty);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            self.sum[r] += __shfl_xor_sync(~0u, self.sum[r], 1);
            self.sum[r] += __shfl_xor_sync(~0u, self.sum[r], 2);
            const int row = self.row + 8 * r;
            if (self.lane % 4 == 0) {
                shared.sum[turn][row] = self.sum[r];
                shared.reference[turn][row] = self.top[r];
                if (run.whole()) results.write_lse(run.sequence, row, self.top[r], self.sum[r]);
            }
        }
        barrier_of<2, 384>();  // the adders have the sums
    }
}

struct Adder {
    float o[2][64];  // of 128 latents each: an instruction may not take more registers than threads have at the start
    int half, warp, lane;

    template <int STAGE>
    __device__ void add(Shared& shared) {
        // A K step is 16 keys; slices of 64 latents lie 1024 bytes apart.
        const u32 tile = shared_address(tile_of(shared, STAGE));
        const wgmma::Descriptor v = wgmma::mn_major(tile + half * 4096, 1024, GROUP_BYTES);
        const wgmma::Descriptor p = wgmma::k_major(shared_address(shared.p));
        wgmma::pin(o[0]);
        wgmma::pin(o[1]);
        wgmma::fence();
#pragma unroll
        for (int step = 0; step < TILE / 16; step++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                wgmma::mma<wgmma::K_MAJOR, wgmma::MN_MAJOR>(
                    o[i], p + step * 2, v + (step * 2 * GROUP_BYTES + i * 2048) / 16);
            }
            wgmma::commit();
        }
        if constexpr (!FP8) {
            wgmma::wait<3>();
            if (lane == 0) barrier_arrive(&shared.empty[STAGE][0]);
            wgmma::wait<2>();
            if (lane == 0) barrier_arrive(&shared.empty[STAGE][1]);
            wgmma::wait<1>();
            if (lane == 0) barrier_arrive(&shared.empty[STAGE][2]);
        }
        wgmma::wait<0>();
        if (lane == 0) {
            barrier_arrive(FP8 ? &shared.tile_empty : &shared.empty[STAGE][PARTS - 1]);
            barrier_arrive(&shared.p_empty);
        }
        wgmma::pin(o[0]);
        wgmma::pin(o[1]);
    }
};

__device__ __forceinline__ void add(
    Shared& shared, Share share, const int* lengths, const Results& results, Open& open
) {
    Adder self;
    const int adder = threadIdx.x - 128;
    self.half = __shfl_sync(~0u, adder / 128, 0);
    self.warp = adder / 32 % 4;
    self.lane = adder % 32;
    const int row = 16 * self.warp + self.lane / 4;
    u32 count = 0;
    Run run;
    for (int turn = 0; share.next(run, lengths); turn ^= 1) {
#pragma unroll
        for (int i = 0; i < 64; i++) self.o[0][i] = self.o[1][i] = 0;
        for (u32 at = run.at; at < run.end && run.length > 0; at++, count++) {
            barrier_wait(&shared.p_full, count % 2);
            const float a = shared.decay[row], b = shared.decay[row + 8];
            if (__any_sync(~0u, a != 1 || b != 1)) {
#pragma unroll
                for (int i = 0; i < 64; i++) {
                    self.o[0][i] *= i / 2 % 2 ? b : a;
                    self.o[1][i] *= i / 2 % 2 ? b : a;
                }
            }
            if (CONVERTED || count % STAGES == 0) self.add<0>(shared);
            else self.add<1>(shared);
        }
        barrier_of<2, 384>();
        const auto group = [&](int i) { return &self.o[i / 16][i % 16 * 4]; };
        const float sums[2] = {shared.sum[turn][row], shared.sum[turn][row + 8]};
        const bool whole = run.whole();
        if (whole) {
            const float a = results.factor(sums[0]), b = results.factor(sums[1]);
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const float* o = group(i);
                results.write(run.sequence, place_of(i, adder), make_float4(o[0] * a, o[1] * a, o[2] * b, o[3] * b));
            }
        } else {
            const u32 slot = 2 * blockIdx.x + run.starts();
            int exponents[2] = {};
            keep_sums(results.parts + u64(slot) * (GROUPS / 2), exponents, adder, group);
            if (self.lane % 4 == 0) {
                const float references[2] = {shared.reference[turn][row], shared.reference[turn][row + 8]};
                keep_state(results.states + (slot * PIECES + self.half) * (N / 2), row, references, sums, exponents);
            }
            barrier_of<3, ADDERS>();
            if (adder == 0) arrive(results.arrived + run.sequence);
            open.add(run.starts(), run.sequence, run.before);
        }
    }
}

}  // namespace wide
