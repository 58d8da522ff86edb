// Gated residual of many tokens, between the projections: low = silu(scale · W_down n / STREAMS), eight ranks a thread.
#include "device.cuh"

namespace {

constexpr int STREAMS = 4;
constexpr int VECTORS = RANK / 8;  // of a token

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

}  // namespace

// `products` and `low`: [tokens, RANK]; `scale`: [RANK] or none.
extern "C" __global__ void activate(const u16* products, const float* scale, u16* low, int tokens) {
    launch_successor();
    wait_for_predecessor();
    const u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= u64(tokens) * VECTORS) return;
    const uint4 v = load_once(products + 8 * at);
    const int rank = at % VECTORS * 8;
    const auto activated = [&](u32 pair, int i) {
        float a = low_to_float(pair) / STREAMS, b = high_to_float(pair) / STREAMS;
        if (scale) a *= scale[rank + i], b *= scale[rank + i + 1];
        return pack_bf16(silu(a), silu(b));
    };
    *reinterpret_cast<uint4*>(low + 8 * at) =
        make_uint4(activated(v.x, 0), activated(v.y, 2), activated(v.z, 4), activated(v.w, 6));
}
