// Words of the delta rule's prefill that the shared files lack: float16 products of a warpgroup and tiles of 8 x 8
// numbers between shared memory and fragments.
#pragma once

#include "device.cuh"
#include "wgmma.cuh"

// ---- shared memory by 32-bit address

__device__ __forceinline__ u32 dynamic_shared() {
    extern __shared__ u8 memory[];
    return (shared_address(memory) + 1023) & ~1023u;
}

template <class T>
__device__ __forceinline__ T* shared_pointer(u32 address) {
    return static_cast<T*>(__cvta_shared_to_generic(address));
}

__device__ __forceinline__ uint4 load_shared4(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ float2 load_shared_floats(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ float load_shared_float(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared4(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared2(u32 address, u32 a, u32 b) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void store_shared_float(u32 address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void store_shared16(u32 address, u16 v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}

__device__ __forceinline__ void prefetch_box(const TensorMap* map, int x, int y, int z) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];"
                 ::"l"(map), "r"(x), "r"(y), "r"(z) : "memory");
}

template <int THREADS>
__device__ __forceinline__ void group_barrier(u32 id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

__device__ __forceinline__ void read_lane(int& lane) { asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane)); }

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- numbers

__device__ __forceinline__ u32 pack_f16(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float2 unpack_f16(u32 pair) {
    float2 v;
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(v.x), "=f"(v.y) : "r"(pair));
    return v;
}
__device__ __forceinline__ u32 multiply_bf16(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
    u32 larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
__device__ __forceinline__ u32 largest_of_warp(u32 v) {
    u32 largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(v));
    return largest;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float inverse_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float from_bits(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 to_bits(float x) { return __float_as_uint(x); }

// ---- four tiles of 8 x 8 16-bit numbers; lane l gives the address of row l % 8 of tile l / 8

__device__ __forceinline__ void load_tiles(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_tiles_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_tiles(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ void store_tiles_transposed(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// ---- float16 products of a warpgroup, in the forms of wgmma.cuh

namespace wgmma {

// D [64, 64] (+)= A B, both in shared memory, K-major.
__device__ __forceinline__ void mma_f16(float (&d)[32], Descriptor a, Descriptor b, bool accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WGMMA_R32
                 "}, %32, %33, p, 1, 1, 0, 0;}"
                 : WGMMA_D32(0) : "l"(a), "l"(b), "r"(int(accumulate)) : "memory");
}

// D [64, 64] (+)= A B, A in registers, B K-major.
__device__ __forceinline__ void mma_f16(float (&d)[32], const u32 (&a)[4], Descriptor b, bool accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WGMMA_R32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
                 : WGMMA_D32(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)) : "memory");
}

// D [64, 128] += A B, A in registers, B MN-major.
__device__ __forceinline__ void mma_f16_rows(float (&d)[64], const u32 (&a)[4], Descriptor b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" WGMMA_R64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : WGMMA_D64(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}

}  // namespace wgmma
