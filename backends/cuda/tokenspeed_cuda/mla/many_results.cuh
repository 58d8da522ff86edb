// Results of items. Whole items go out at once. Of other items each block writes its part as float32, normalised, with
// the log (base 2) of its sums, waits for the others', and adds up its share of all parts, in their order. So all
// blocks have to run at once, as those of a grid of one for each multiprocessor do. Parts lie as the fragments of
// threads: quad j of thread t, columns 8j + {0, 1} of its half and of its two rows, at 256j + t.
#pragma once
#include "device.cuh"
#include "many_memory.cuh"
#include "many_schedule.cuh"
#include "many_softmax.cuh"

constexpr int QUADS = ROWS * LATENT / 4;  // of a part
static_assert(sizeof(float4) * (QUADS + 1024) <= sizeof(Shared::keys), "");  // shares are not all of one size

struct Results {
    u16* attended;    // [batch, rows, LATENT]
    float* lse;       // [batch, rows]
    float4* parts;    // [slot, CLUSTER, QUADS]
    float* part_lse;  // [slot, CLUSTER, ROWS]
    u32* counters;    // [worker, CLUSTER, 2] of the first worker of an item: parts written, readers that have seen that
    float scale;
    int rows, rank;

    __device__ __forceinline__ void write_whole(const float (&sums)[128], const float (&total)[2],
                                                const float (&reference)[2], const Piece& piece, int side) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = (piece.group * CLUSTER + rank) * ROWS + row_of(threadIdx.x) + 8 * half;
            if (row >= rows) continue;
            const float factor = total[half] == 0.0f ? 0.0f : scale / total[half];
            const long long at = (long long)piece.sequence * rows + row;
            u32* to = reinterpret_cast<u32*>(attended + at * LATENT + side * (LATENT / 2)) + threadIdx.x % 4;
#pragma unroll
            for (int j = 0; j < 32; j++) {
                const float* quad = &sums[4 * j];
                to[4 * j] = pack_bf16(quad[2 * half] * factor, quad[2 * half + 1] * factor);
            }
            if (side == 0 && threadIdx.x % 4 == 0) lse[at] = LN2 * log_sum(total[half], reference[half]);
        }
    }

    __device__ __forceinline__ void write_part(const float (&sums)[128], const float (&total)[2],
                                               const float (&reference)[2], const Part& part, int side) const {
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            factor[half] = total[half] == 0.0f ? 0.0f : scale / total[half];
            if (side == 0 && threadIdx.x % 4 == 0)
                part_lse[line(part, part.order) * ROWS + row_of(threadIdx.x) + 8 * half] =
                    log_sum(total[half], reference[half]);
        }
        float4* to = parts + line(part, part.order) * QUADS + threadIdx.x;
#pragma unroll
        for (int j = 0; j < 32; j++) {
            const float* quad = &sums[4 * j];
            to[256 * j] = {quad[0] * factor[0], quad[1] * factor[0], quad[2] * factor[1], quad[3] * factor[1]};
        }
    }

    // By the threads of both warpgroups when they have written their part.
    __device__ __forceinline__ void announce(const Part& part) const {
        asm volatile("fence.proxy.async;" ::: "memory");  // the copy engine reads it
        named_sync(BOTH, 256);
        if (threadIdx.x == 0)
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter(part)) : "memory");
    }

    // Our share of all parts of an item. `parity` of the use of parts_full.
    __device__ __forceinline__ void combine(Shared& shared, const Part& part, u32 parity) const {
        const int first = QUADS * part.order / part.count, last = QUADS * (part.order + 1) / part.count;
        if (threadIdx.x == 0) wait_for_parts(part);
        named_sync(BOTH, 256);
        if (threadIdx.x < 32) fetch(shared, part, first, last - first);
        float* weights = reinterpret_cast<float*>(shared.queries);  // [part, ROWS]
        weigh_parts(weights, part);
        named_sync(BOTH, 256);
        barrier_wait(&shared.parts_full, parity);
        const float4* quads = reinterpret_cast<const float4*>(shared.keys);  // [part, last - first]
        for (int i = threadIdx.x; i < last - first; i += 256) {
            const int thread = (first + i) % 256, row = row_of(thread);
            float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
            for (int k = 0; k < part.count; k++) {
                const float above = weights[k * ROWS + row], below = weights[k * ROWS + row + 8];
                const float4 quad = quads[k * (last - first) + i];
                sum.x += above * quad.x, sum.y += above * quad.y, sum.z += below * quad.z, sum.w += below * quad.w;
            }
            const int out_row = (part.group * CLUSTER + rank) * ROWS + row;
            const int column = thread / 128 * (LATENT / 2) + (first + i) / 256 * 8 + thread % 4 * 2;
            u16* to = attended + ((long long)part.sequence * rows + out_row) * LATENT + column;
            if (out_row < rows) *reinterpret_cast<u32*>(to) = pack_bf16(sum.x, sum.y);
            if (out_row + 8 < rows) *reinterpret_cast<u32*>(to + 8 * LATENT) = pack_bf16(sum.z, sum.w);
        }
    }

  private:
    __device__ __forceinline__ u32* counter(const Part& part) const {
        return counters + (part.worker * CLUSTER + rank) * 2;
    }

    // Number of a part among all parts.
    __device__ __forceinline__ long long line(const Part& part, int k) const { return part.slot(k) * CLUSTER + rank; }

    // The last to see that all are there clears the counters for the next call.
    __device__ __forceinline__ void wait_for_parts(const Part& part) const {
        u32* written = counter(part);
        u32 count, seen;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(written) : "memory");
        } while (count < part.count);
        asm volatile("atom.inc.relaxed.gpu.global.u32 %0, [%1], %2;"
                     : "=r"(seen) : "l"(written + 1), "r"(part.count - 1) : "memory");
        if (seen == part.count - 1) *written = 0;
    }

    // By one warp: the same quads of all parts to where keys were.
    __device__ __forceinline__ void fetch(Shared& shared, const Part& part, int first, int count) const {
        const int lane = threadIdx.x % 32, bytes = count * sizeof(float4);
        if (lane == 0) barrier_expect(&shared.parts_full, part.count * bytes);
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncwarp();
        for (int k = lane; k < part.count; k += 32)
            copy_bulk(&shared.keys[0][0][k * bytes], parts + line(part, k) * QUADS + first, bytes, &shared.parts_full);
    }

    // What to multiply parts by, from the logs of their sums; four threads for each row. The first block of an item
    // writes what they make together.
    __device__ __forceinline__ void weigh_parts(float* weights, const Part& part) const {
        const int row = threadIdx.x / 4, column = threadIdx.x % 4;
        float top = NOTHING, total = 0.0f;
#pragma unroll 4
        for (int k = column; k < part.count; k += 4) {
            const float sum = __ldcg(part_lse + line(part, k) * ROWS + row);
            weights[k * ROWS + row] = sum;
            top = fmaxf(top, sum);
        }
        top = quad_max(top);
        for (int k = column; k < part.count; k += 4) {
            const float weight = exp2_of(weights[k * ROWS + row] - top);
            weights[k * ROWS + row] = weight;
            total += weight;
        }
        total = quad_sum(total);
        const float factor = total == 0.0f ? 0.0f : 1.0f / total;
        for (int k = column; k < part.count; k += 4) weights[k * ROWS + row] *= factor;
        const int out_row = (part.group * CLUSTER + rank) * ROWS + row;
        if (part.order == 0 && column == 0 && out_row < rows)
            lse[(long long)part.sequence * rows + out_row] = LN2 * log_sum(total, top);
    }

    static __device__ __forceinline__ int row_of(int thread) {
        return thread % 128 / 32 * 16 + thread % 32 / 4;
    }
    static __device__ __forceinline__ float log_sum(float total, float reference) {
        return total == 0.0f ? __uint_as_float(0xff800000u) : reference + log2_of(total);
    }
};
