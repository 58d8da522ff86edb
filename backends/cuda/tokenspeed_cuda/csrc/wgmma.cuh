// Warpgroup matrix products of Hopper (wgmma): D[64, N] += A[64, K] · B[K, N], float32 sums in the registers of the
// 128 threads of a warpgroup. K is 16 for bfloat16, 32 for float8_e4m3fn. B lies in shared memory, A in shared memory
// or in registers. N follows from the length of D: N / 2 numbers a thread; 8, 16, 32, 64, 96, 128, 192 and 256 exist.
//
// Fragments. With row = 16 · warp + lane / 4 and pair = 2 · (lane % 4), a thread has of D, for each 8 columns j,
//     d[4j], d[4j + 1] = D[row][8j + pair + {0, 1}]    d[4j + 2], d[4j + 3] = D[row + 8][8j + pair + {0, 1}]
// and of A in registers, 2 bfloat16 (or 4 float8 from column 2 · pair on) a word, the lower column in the lower bits,
//     a[0] = A[row][pair], a[1] = A[row + 8][pair], a[2] = A[row][pair + 8], a[3] = A[row + 8][pair + 8]
//     (float8: columns 2 · pair and 2 · pair + 16), so that d[4j ..] of two neighbouring j, rounded, are one A.
//
// Order: fence(); any number of mma; commit(); ...; wait<groups that may still run>(). Between the first mma and the
// wait nothing else may touch D or A in registers, nor the shared operands be written. Shared memory that threads wrote
// needs fence.proxy.async and a barrier before the fence(); what the copy engine wrote needs only its mbarrier.
#pragma once

namespace wgmma {

using Descriptor = unsigned long long;

// Operand in shared memory in the 128-byte swizzle, as the copy engine writes boxes of 128 bytes inside: rows of 128
// bytes, eight rows make a group of 1024 bytes aligned to 1024, the 16-byte piece c of row r lies at c ^ (r % 8).
// `address`: shared address of the operand's first number.
// K-major (rows are M or N, K runs inside a row; the only form of float8): one instruction takes 32 bytes of each row;
// the next K is 32 bytes on. `groups` is the distance between groups of eight rows.
__device__ __forceinline__ Descriptor k_major(unsigned address, unsigned groups = 1024) {
    return Descriptor(address >> 4 & 0x3fff) | Descriptor(1) << 16 | Descriptor(groups >> 4) << 32 |
           Descriptor(1) << 62;
}

// MN-major (rows are K; 64 numbers of M or N inside a row, the next 64 `slices` bytes on): one instruction takes 16
// rows; the next K is two groups on.
__device__ __forceinline__ Descriptor mn_major(unsigned address, unsigned slices, unsigned groups = 1024) {
    return Descriptor(address >> 4 & 0x3fff) | Descriptor(slices >> 4) << 16 | Descriptor(groups >> 4) << 32 |
           Descriptor(1) << 62;
}

// The same operand some bytes on. To step through shared memory from one descriptor takes fewer registers than many.
__device__ __forceinline__ Descriptor advance(Descriptor operand, unsigned bytes) { return operand + (bytes >> 4); }

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int GROUPS>
__device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// Keeps the compiler from moving uses of registers across a fence() or wait(): it does not know that an mma still runs.
template <int R>
__device__ __forceinline__ void pin(float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R; i++) asm volatile("" : "+f"(d[i])::"memory");
}

enum Major { K_MAJOR = 0, MN_MAJOR = 1 };

// The instruction spells out each register of D, so its text comes from macros: here the registers by name, ...
#define WGMMA_TEN(t) \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define WGMMA_R4 "%0, %1, %2, %3"
#define WGMMA_R8 WGMMA_R4 ", %4, %5, %6, %7"
#define WGMMA_R16 WGMMA_TEN() ", %10, %11, %12, %13, %14, %15"
#define WGMMA_R32 WGMMA_TEN() ", " WGMMA_TEN(1) ", " WGMMA_TEN(2) ", %30, %31"
#define WGMMA_R40 WGMMA_TEN() ", " WGMMA_TEN(1) ", " WGMMA_TEN(2) ", " WGMMA_TEN(3)
#define WGMMA_R48 WGMMA_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_R60 WGMMA_R40 ", " WGMMA_TEN(4) ", " WGMMA_TEN(5)
#define WGMMA_R64 WGMMA_R60 ", %60, %61, %62, %63"
#define WGMMA_R90 WGMMA_R60 ", " WGMMA_TEN(6) ", " WGMMA_TEN(7) ", " WGMMA_TEN(8)
#define WGMMA_R96 WGMMA_R90 ", %90, %91, %92, %93, %94, %95"
#define WGMMA_R120 WGMMA_R90 ", " WGMMA_TEN(9) ", " WGMMA_TEN(10) ", " WGMMA_TEN(11)
#define WGMMA_R128 WGMMA_R120 ", %120, %121, %122, %123, %124, %125, %126, %127"

// ... here their values.
#define WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8(i) WGMMA_D4(i), WGMMA_D4(i + 4)
#define WGMMA_D16(i) WGMMA_D8(i), WGMMA_D8(i + 8)
#define WGMMA_D32(i) WGMMA_D16(i), WGMMA_D16(i + 16)
#define WGMMA_D48(i) WGMMA_D32(i), WGMMA_D16(i + 32)
#define WGMMA_D64(i) WGMMA_D32(i), WGMMA_D32(i + 32)
#define WGMMA_D96(i) WGMMA_D64(i), WGMMA_D32(i + 64)
#define WGMMA_D128(i) WGMMA_D64(i), WGMMA_D64(i + 64)

// mma<A, B>(d, a, b, accumulate): bfloat16. mma_e4m3(d, a, b, accumulate): float8_e4m3fn, K-major. False for
// `accumulate` means D = A · B. P0 to P6 are the names of the operands after D.
#define WGMMA_FORMS(N, R, P0, P1, P2, P3, P4, P5, P6)                                                                \
    template <Major A = K_MAJOR, Major B = K_MAJOR>                                                                  \
    __device__ __forceinline__ void mma(float (&d)[R], Descriptor a, Descriptor b, bool accumulate = true) {         \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                 \
                     "k16.f32.bf16.bf16 {" WGMMA_R##R "}, " P0 ", " P1 ", p, 1, 1, " P3 ", " P4 ";}"                 \
                     : WGMMA_D##R(0) : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(A)), "n"(int(B)) : "memory");   \
    }                                                                                                                \
    template <Major B = K_MAJOR>                                                                                     \
    __device__ __forceinline__ void mma(float (&d)[R], const unsigned (&a)[4], Descriptor b, bool accumulate = true) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                 \
                     "k16.f32.bf16.bf16 {" WGMMA_R##R "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1, " P6 ";}" \
                     : WGMMA_D##R(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)),     \
                       "n"(int(B)) : "memory");                                                                      \
    }                                                                                                                \
    __device__ __forceinline__ void mma_e4m3(float (&d)[R], Descriptor a, Descriptor b, bool accumulate = true) {    \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                 \
                     "k32.f32.e4m3.e4m3 {" WGMMA_R##R "}, " P0 ", " P1 ", p, 1, 1;}"                                 \
                     : WGMMA_D##R(0) : "l"(a), "l"(b), "r"(int(accumulate)) : "memory");                             \
    }                                                                                                                \
    __device__ __forceinline__ void mma_e4m3(float (&d)[R], const unsigned (&a)[4], Descriptor b,                    \
                                             bool accumulate = true) {                                               \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                 \
                     "k32.f32.e4m3.e4m3 {" WGMMA_R##R "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1;}"       \
                     : WGMMA_D##R(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate))      \
                     : "memory");                                                                                    \
    }

WGMMA_FORMS(8, 4, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
WGMMA_FORMS(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
WGMMA_FORMS(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
WGMMA_FORMS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA_FORMS(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
WGMMA_FORMS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA_FORMS(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
WGMMA_FORMS(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

}  // namespace wgmma
