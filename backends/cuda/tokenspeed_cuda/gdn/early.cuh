// Loads of the recurrent kernels, and work before the wait for the kernel ahead, which may still write what they read.
//
// Into the L2 cache anything may be fetched early: it is the one place that all writes go through. An index may be read
// early as a guess of what to fetch, if it is read again after the wait and what was guessed wrong is then done anew.
#pragma once
#include "device.cuh"

// Past the L1 cache, so that a second read sees what was written since the first.
__device__ __forceinline__ int load_fresh(const int* p) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// `bytes` and the address are multiples of 16.
__device__ __forceinline__ void prefetch_bulk(const void* p, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
}

// Policies of L2: what is soon stored to where it came from had better stay until then, which is worth 3 to 20%.
__device__ __forceinline__ u64 keeping() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ u64 as_usual() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ float4 load_state(const float* p, u64 policy) {
    float4 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p), "l"(policy) : "memory");
    return v;
}
