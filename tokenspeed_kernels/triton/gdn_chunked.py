"""Prefill of the gated delta rule in chunks of 64 tokens: one kernel for what needs no state, one that carries it.

With K and Q the keys and queries of a chunk, S the state before it, G_i the sum of g up to token i and G_C that of all,
the updates Δ of the rule S ← S + δ kᵀ solve a triangular system, and so (written as the kernel holds them, transposed)

    Δᵀ = (Vᵀ − S Kᵀ diag(exp G)) Tᵀ,   T = (I + L)⁻¹ diag(β),   L_ij = β_i exp(G_i − G_j) k_i·k_j  for i > j
    Oᵀ = S Qᵀ diag(exp G) + Δᵀ Aᵀ,     A_ij = exp(G_i − G_j) q_i·k_j  for i ≥ j
    S  ← exp(G_C) S + Δᵀ diag(exp(G_C − G_j)) K

`_solve`, a program a chunk and value head, stores T, A and the three diagonals. `_advance`, a program a sequence, value
head and tile of d_v, walks over the chunks with its rows of S in registers, and reads K, Q and V as the caller gave
them: lengths and scale are factors of the diagonals. In this transposed form the left operand of every product there
is what the product before left in registers, so that a chunk's chain of three products never waits on shared memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import gdn
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket, platform_for
from tokenspeed_kernels.triton.tuning import Dims, Tunable
from tokenspeed_registry.platform import Platform

CHUNK = 64


@triton.jit
def _halves(x, dtype: tl.constexpr):
    """x as the sum of two numbers of `dtype`."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def _store_parts(p, x, PARTS: tl.constexpr, C: tl.constexpr):
    high, low = _halves(x, p.dtype.element_ty)
    tl.store(p, high)
    if PARTS == 2:
        tl.store(p + C * C, low)


@triton.jit(do_not_specialize=["seqs"])
def _solve(
    q_ptr,  # [tokens, K_HEADS, DK]
    k_ptr,  # [tokens, K_HEADS, DK]
    g_ptr,  # [tokens, V_HEADS]
    beta_ptr,  # [tokens, V_HEADS]
    slots_ptr,  # [seqs]
    bounds_ptr,  # [seqs + 1]
    pairs_ptr,  # [chunks, V_HEADS, 2, PARTS, C, C]: T and A
    factors_ptr,  # [chunks, V_HEADS, 2, C, 2]: of S Kᵀ and K; of Δ in the state and S Qᵀ
    decays_ptr,  # [chunks, V_HEADS]: of S
    seqs,
    q_stride,
    k_stride,
    scale,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCALE_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
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
    o_k = tl.arange(0, BK)
    inside = o_i < end - start
    token = start.to(tl.int64)
    i_key_head = i_head // (V_HEADS // K_HEADS)
    tile = inside[:, None] & (o_k < DK)[None, :]
    p_k = k_ptr + (token * k_stride + i_key_head * DK)
    b_k = tl.load(p_k + o_i[:, None] * k_stride + o_k[None, :], mask=tile, other=0.0)  # [C, BK]
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

    b_l = tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
    k_factor = tl.full([C], 1.0, tl.float32)
    if NORMALISE:
        k_factor = 1.0 / tl.sqrt(tl.sum(tl.where(o_i[:, None] == o_i[None, :], b_l, 0.0), 1) + 1e-6)
    b_l *= decay
    b_l *= (b_beta * k_factor)[:, None] * k_factor[None, :]
    b_l = tl.where(o_i[:, None] > o_i[None, :], b_l, 0.0)
    row = tl.program_id(0).to(tl.int64)
    p_pairs = pairs_ptr + row * (PARTS * 2 * C * C) + o_i[:, None] * C + o_i[None, :]
    p_q = q_ptr + (token * q_stride + i_key_head * DK)
    b_q = tl.load(p_q + o_i[:, None] * q_stride + o_k[None, :], mask=tile, other=0.0)  # [C, BK]
    q_factor = tl.full([C], scale, tl.float32)
    if NORMALISE:
        b_wide = b_q.to(tl.float32)
        q_factor *= 1.0 / tl.sqrt(tl.sum(b_wide * b_wide, 1) + 1e-6)
    b_a = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * decay * q_factor[:, None] * k_factor[None, :]
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
    for level in tl.static_range(4, 6):
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


@triton.jit
def _advance(
    q_ptr,  # [tokens, K_HEADS, DK]
    k_ptr,  # [tokens, K_HEADS, DK]
    v_ptr,  # [tokens, V_HEADS, DV]
    state_ptr,  # [pool, V_HEADS, DV, DK]
    slots_ptr,  # [seqs]
    bounds_ptr,  # [seqs + 1]
    fresh_ptr,  # [seqs]
    pairs_ptr,  # [chunks, V_HEADS, 2, PARTS, C, C]
    factors_ptr,  # [chunks, V_HEADS, 2, C, 2]
    decays_ptr,  # [chunks, V_HEADS]
    o_ptr,  # [tokens, V_HEADS, DV]
    q_stride,
    k_stride,
    v_stride,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    SCALE_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    TILES: tl.constexpr = (DV + BV - 1) // BV
    i_tile = tl.program_id(0) % TILES
    i_head = (tl.program_id(0) // TILES) % V_HEADS
    i_seq = tl.program_id(0) // TILES // V_HEADS
    i_key_head = i_head // (V_HEADS // K_HEADS)
    begin = tl.load(bounds_ptr + i_seq)
    end = tl.load(bounds_ptr + i_seq + 1)
    slot = tl.load(slots_ptr + i_seq).to(tl.int64)
    chunks = (end - begin + C - 1) // C
    dtype: tl.constexpr = q_ptr.dtype.element_ty

    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_tile * BV + tl.arange(0, BV)
    o_out = o_c[:, None] * (V_HEADS * DV) + o_v[None, :]
    token = begin.to(tl.int64)
    if slot < 0:
        for i_chunk in range(chunks):
            inside = (o_c < end - begin - i_chunk * C)[:, None] & (o_v < DV)[None, :]
            zeros = tl.zeros([C, BV], dtype=o_ptr.dtype.element_ty)
            tl.store(o_ptr + ((token + i_chunk * C) * V_HEADS + i_head) * DV + o_out, zeros, mask=inside)
        return

    p_state = state_ptr + (slot * V_HEADS + i_head) * (DV * DK) + o_v[:, None] * DK + o_k[None, :]
    held = (o_v < DV)[:, None] & (o_k < DK)[None, :]
    b_s = tl.zeros([BV, BK], tl.float32)
    if tl.load(fresh_ptr + i_seq) == 0:
        b_s = tl.load(p_state, mask=held, other=0.0).to(tl.float32)
    o_query = o_c[:, None] * q_stride + o_k[None, :]
    o_key = o_c[:, None] * k_stride + o_k[None, :]
    o_value = o_c[:, None] * v_stride + o_v[None, :]
    o_pair = o_c[:, None] * C + o_c[None, :]
    row = (token // C + i_seq) * V_HEADS + i_head
    for i_chunk in tl.range(0, chunks, num_stages=STAGES):
        inside = (o_c < end - begin - i_chunk * C)[:, None]
        keys = inside & (o_k < DK)[None, :]
        values = inside & (o_v < DV)[None, :]
        b_k = tl.load(k_ptr + (token * k_stride + i_key_head * DK) + o_key, mask=keys, other=0.0)  # [C, BK]
        b_q = tl.load(q_ptr + (token * q_stride + i_key_head * DK) + o_query, mask=keys, other=0.0)  # [C, BK]
        b_v = tl.load(v_ptr + (token * v_stride + i_head * DV) + o_value, mask=values, other=0.0)  # [C, BV]
        p_pairs = pairs_ptr + row * (PARTS * 2 * C * C) + o_pair
        p_factors = factors_ptr + row * (4 * C) + tl.arange(0, 2 * C)
        read, power = tl.split(tl.reshape(tl.load(p_factors), [C, 2]))
        if SCALE_KEYS:
            b_k = (b_k.to(tl.float32) * power[:, None]).to(dtype)

        operand = b_s.to(dtype)
        b_x = (tl.dot(operand, tl.trans(b_k), input_precision="ieee") * read[None, :]).to(dtype)  # [BV, C]
        b_t = tl.load(p_pairs)  # [C, C]
        b_d = tl.dot(tl.trans(b_v), tl.trans(b_t), input_precision="ieee")  # [BV, C]
        b_d = tl.dot(b_x, tl.trans(b_t), b_d, input_precision="ieee")
        if PARTS == 2:
            b_t_low = tl.load(p_pairs + C * C)
            b_d = tl.dot(tl.trans(b_v), tl.trans(b_t_low), b_d, input_precision="ieee")
            b_d = tl.dot(b_x, tl.trans(b_t_low), b_d, input_precision="ieee")

        written, asked = tl.split(tl.reshape(tl.load(p_factors + 2 * C), [C, 2]))
        b_w, b_w_low = _halves(b_d * written[None, :], dtype)
        b_s = tl.dot(b_w, b_k, b_s * tl.load(decays_ptr + row), input_precision="ieee")
        if PARTS == 2:
            b_s = tl.dot(b_w_low, b_k, b_s, input_precision="ieee")

        b_o = tl.dot(operand, tl.trans(b_q), input_precision="ieee") * asked[None, :]  # [BV, C]
        b_d, b_d_low = _halves(b_d, dtype)
        b_a = tl.load(p_pairs + PARTS * C * C)  # [C, C]
        b_o = tl.dot(b_d, tl.trans(b_a), b_o, input_precision="ieee")
        if PARTS == 2:
            b_a_low = tl.load(p_pairs + 3 * C * C)
            b_o = tl.dot(b_d_low, tl.trans(b_a), b_o, input_precision="ieee")
            b_o = tl.dot(b_d, tl.trans(b_a_low), b_o, input_precision="ieee")
        p_o = o_ptr + (token * V_HEADS + i_head) * DV
        tl.store(p_o + o_out, tl.trans(b_o).to(o_ptr.dtype.element_ty), mask=values)
        token += C
        row += V_HEADS
    tl.store(p_state, b_s.to(state_ptr.dtype.element_ty), mask=held)


def _advance_default(platform: Platform, dims: Dims) -> dict[str, Any]:
    if dims["bytes"] == 4 or platform.vendor == "amd":
        return {"BV": 16, "STAGES": 1 if dims["bytes"] == 4 else 2, "num_warps": 4}
    return {"BV": min(64, max(16, triton.next_power_of_2(dims["d_v"]))), "STAGES": 3, "num_warps": 4}


SOLVE = Tunable(
    "gdn_prefill_solve",
    space=lambda dims: [{"num_warps": warps} for warps in (4, 8)],
    default=lambda platform, dims: {"num_warps": 4},
)
ADVANCE = Tunable(
    "gdn_prefill_advance",
    space=lambda dims: [
        {"BV": rows, "STAGES": stages, "num_warps": warps}
        for rows, warps in ((16, 4), (32, 4), (64, 4), (128, 8))
        for stages in (2, 3)
        if rows <= max(16, triton.next_power_of_2(dims["d_v"]))
    ],
    default=_advance_default,
)


@portable(gdn.gdn_prefill)
def gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    fresh: Tensor,
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    (tokens, v_heads, d_v), (_, k_heads, d_k), seqs = v.shape, k.shape, slots.shape[0]
    if seqs == 0 or v_heads * d_v == 0:
        return out
    chunks = tokens // CHUNK + seqs
    parts = 1 if q.dtype == torch.float32 else 2
    pairs = torch.empty(chunks, v_heads, 2, parts, CHUNK, CHUNK, dtype=q.dtype, device=q.device)
    factors = torch.empty(chunks, v_heads, 2, CHUNK, 2, dtype=torch.float32, device=q.device)
    decays = torch.empty(chunks, v_heads, dtype=torch.float32, device=q.device)
    block_k = max(16, triton.next_power_of_2(d_k))
    narrow = q.dtype != torch.float32
    scale_keys = normalise and q.dtype == torch.float16
    dims = {"d_k": d_k, "d_v": d_v, "bytes": q.dtype.itemsize, "states": min(bucket(seqs * v_heads), 512)}
    # Entries of L and of inverses are at most 1 for unit keys: float16 keeps more of their digits than bfloat16.
    solve_dtype, solve_precision = tl.float32, "ieee"
    if q.dtype == torch.bfloat16 and normalise:
        solve_dtype = tl.float16
    elif narrow and platform_for(q.device).vendor == "nvidia":
        solve_precision = "tf32" if q.dtype == torch.bfloat16 else "tf32x3"
    _solve[(chunks * v_heads,)](
        q, k, g, beta, slots, cu_seqlens, pairs, factors, decays, seqs, q.stride(0), k.stride(0), scale,
        K_HEADS=k_heads, V_HEADS=v_heads, DK=d_k, BK=block_k, C=CHUNK, NORMALISE=normalise,
        SCALE_KEYS=scale_keys, PARTS=parts, SOLVE_DTYPE=solve_dtype, SOLVE_PRECISION=solve_precision, SEQS=128,
        **SOLVE.pick(q.device, **dims),
    )  # fmt: skip
    choice = ADVANCE.pick(q.device, **dims)
    _advance[(triton.cdiv(d_v, choice["BV"]) * v_heads * seqs,)](
        q, k, v, state, slots, cu_seqlens, fresh.view(torch.uint8), pairs, factors, decays, out,
        q.stride(0), k.stride(0), v.stride(0),
        K_HEADS=k_heads, V_HEADS=v_heads, DK=d_k, DV=d_v, BK=block_k, C=CHUNK,
        SCALE_KEYS=scale_keys, PARTS=parts, **choice,
    )  # fmt: skip
    return out
