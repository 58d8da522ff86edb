"""Gated delta rule, chunked prefill: what a chunk does to any state. See `gdn_chunked` for the names."""

from typing import Any

import triton
import triton.language as tl

from tokenspeed_kernels.triton.tuning import Dims, Tunable
from tokenspeed_registry.platform import Platform


@triton.jit
def halves(x, dtype: tl.constexpr):
    """x as the sum of two numbers of `dtype`."""
    if dtype == tl.bfloat16:  # cut off, not rounded: cheaper, and the rest keeps what was cut
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    else:
        high = x.to(dtype).to(tl.float32)
    return high.to(dtype), (x - high).to(dtype)


@triton.jit
def _inverse_lengths(products):
    """Of vectors whose products with one another these are."""
    o_i = tl.arange(0, products.shape[0])
    return 1.0 / tl.sqrt(tl.sum(tl.where(o_i[:, None] == o_i[None, :], products, 0.0), 1) + 1e-6)


@triton.jit
def _store_parts(p, x, PARTS: tl.constexpr, C: tl.constexpr):  # x [C, C] to [C, PARTS C]
    high, low = halves(x, p.dtype.element_ty)
    tl.store(p, high)
    if PARTS == 2:
        tl.store(p + C, low)


@triton.jit(do_not_specialize=["seqs"])
def solve(
    q_ptr,  # [tokens, K_HEADS, DK]
    k_ptr,  # [tokens, K_HEADS, DK]
    g_ptr,  # [tokens, V_HEADS]
    beta_ptr,  # [tokens, V_HEADS]
    slots_ptr,  # [seqs]
    bounds_ptr,  # [seqs + 1]
    pairs_ptr,  # [chunks, V_HEADS, 2, C, PARTS C]: T and A, their parts side by side
    factors_ptr,  # [chunks, V_HEADS, 2, C, 2]: of S Kᵀ and K; of Δ in the state and S Qᵀ
    decays_ptr,  # [chunks, V_HEADS]: of S
    seqs,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    scale,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    C: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCALE_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_DTYPE: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
    SEQS: tl.constexpr,  # sequences looked at at once
):
    i_chunk = tl.program_id(0) // V_HEADS
    i_head = tl.program_id(0) % V_HEADS
    # Sequence s has its chunks from cu_seqlens[s] // C + s on: enough room for all, and known without a scan.
    before = 0
    for first in range(0, seqs, SEQS):
        o_s = first + tl.arange(0, SEQS)
        opens = tl.load(bounds_ptr + o_s, mask=o_s < seqs, other=0) // C + o_s
        before += tl.sum(((opens <= i_chunk) & (o_s < seqs)).to(tl.int32), 0)
    i_seq = before - 1
    begin = tl.load(bounds_ptr + i_seq)
    end = tl.load(bounds_ptr + i_seq + 1)
    start = begin + (i_chunk - begin // C - i_seq) * C
    if start >= end:
        return
    if tl.load(slots_ptr + i_seq) < 0:
        return

    o_i = tl.arange(0, C)
    inside = o_i < end - start
    token = start.to(tl.int64)
    i_key_head = i_head // (V_HEADS // K_HEADS)
    b_g = tl.load(g_ptr + token * V_HEADS + i_head + o_i * V_HEADS, mask=inside, other=0.0)
    b_beta = tl.load(beta_ptr + token * V_HEADS + i_head + o_i * V_HEADS, mask=inside, other=0.0)

    # Decays below exp(-110) are zero in float32 as they are. float32 inputs deserve sums of g in two floats, whose
    # differences keep the digits of a small decay after large ones.
    exact = tl.cumsum(tl.maximum(b_g, -110.0).to(tl.float64), 0)
    sums = exact.to(tl.float32)
    rests = (exact - sums).to(tl.float32)
    last = tl.sum(tl.where(o_i == C - 1, exact, 0.0), 0)
    between = sums[:, None] - sums[None, :]
    if PARTS == 1:
        between += rests[:, None] - rests[None, :]
    decay = tl.where(o_i[:, None] >= o_i[None, :], tl.exp(tl.minimum(between, 0.0)), 0.0)  # [C, C]

    b_l = tl.zeros([C, C], tl.float32)
    b_a = tl.zeros([C, C], tl.float32)
    b_n = tl.zeros([C, C], tl.float32)
    p_k = k_ptr + (token * k_stride + i_key_head * k_head_stride)
    p_q = q_ptr + (token * q_stride + i_key_head * q_head_stride)
    for first in tl.range(0, DK, STEP, num_stages=STAGES):
        o_k = first + tl.arange(0, STEP)
        tile = inside[:, None] & (o_k < DK)[None, :]
        b_k = tl.load(p_k + o_i[:, None] * k_stride + o_k[None, :], mask=tile, other=0.0)  # [C, STEP]
        b_q = tl.load(p_q + o_i[:, None] * q_stride + o_k[None, :], mask=tile, other=0.0)  # [C, STEP]
        b_l = tl.dot(b_k, tl.trans(b_k), b_l, input_precision=PRECISION)
        b_a = tl.dot(b_q, tl.trans(b_k), b_a, input_precision=PRECISION)
        if NORMALISE:
            b_n = tl.dot(b_q, tl.trans(b_q), b_n, input_precision=PRECISION)
    k_factor = tl.full([C], 1.0, tl.float32)
    if NORMALISE:
        k_factor = _inverse_lengths(b_l)
    b_l *= decay
    b_l *= (b_beta * k_factor)[:, None] * k_factor[None, :]
    b_l = tl.where(o_i[:, None] > o_i[None, :], b_l, 0.0)
    row = tl.program_id(0).to(tl.int64)
    p_pairs = pairs_ptr + row * (PARTS * 2 * C * C) + o_i[:, None] * (PARTS * C) + o_i[None, :]
    q_factor = tl.full([C], scale, tl.float32)
    if NORMALISE:
        q_factor *= _inverse_lengths(b_n)
    b_a *= decay * q_factor[:, None] * k_factor[None, :]
    _store_parts(p_pairs + PARTS * C * C, b_a, PARTS, C)

    # Inverses of diagonal blocks, doubled in size at each step: [[X, 0], [B, Y]]⁻¹ = [[X⁻¹, 0], [−Y⁻¹ B X⁻¹, Y⁻¹]].
    # Unlike powers of L, no number here is larger than those of the inverse.
    o_b = tl.arange(0, C // 16)
    own = (o_b[:, None] == o_b[None, :])[:, None, :, None]
    b_small = tl.sum(tl.where(own, tl.reshape(b_l, [C // 16, 16, C // 16, 16]), 0.0), 2)
    o_r = tl.arange(0, 16)
    unit = (o_r[:, None] == o_r[None, :]).to(tl.float32)[None, :, :]
    b_u = unit - tl.where(((o_r[:, None] ^ 1) == o_r[None, :])[None, :, :], b_small, 0.0)
    for level in tl.static_range(1, 4):
        sibling = (((o_r[:, None] >> level) ^ 1) == (o_r[None, :] >> level))[None, :, :]
        inverse = b_u.to(SOLVE_DTYPE)
        b_m = tl.dot(tl.where(sibling, b_small, 0.0).to(SOLVE_DTYPE), inverse, input_precision=SOLVE_PRECISION)
        b_u -= tl.dot(inverse, b_m.to(SOLVE_DTYPE), input_precision=SOLVE_PRECISION)
    b_t = tl.reshape(tl.where(own, b_u[:, :, None, :], 0.0), [C, C])
    for level in tl.static_range(4, C.bit_length() - 1):
        sibling = ((o_i[:, None] >> level) ^ 1) == (o_i[None, :] >> level)
        inverse = b_t.to(SOLVE_DTYPE)
        b_m = tl.dot(tl.where(sibling, b_l, 0.0).to(SOLVE_DTYPE), inverse, input_precision=SOLVE_PRECISION)
        b_t -= tl.dot(inverse, b_m.to(SOLVE_DTYPE), input_precision=SOLVE_PRECISION)
    b_t *= b_beta[None, :]
    _store_parts(p_pairs, b_t, PARTS, C)

    # The power of two in the keys' factor multiplies the keys themselves where the rest would leave float16's range.
    power = tl.full([C], 1.0, tl.float32)
    if SCALE_KEYS:
        power = (k_factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    from_start = tl.exp(sums)
    to_end = tl.exp((last - exact).to(tl.float32))
    p_factors = factors_ptr + row * (4 * C) + o_i * 2
    tl.store(p_factors, -from_start * (k_factor / power))
    tl.store(p_factors + 1, power)
    tl.store(p_factors + 2 * C, to_end * (k_factor / power))
    tl.store(p_factors + 2 * C + 1, from_start * q_factor)
    tl.store(decays_ptr + row, tl.exp(last.to(tl.float32)))


def _default(platform: Platform, dims: Dims) -> dict[str, Any]:
    step = min(32, max(16, triton.next_power_of_2(dims["d_k"])))
    return {"STEP": step, "STAGES": 2, "num_warps": 4 if dims["bytes"] == 4 else 1}


SOLVE = Tunable(
    "gdn_prefill_solve",
    space=lambda dims: [
        {"STEP": step, "STAGES": stages, "num_warps": warps}
        for step in (32, 64)
        for stages in (2, 3)
        for warps in (1, 2)
    ],
    default=_default,
)
