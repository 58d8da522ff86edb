"""Prefill of the gated delta rule in chunks of tokens: one kernel for what needs no state, one that carries it.

With K and Q the keys and queries of a chunk, S the state before it, G_i the sum of g up to token i and G_C that of all,
the updates Δ of the rule S ← S + δ kᵀ solve a triangular system, and so (written as the kernel holds them, transposed)

    Δᵀ = (Vᵀ − S Kᵀ diag(exp G)) Tᵀ,   T = (I + L)⁻¹ diag(β),   L_ij = β_i exp(G_i − G_j) k_i·k_j  for i > j
    Oᵀ = S Qᵀ diag(exp G) + Δᵀ Aᵀ,     A_ij = exp(G_i − G_j) q_i·k_j  for i ≥ j
    S  ← exp(G_C) S + Δᵀ diag(exp(G_C − G_j)) K

`solve`, a program a chunk and value head, stores T, A and the three diagonals. `_advance`, a program a sequence, value
head and tile of d_v, walks over the chunks with its rows of S in registers, and reads K, Q and V as the caller gave
them: lengths and scale are factors of the diagonals. In this transposed form the left operand of every product there
is what the product before left in registers, so that a chunk's chain of three products never waits on shared memory.
T, A and Δ are too coarse in 16 bits: they enter as sums of two such numbers, side by side along the inner dim.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import gdn
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket, platform_for
from tokenspeed_kernels.triton.gdn_chunked_solve import SOLVE, halves, solve
from tokenspeed_kernels.triton.tuning import Dims, Tunable
from tokenspeed_registry.platform import Platform


@triton.jit
def _both(high, low, PARTS: tl.constexpr):  # [BV, C] each, to [BV, PARTS C]
    beside = high
    if PARTS == 2:
        beside = tl.reshape(tl.permute(tl.join(high, low), (0, 2, 1)), [high.shape[0], 2 * high.shape[1]])
    return beside


@triton.jit
def _step(
    b_s,  # [BV, BK]
    b_k,  # [C, BK]
    b_q,  # [C, BK]
    b_v,  # [PARTS C, BV]: V, PARTS times
    p_pairs,  # [C, PARTS C]
    p_factors,  # [2 C]
    p_decay,
    C: tl.constexpr,
    SCALE_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state after a chunk, and the chunk's outputs [C, BV].

    Factors are loaded where they are used: together they would not fit into registers.
    """
    dtype: tl.constexpr = b_q.dtype
    read, power = tl.split(tl.reshape(tl.load(p_factors), [C, 2]))
    if SCALE_KEYS:
        b_k = (b_k.to(tl.float32) * power[:, None]).to(dtype)
    operand = b_s.to(dtype)
    b_x = (tl.dot(operand, tl.trans(b_k), input_precision=PRECISION) * read[None, :]).to(dtype)  # [BV, C]
    b_t = tl.trans(tl.load(p_pairs))  # [PARTS C, C]
    b_d = tl.dot(tl.trans(b_v), b_t, input_precision=PRECISION)  # [BV, C]
    b_d = tl.dot(_both(b_x, b_x, PARTS), b_t, b_d, input_precision=PRECISION)

    written, asked = tl.split(tl.reshape(tl.load(p_factors + 2 * C), [C, 2]))
    high, low = halves(b_d * written[None, :], dtype)
    b_s = tl.dot(high, b_k, b_s * tl.load(p_decay), input_precision=PRECISION)
    if PARTS == 2:
        b_s = tl.dot(low, b_k, b_s, input_precision=PRECISION)

    b_o = tl.dot(operand, tl.trans(b_q), input_precision=PRECISION) * asked[None, :]  # [BV, C]
    high, low = halves(b_d, dtype)
    b_a = tl.trans(tl.load(p_pairs + PARTS * C * C))  # [PARTS C, C]
    b_o = tl.dot(_both(high, high, PARTS), b_a, b_o, input_precision=PRECISION)
    if PARTS == 2:
        b_o = tl.dot(_both(low, low, PARTS), b_a, b_o, input_precision=PRECISION)
    return b_s, tl.trans(b_o)


@triton.jit
def _advance(
    q_ptr,  # [tokens, K_HEADS, DK]
    k_ptr,  # [tokens, K_HEADS, DK]
    v_ptr,  # [tokens, V_HEADS, DV]
    state_ptr,  # [pool, V_HEADS, DV, DK]
    slots_ptr,  # [seqs]
    bounds_ptr,  # [seqs + 1]
    fresh_ptr,  # [seqs]
    pairs_ptr,  # [chunks, V_HEADS, 2, C, PARTS C]
    factors_ptr,  # [chunks, V_HEADS, 2, C, 2]
    decays_ptr,  # [chunks, V_HEADS]
    o_ptr,  # [tokens, V_HEADS, DV]
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    SCALE_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
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

    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_tile * BV + tl.arange(0, BV)
    o_out = o_c[:, None] * (V_HEADS * DV) + o_v[None, :]
    token = begin.to(tl.int64)
    if slot < 0:
        for i_chunk in range((end - begin + C - 1) // C):
            inside = (o_c < end - begin - i_chunk * C)[:, None] & (o_v < DV)[None, :]
            zeros = tl.zeros([C, BV], dtype=o_ptr.dtype.element_ty)
            tl.store(o_ptr + ((token + i_chunk * C) * V_HEADS + i_head) * DV + o_out, zeros, mask=inside)
        return

    p_state = state_ptr + (slot * V_HEADS + i_head) * (DV * DK) + o_v[:, None] * DK + o_k[None, :]
    held = (o_v < DV)[:, None] & (o_k < DK)[None, :]
    b_s = tl.zeros([BV, BK], tl.float32)
    if tl.load(fresh_ptr + i_seq) == 0:
        b_s = tl.load(p_state, mask=held, other=0.0).to(tl.float32)
    o_pc = tl.arange(0, PARTS * C)
    o_query = o_c[:, None] * q_stride + o_k[None, :]
    o_key = o_c[:, None] * k_stride + o_k[None, :]
    o_value = (o_pc % C)[:, None] * v_stride + o_v[None, :]
    o_pair = o_c[:, None] * (PARTS * C) + o_pc[None, :]
    row = (token // C + i_seq) * V_HEADS + i_head
    whole = (end - begin) // C
    for _ in tl.range(0, whole, num_stages=STAGES):
        keys = (o_k < DK)[None, :]
        b_k = tl.load(k_ptr + (token * k_stride + i_key_head * k_head_stride) + o_key, mask=keys, other=0.0)
        b_q = tl.load(q_ptr + (token * q_stride + i_key_head * q_head_stride) + o_query, mask=keys, other=0.0)
        values = (o_v < DV)[None, :]
        b_v = tl.load(v_ptr + (token * v_stride + i_head * v_head_stride) + o_value, mask=values, other=0.0)
        p_pairs = pairs_ptr + row * (PARTS * 2 * C * C) + o_pair
        p_factors = factors_ptr + row * (4 * C) + tl.arange(0, 2 * C)
        p_decay = decays_ptr + row
        b_s, b_o = _step(b_s, b_k, b_q, b_v, p_pairs, p_factors, p_decay, C, SCALE_KEYS, PARTS, PRECISION)
        p_o = o_ptr + (token * V_HEADS + i_head) * DV
        tl.store(p_o + o_out, b_o.to(o_ptr.dtype.element_ty), mask=values)
        token += C
        row += V_HEADS
    left = end - begin - whole * C
    if left > 0:
        keys = (o_c < left)[:, None] & (o_k < DK)[None, :]
        b_k = tl.load(k_ptr + (token * k_stride + i_key_head * k_head_stride) + o_key, mask=keys, other=0.0)
        b_q = tl.load(q_ptr + (token * q_stride + i_key_head * q_head_stride) + o_query, mask=keys, other=0.0)
        values = (o_pc % C < left)[:, None] & (o_v < DV)[None, :]
        b_v = tl.load(v_ptr + (token * v_stride + i_head * v_head_stride) + o_value, mask=values, other=0.0)
        p_pairs = pairs_ptr + row * (PARTS * 2 * C * C) + o_pair
        p_factors = factors_ptr + row * (4 * C) + tl.arange(0, 2 * C)
        p_decay = decays_ptr + row
        b_s, b_o = _step(b_s, b_k, b_q, b_v, p_pairs, p_factors, p_decay, C, SCALE_KEYS, PARTS, PRECISION)
        p_o = o_ptr + (token * V_HEADS + i_head) * DV
        tl.store(p_o + o_out, b_o.to(o_ptr.dtype.element_ty), mask=(o_c < left)[:, None] & (o_v < DV)[None, :])
    tl.store(p_state, b_s.to(state_ptr.dtype.element_ty), mask=held)


def _advance_default(platform: Platform, dims: Dims) -> dict[str, Any]:
    if dims["bytes"] == 4:
        return {"C": 16, "BV": 16, "STAGES": 1 if platform.vendor == "amd" else 2, "num_warps": 4}
    if platform.vendor == "amd":
        return {"C": 32, "BV": 16, "STAGES": 2, "num_warps": 4}
    return {"C": 32, "BV": min(64, max(16, triton.next_power_of_2(dims["d_v"]))), "STAGES": 3, "num_warps": 4}


ADVANCE = Tunable(
    "gdn_prefill_advance",
    space=lambda dims: [
        {"C": chunk, "BV": rows, "STAGES": stages, "num_warps": warps}
        for rows, warps in ((16, 4), (64, 4), (128, 8))
        for chunk in (32, 64)
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
    dims = {"d_k": d_k, "d_v": d_v, "bytes": q.dtype.itemsize, "states": min(bucket(seqs * v_heads), 512)}
    choice = ADVANCE.pick(q.device, **dims)
    chunk = choice["C"]
    chunks = tokens // chunk + seqs
    parts = 1 if q.dtype == torch.float32 else 2
    pairs = torch.empty(chunks, v_heads, 2, chunk, parts * chunk, dtype=q.dtype, device=q.device)
    factors = torch.empty(chunks, v_heads, 2, chunk, 2, dtype=torch.float32, device=q.device)
    decays = torch.empty(chunks, v_heads, dtype=torch.float32, device=q.device)
    scale_keys = normalise and q.dtype == torch.float16
    nvidia = platform_for(q.device).vendor == "nvidia"
    # Three tf32 products keep 22 bits, at many times the speed of float32 on NVIDIA; AMD multiplies in float32.
    precision = "tf32x3" if nvidia else "ieee"
    solve_dtype, solve_precision = tl.float32, precision
    if q.dtype == torch.bfloat16 and normalise:
        # Entries of L and of inverses are at most 1 for unit keys: float16 keeps more of their digits than bfloat16.
        solve_dtype = tl.float16
    elif q.dtype == torch.bfloat16 and nvidia:
        solve_precision = "tf32"
    solve[(chunks * v_heads,)](
        q, k, g, beta, slots, cu_seqlens, pairs, factors, decays, seqs,
        *q.stride()[:2], *k.stride()[:2], scale,
        K_HEADS=k_heads, V_HEADS=v_heads, DK=d_k, C=chunk, NORMALISE=normalise,
        SCALE_KEYS=scale_keys, PARTS=parts, PRECISION=precision,
        SOLVE_DTYPE=solve_dtype, SOLVE_PRECISION=solve_precision, SEQS=128, **SOLVE.pick(q.device, **dims),
    )  # fmt: skip
    _advance[(triton.cdiv(d_v, choice["BV"]) * v_heads * seqs,)](
        q, k, v, state, slots, cu_seqlens, fresh.view(torch.uint8), pairs, factors, decays, out,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        K_HEADS=k_heads, V_HEADS=v_heads, DK=d_k, DV=d_v, BK=max(16, triton.next_power_of_2(d_k)),
        SCALE_KEYS=scale_keys, PARTS=parts, PRECISION=precision, **choice,
    )  # fmt: skip
    return out
