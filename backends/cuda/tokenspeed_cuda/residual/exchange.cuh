// How the blocks of the few-token kernel talk to each other: a word in global memory that is not zero has arrived.
#pragma once
#include "device.cuh"

__device__ __forceinline__ uint4 peek(const u32* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ bool arrived(const uint4& v) { return v.x && v.y && v.z && v.w; }

// A zero, of a float32 or of two bfloat16, goes as one with a minus.
__device__ __forceinline__ void publish(u32* p, u32 word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(word ? word : 0x80000000u) : "memory");
}

// Peeks at the vectors that `at` points to until all have arrived.
template <int N, class At>
__device__ __forceinline__ void receive(uint4 (&v)[N], At at) {
    constexpr u32 LIMIT = 1u << 22;  // seconds: a trap is better than a device that hangs
    bool complete;
    u32 tries = 0;
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = peek(at(i));
    do {
        complete = true;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!arrived(v[i])) {
                v[i] = peek(at(i));
                complete = false;
            }
        if (++tries == LIMIT) asm volatile("trap;");
    } while (!complete);
}

// Of the warps that compute, without the one that fetches.
template <int THREADS>
__device__ __forceinline__ void compute_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

__device__ __forceinline__ float inverse_root(float v) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ float tanh_about(float v) {
    float result;
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}
