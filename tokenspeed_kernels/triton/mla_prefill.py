"""MLA prefill: attention of packed sequences in the expanded form, and the merging of its chunks.

A program takes a tile of queries of one head and walks over the keys that they see with an online softmax. Keys are as
wide as latents and rotated part together, 192 in the models: the width is cut into a power of two and the rest. Tiles
of causal sequences that see most start first.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import mla
from tokenspeed_kernels.triton.attention_parts import softmax_step
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry import Dim
from tokenspeed_registry.platform import Platform


@triton.jit
def _sequence_of_tile(offsets_ptr, i_tile, seqs, BLOCK: tl.constexpr):
    """The sequence of a tile, and the tile's number in it. A sequence's tiles start at `offset // BLOCK + number`:
    room for all, at the price of some tiles that are empty."""
    low = 0
    high = seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(offsets_ptr + middle) // BLOCK + middle <= i_tile:
            low = middle
        else:
            high = middle
    return low, i_tile - (tl.load(offsets_ptr + low) // BLOCK + low)


@triton.jit
def _attend_keys(
    b_o, b_max, b_sum, b_q, b_q2, k_ptr, v_ptr, k_stride, v_stride, first, last, keys, b_visible, log2_scale,
    QK: tl.constexpr, V_DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys from `first` up to `last` to the running softmax; unmasked where all rows see whole tiles."""
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_d2 = WIDE + tl.arange(0, BLOCK_D2)
    o_v = tl.arange(0, BLOCK_V)
    for i_key in range(first, last, BLOCK_N):
        o_key = (i_key + o_n).to(tl.int64)
        p_k = k_ptr + o_key[:, None] * k_stride
        p_v = v_ptr + o_key[:, None] * v_stride
        if MASKED:
            live = (o_key < keys)[:, None]
            b_k = tl.load(p_k + o_d[None, :], mask=live & (o_d < WIDE)[None, :], other=0.0)  # [BN, BD]
            b_v = tl.load(p_v + o_v[None, :], mask=live & (o_v < V_DIM)[None, :], other=0.0)  # [BN, BV]
        else:
            b_k = _columns(p_k, o_d, WIDE, BLOCK_D)
            b_v = _columns(p_v, o_v, V_DIM, BLOCK_V)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [BM, BN]
        if QK > WIDE:
            if MASKED:
                b_k2 = tl.load(p_k + o_d2[None, :], mask=live & (o_d2 < QK)[None, :], other=0.0)  # [BN, BD2]
            else:
                b_k2 = _columns(p_k, o_d2, QK, WIDE + BLOCK_D2)
            b_s = tl.dot(b_q2, tl.trans(b_k2), b_s, input_precision="ieee")
        b_s *= log2_scale
        if MASKED:
            b_s = tl.where(o_key[None, :] < b_visible[:, None], b_s, float("-inf"))
        b_max, b_sum, b_o = softmax_step(b_s, b_v, b_max, b_sum, b_o, "ieee")
    return b_o, b_max, b_sum


@triton.jit
def _columns(p_row, o_column, WIDTH: tl.constexpr, BLOCK_END: tl.constexpr):
    """Whole rows, masked only where the tile is wider than they are."""
    if WIDTH == BLOCK_END:
        b_row = tl.load(p_row + o_column[None, :])
    else:
        b_row = tl.load(p_row + o_column[None, :], mask=(o_column < WIDTH)[None, :], other=0.0)
    return b_row


@triton.jit(do_not_specialize=["seqs"])
def _prefill(
    q_ptr,  # [tokens, HEADS, QK], contiguous in the last
    k_ptr,  # [kv_tokens, HEADS, QK], contiguous in the last
    v_ptr,  # [kv_tokens, HEADS, V_DIM], contiguous in the last
    q_offsets_ptr,  # [seqs + 1]
    k_offsets_ptr,  # [seqs + 1]
    o_ptr,  # [tokens, HEADS, V_DIM]
    lse_ptr,  # [tokens, HEADS]
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    seqs,
    scale,
    HEADS: tl.constexpr,
    QK: tl.constexpr,
    V_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_head = tl.program_id(1).to(tl.int64)
    i_sequence, i_block = _sequence_of_tile(q_offsets_ptr, tl.num_programs(0) - 1 - tl.program_id(0), seqs, BLOCK_M)
    q_first = tl.load(q_offsets_ptr + i_sequence)
    queries = tl.load(q_offsets_ptr + i_sequence + 1) - q_first
    if i_block * BLOCK_M >= queries:
        return
    k_first = tl.load(k_offsets_ptr + i_sequence)
    keys = tl.load(k_offsets_ptr + i_sequence + 1) - k_first

    o_m = i_block * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_d2 = WIDE + tl.arange(0, BLOCK_D2)
    o_v = tl.arange(0, BLOCK_V)
    inside = o_m < queries
    o_token = (q_first + o_m).to(tl.int64)
    p_q = q_ptr + o_token[:, None] * q_stride + i_head * q_head_stride
    b_q = tl.load(p_q + o_d[None, :], mask=inside[:, None] & (o_d < WIDE)[None, :], other=0.0)  # [BM, BD]
    b_q2 = b_q
    if QK > WIDE:
        b_q2 = tl.load(p_q + o_d2[None, :], mask=inside[:, None] & (o_d2 < QK)[None, :], other=0.0)  # [BM, BD2]
    k_ptr += k_first.to(tl.int64) * k_stride + i_head * k_head_stride
    v_ptr += k_first.to(tl.int64) * v_stride + i_head * v_head_stride

    if CAUSAL:
        b_visible = keys - queries + o_m + 1
        seen = tl.minimum(keys, keys - queries + (i_block + 1) * BLOCK_M)
        whole = tl.maximum(keys - queries + i_block * BLOCK_M + 1, 0) // BLOCK_N * BLOCK_N
    else:
        b_visible = tl.zeros([BLOCK_M], tl.int32) + keys
        seen = keys
        whole = keys // BLOCK_N * BLOCK_N
    whole = tl.minimum(whole, keys // BLOCK_N * BLOCK_N)
    b_o = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    log2_scale = scale * 1.4426950408889634
    b_o, b_max, b_sum = _attend_keys(
        b_o, b_max, b_sum, b_q, b_q2, k_ptr, v_ptr, k_stride, v_stride, 0, whole, keys, b_visible, log2_scale,
        QK, V_DIM, WIDE, BLOCK_D, BLOCK_D2, BLOCK_V, BLOCK_N, False,
    )  # fmt: skip
    b_o, b_max, b_sum = _attend_keys(
        b_o, b_max, b_sum, b_q, b_q2, k_ptr, v_ptr, k_stride, v_stride, whole, seen, keys, b_visible, log2_scale,
        QK, V_DIM, WIDE, BLOCK_D, BLOCK_D2, BLOCK_V, BLOCK_N, True,
    )  # fmt: skip

    b_o = b_o * tl.where(b_sum > 0, 1.0 / b_sum, 0.0)[:, None]
    b_lse = tl.where(b_sum > 0, (b_max + tl.log2(b_sum)) * 0.6931471805599453, float("-inf"))
    o_row = o_token * HEADS + i_head
    tl.store(lse_ptr + o_row, b_lse, mask=inside)
    p_o = o_ptr + o_row[:, None] * V_DIM + o_v[None, :]
    tl.store(p_o, b_o.to(o_ptr.dtype.element_ty), mask=inside[:, None] & (o_v < V_DIM)[None, :])


def _space(dims: Dims) -> Iterable[Config]:
    if _wide(dims):
        return [_config(16, 16, 4, 1), _config(32, 16, 8, 1), _config(32, 32, 8, 1)]
    return [
        _config(128, 64, 8, 2),
        _config(128, 64, 8, 3),
        _config(128, 64, 4, 1),
        _config(128, 128, 8, 2),
        _config(64, 64, 4, 1),
        _config(64, 64, 4, 2),
    ]


def _default(platform: Platform, dims: Dims) -> Config:
    if _wide(dims):
        return _config(32, 32, 8, 1)
    if platform.vendor == "amd":
        return _config(128, 64, 4, 1)
    return _config(128, 64, 8, 3 if dims["qk"] + dims["v_dim"] <= 320 else 2)


def _wide(dims: Dims) -> bool:
    """Whether rows are wider than those of the models, or of float32, so that only small tiles are sure to fit."""
    return dims["bytes"] > 2 or max(dims["qk"], dims["v_dim"]) > 256


def _config(queries: int, keys: int, warps: int, stages: int) -> Config:
    return {"BLOCK_M": queries, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}


PREFILL = Tunable("mla_prefill", space=_space, default=_default)


@portable(mla.mla_prefill, constraints=[Dim("qk") >= 1])
def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    causal: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, qk = q.shape
    v_dim, seqs = v.shape[2], cu_seqlens_q.shape[0] - 1
    attended, lse = out or (
        torch.empty(tokens, heads, v_dim, dtype=q.dtype, device=q.device),
        torch.empty(tokens, heads, dtype=torch.float32, device=q.device),
    )
    if tokens * heads == 0:
        return attended, lse
    wide = 1 << (qk.bit_length() - 1)
    config = PREFILL.pick(q.device, qk=qk, v_dim=v_dim, bytes=q.dtype.itemsize)
    _prefill[(tokens // config["BLOCK_M"] + seqs, heads)](
        q, k, v, cu_seqlens_q, cu_seqlens_k, attended, lse,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], seqs, scale, heads, qk, v_dim, causal, wide,
        max(wide, 16), max(triton.next_power_of_2(qk - wide), 16), max(triton.next_power_of_2(v_dim), 16), **config,
    )  # fmt: skip
    return attended, lse


@triton.jit(do_not_specialize=["rows"])
def _merge(
    a_ptr,  # [rows, DIM]
    a_lse_ptr,  # [rows]
    b_ptr,  # [rows, DIM]
    b_lse_ptr,  # [rows]
    o_ptr,  # [rows, DIM]
    lse_ptr,  # [rows]
    rows,
    DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    inside = o_r < rows
    lse_a = tl.load(a_lse_ptr + o_r, mask=inside, other=float("-inf"))
    lse_b = tl.load(b_lse_ptr + o_r, mask=inside, other=float("-inf"))
    top = tl.maximum(lse_a, lse_b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.exp(lse_a - base)
    weight_b = tl.exp(lse_b - base)
    total = weight_a + weight_b
    share = tl.where(total > 0, 1.0 / total, 0.0)
    o_element = o_r[:, None] * DIM + o_d[None, :]
    whole = inside[:, None] & (o_d < DIM)[None, :]
    b_a = tl.load(a_ptr + o_element, mask=whole, other=0.0).to(tl.float32)  # [BR, BD]
    b_b = tl.load(b_ptr + o_element, mask=whole, other=0.0).to(tl.float32)
    merged = b_a * (weight_a * share)[:, None] + b_b * (weight_b * share)[:, None]
    # The other side of an empty one stays as it is, down to the sign of zeros.
    merged = tl.where((weight_b == 0)[:, None] & (weight_a > 0)[:, None], b_a, merged)
    merged = tl.where((weight_a == 0)[:, None] & (weight_b > 0)[:, None], b_b, merged)
    tl.store(o_ptr + o_element, merged.to(o_ptr.dtype.element_ty), mask=whole)
    tl.store(lse_ptr + o_r, tl.where(total > 0, base + tl.log(total), float("-inf")), mask=inside)


@portable(mla.merge_states)
def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = out_a.shape
    merged, merged_lse = out or (torch.empty_like(out_a), torch.empty_like(lse_a))
    rows = tokens * heads
    if rows:
        width = triton.next_power_of_2(max(dim, 1))
        height = max(4096 // width, 1)
        _merge[(-(-rows // height),)](out_a, lse_a, out_b, lse_b, merged, merged_lse, rows, dim, height, width)
    return merged, merged_lse
