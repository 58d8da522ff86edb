// Rows of x with their columns in the order of the operands. A token without an expert here is not read.
#include "order.cuh"

extern "C" __global__ void __launch_bounds__(IN / 8) reorder(
    const u16* x,  // [tokens, IN], rows x_stride apart
    const int* ids,  // [tokens, TOP_K]
    u16* reordered,  // [tokens, IN]
    int x_stride, int first_expert) {
    __shared__ u16 row[IN];
    const size_t token = blockIdx.x;
    const int id = threadIdx.x < TOP_K ? ids[token * TOP_K + threadIdx.x] - first_expert : -1;
    if (!__syncthreads_or(0 <= id && id < EXPERTS)) return;
    reinterpret_cast<uint4*>(row)[threadIdx.x] = reinterpret_cast<const uint4*>(x + token * x_stride)[threadIdx.x];
    __syncthreads();
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int position = threadIdx.x * 8 + 2 * i;
        pairs[i] = row[source_of<FORMAT>(position)] | row[source_of<FORMAT>(position + 1)] << 16;
    }
    reinterpret_cast<uint4*>(reordered + token * IN)[threadIdx.x] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
