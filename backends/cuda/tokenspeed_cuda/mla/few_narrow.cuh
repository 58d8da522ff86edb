// At most 16 query rows: eight warps. A warp scores eight keys of a tile and sums 64 latents over all of them.
#pragma once
#include "few_combine.cuh"
#include "few_schedule.cuh"

namespace narrow {

__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// Float8 is multiplied as float16, to which devices convert it at once. Queries then stand for themselves over a power
// of two, so that they fit.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (FP8) mma_f16(c, a, b0, b1);
    else mma_bf16(c, a, b0, b1);
}
__device__ __forceinline__ u32 pack(float low, float high) { return FP8 ? pack_f16(low, high) : pack_bf16(low, high); }

// Rows of queries to float16, two by each warp; the power of two of row r goes to shared.sums[r][0].
__device__ __forceinline__ void scale_queries(Shared& shared, int warp, int lane) {
    for (int row = warp; row < N; row += ADDERS / 32) {
        u8* slices = shared.q + row / 8 * GROUP_BYTES + row % 8 * 128;
        uint4 v[3];
        float most = 0;
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int piece = lane + 32 * i;
            v[i] = make_uint4(0, 0, 0, 0);
            if (piece < 8 * SLICES) v[i] = *reinterpret_cast<const uint4*>(slices + piece / 8 * 1024 + piece % 8 * 16);
            const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                most = fmaxf(most, fmaxf(fabsf(low_to_float(words[j])), fabsf(high_to_float(words[j]))));
            }
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const int exponent = max(__float_as_int(most) >> 23, 14);
        const float factor = __int_as_float((267 - exponent) << 23);  // 2^13 over that of the greatest
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int piece = lane + 32 * i;
            const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
            u32 to[4];
#pragma unroll
            for (int j = 0; j < 4; j++) to[j] = pack(low_to_float(words[j]) * factor, high_to_float(words[j]) * factor);
            if (piece < 8 * SLICES) {
                *reinterpret_cast<uint4*>(slices + piece / 8 * 1024 + piece % 8 * 16) =
                    make_uint4(to[0], to[1], to[2], to[3]);
            }
        }
        if (lane == 0) shared.sums[row][0] = __int_as_float((exponent - 13) << 23);
    }
}

struct Adder {
    u32 q[4 * SLICES][4];  // all queries, as the first operand
    float o[8][4];         // of the warp's 64 latents
    float reference[2], sum[2], unit[2];
    int warp, lane;

    // Pieces of 16 bytes lie at `piece ^ row % 8` of their row, and in float8 at `piece ^ row / 2 % 4`.
    __device__ void read_queries(const Shared& shared) {
        const u32 base = shared_address(shared.q);
        if constexpr (FP8) {
            // A step takes 16 neighbouring numbers, of which a thread has four as they come from the cache.
            const int t = lane % 4;
#pragma unroll
            for (int i = 0; i < 4 * SLICES; i++) {
                const int piece = i % 4 * 2 + t / 2;
                const u32 at = base + i / 4 * 1024 + lane / 4 * 128 + (piece ^ lane / 4) * 16 + t % 2 * 8;
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(q[i][0]), "=r"(q[i][2]) : "r"(at) : "memory");
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                             : "=r"(q[i][1]), "=r"(q[i][3]) : "r"(at + GROUP_BYTES) : "memory");
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4 * SLICES; i++) {
                const int row = lane % 16, piece = i % 4 * 2 + lane / 16;
                const u32 line = base + row / 8 * GROUP_BYTES + i / 4 * 1024 + row % 8 * 128;
                load_matrices(q[i], line + (piece ^ row % 8) * 16);
            }
        }
    }

    // Scores of the warp's eight keys.
    __device__ void score(float (&s)[4], u32 tile) const {
        float parts[2][4] = {};
        const u32 group = tile + warp * FETCHED_BYTES;
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
            u32 k[4];
            const int row = lane % 8, piece = lane / 8;
            if constexpr (FP8) {
                load_matrices(k, group + slice * 512 + row * 64 + (piece ^ row / 2) * 16);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    multiply(parts[i % 2], q[slice * 4 + i], e4m3_to_f16(u16(k[i])), e4m3_to_f16(u16(k[i] >> 16)));
                }
            } else {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    load_matrices(k, group + slice * 1024 + row * 128 + ((half * 4 + piece) ^ row) * 16);
                    multiply(parts[0], q[slice * 4 + half * 2], k[0], k[1]);
                    multiply(parts[1], q[slice * 4 + half * 2 + 1], k[2], k[3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) s[i] = parts[0][i] + parts[1][i];
    }

    __device__ void add_values(u32 tile, u32 p) {
#pragma unroll
        for (int step = 0; step < TILE / 16; step++) {
            u32 weights[4], v[4];
            {
                const int row = lane % 16, piece = step * 2 + lane / 16;
                load_matrices(weights, p + row * 128 + (piece ^ row % 8) * 16);
            }
            const int row = lane % 8;
            const u32 group = tile + (step * 2 + lane / 8 % 2) * FETCHED_BYTES;
            if constexpr (FP8) {
#pragma unroll
                for (int pair = 0; pair < 2; pair++) {
                    const int piece = pair * 2 + lane / 16;
                    load_transposed(v, group + warp * 512 + row * 64 + (piece ^ row / 2) * 16);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        // Two latents of two keys each: bytes of one latent side by side.
                        const u32 low = __byte_perm(v[2 * i], 0, 0x3120), high = __byte_perm(v[2 * i + 1], 0, 0x3120);
                        float (&even)[4] = o[pair * 4 + i * 2], (&odd)[4] = o[pair * 4 + i * 2 + 1];
                        multiply(even, weights, e4m3_to_f16(u16(low)), e4m3_to_f16(u16(high)));
                        multiply(odd, weights, e4m3_to_f16(u16(low >> 16)), e4m3_to_f16(u16(high >> 16)));
                    }
                }
            } else {
#pragma unroll
                for (int pair = 0; pair < 4; pair++) {
                    const int piece = pair * 2 + lane / 16;
                    load_transposed(v, group + warp * 1024 + row * 128 + (piece ^ row) * 16);
                    multiply(o[pair * 2], weights, v[0], v[1]);
                    multiply(o[pair * 2 + 1], weights, v[2], v[3]);
                }
            }
        }
    }

    // `hidden_from`: the first key that query 0 does not see; `key`: the tile's first.
    __device__ void attend(Shared& shared, const u8* keys, int key, int hidden_from) {
        const u32 tile = shared_address(keys);
        float s[4];
        score(s, tile);
        const int row = lane / 4, own_key = key + 8 * warp + lane % 4 * 2;
        const bool masked = key + TILE > hidden_from;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[i] *= unit[i / 2];
            if (masked && own_key + i % 2 >= hidden_from + (row + i / 2 * 8) / HEADS) s[i] = minus_infinity();
        }
        float top[2] = {fmaxf(s[0], s[1]), fmaxf(s[2], s[3])};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
            if (lane % 4 == 0) shared.tops[row + 8 * r][warp] = top[r];
        }
        barrier_of<1, ADDERS>();
        float decay[2];
        bool moved = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float4 a = *reinterpret_cast<const float4*>(&shared.tops[row + 8 * r][0]);
            const float4 b = *reinterpret_cast<const float4*>(&shared.tops[row + 8 * r][4]);
            const float now =
                fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
            decay[r] = 1;
            if (now > reference[r] + SLACK) {
                decay[r] = power_of_two(reference[r] - now);
                reference[r] = now;
                moved = true;
            }
            const float base = reference[r] == minus_infinity() ? 0 : reference[r];
            s[2 * r] = power_of_two(s[2 * r] - base);
            s[2 * r + 1] = power_of_two(s[2 * r + 1] - base);
            sum[r] = sum[r] * decay[r] + (s[2 * r] + s[2 * r + 1]);
            u8* to = shared.p + (row + 8 * r) * 128 + (warp ^ row) * 16 + lane % 4 * 4;
            *reinterpret_cast<u32*>(to) = pack(s[2 * r], s[2 * r + 1]);
        }
        if (__any_sync(~0u, moved)) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                o[i][0] *= decay[0], o[i][1] *= decay[0], o[i][2] *= decay[1], o[i][3] *= decay[1];
            }
        }
        barrier_of<1, ADDERS>();
        add_values(tile, shared_address(shared.p));
    }

    // The sums of the exponentials over all threads.
    __device__ void gather(Shared& shared) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            if (lane % 4 == 0) shared.sums[lane / 4 + 8 * r][warp] = sum[r];
        }
        barrier_of<1, ADDERS>();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float* all = shared.sums[lane / 4 + 8 * r];
            sum[r] = ((all[0] + all[1]) + (all[2] + all[3])) + ((all[4] + all[5]) + (all[6] + all[7]));
        }
    }
};

__device__ __forceinline__ void consume(
    Shared& shared, Share share, const int* lengths, const Results& results, Open& open
) {
    Adder self;
    self.warp = threadIdx.x / 32;
    self.lane = threadIdx.x % 32;
    u32 count = 0, turn = 0;
    Run run;
    while (share.next(run, lengths)) {
#pragma unroll
        for (int i = 0; i < 8; i++) self.o[i][0] = self.o[i][1] = self.o[i][2] = self.o[i][3] = 0;
        self.reference[0] = self.reference[1] = minus_infinity();
        self.sum[0] = self.sum[1] = 0;
        self.unit[0] = self.unit[1] = shared.unit;
        if (run.length > 0) {
            barrier_wait(&shared.q_full, turn++ % 2);
            if constexpr (FP8) {
                scale_queries(shared, self.warp, self.lane);
                fence_async_shared();
                barrier_of<1, ADDERS>();
                self.unit[0] *= shared.sums[self.lane / 4][0];
                self.unit[1] *= shared.sums[self.lane / 4 + 8][0];
            }
            self.read_queries(shared);
            __syncwarp();
            if (self.lane == 0) barrier_arrive(&shared.q_empty);
        }
        for (u32 at = run.at; at < run.end && run.length > 0; at++, count++) {
            const int key = at * TILE, stage = count % STAGES;
            u8* keys = shared.fetched(stage);
            barrier_wait(&shared.full[stage], count / STAGES % 2);
            if (key + TILE > run.length && run.length % 8) {
                clear_past<ADDERS>(keys, run.length - key, threadIdx.x);
                barrier_of<1, ADDERS>();
            }
            self.attend(shared, keys, key, run.length - Q_LEN + 1);
            __syncwarp();
            if (self.lane == 0) barrier_arrive(&shared.empty[stage][0]);
        }
        const bool whole = run.whole();
        const u32 slot = 2 * blockIdx.x + run.starts();
        int exponents[2] = {};
        if (!whole) {
            keep_sums(results.parts + u64(slot) * (GROUPS / 2), exponents, threadIdx.x,
                      [&](int i) { return self.o[i]; });
        }
        self.gather(shared);
        if (whole) {
            const float a = results.factor(self.sum[0]), b = results.factor(self.sum[1]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float* o = self.o[i];
                const Place at = place_of(i, threadIdx.x);
                results.write(run.sequence, at, make_float4(o[0] * a, o[1] * a, o[2] * b, o[3] * b));
            }
        }
        if (self.lane % 4 == 0) {
            const int row = self.lane / 4;
            if (!whole) {
                float4* states = results.states + (slot * PIECES + self.warp) * (N / 2);
                keep_state(states, row, self.reference, self.sum, exponents);
            } else if (self.warp == 0) {
                results.write_lse(run.sequence, row, self.reference[0], self.sum[0]);
                results.write_lse(run.sequence, row + 8, self.reference[1], self.sum[1]);
            }
        }
        barrier_of<1, ADDERS>();
        if (!whole) {
            if (threadIdx.x == 0) arrive(results.arrived + run.sequence);
            open.add(run.starts(), run.sequence, run.before);
        }
    }
}

}  // namespace narrow
