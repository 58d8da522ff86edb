"""What surrounds the attention of latent caches: projections of each head, rows into the cache and out of it.

The two projections are one kernel, a batch of small products over the heads, of which `mla_absorb_query` also copies
the rotated part behind its result. A cache row is written by a program a token, and read by one for some tokens.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import mla, mla_forms
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


@triton.jit(do_not_specialize=["tokens"])
def _project(
    x_ptr,  # [tokens, heads, K], contiguous in the last
    w_ptr,  # [heads, K, N] by its strides
    tail_ptr,  # [tokens, heads, TAIL], contiguous in the last; what follows the product in a row
    o_ptr,  # [tokens, heads, N + TAIL]
    x_stride,
    x_head_stride,
    w_head_stride,
    w_k_stride,
    w_n_stride,
    tail_stride,
    tail_head_stride,
    tokens,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,  # tiles of N
    K: tl.constexpr,
    N: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    i_head = (tl.program_id(1) // COLUMNS).to(tl.int64)
    i_column = tl.program_id(1) % COLUMNS
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_column * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    o_token = o_m.to(tl.int64)
    inside = (o_m < tokens)[:, None]
    p_x = x_ptr + o_token[:, None] * x_stride + i_head * x_head_stride + o_k[None, :]
    p_w = w_ptr + i_head * w_head_stride + o_k.to(tl.int64)[:, None] * w_k_stride
    p_w += o_n.to(tl.int64)[None, :] * w_n_stride
    b_o = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(0, K, BLOCK_K):
        live = o_k < K - i_k
        b_x = tl.load(p_x, mask=inside & live[None, :], other=0.0)  # [BM, BK]
        b_w = tl.load(p_w, mask=live[:, None] & (o_n < N)[None, :], other=0.0)  # [BK, BN]
        b_o = tl.dot(b_x, b_w, b_o, input_precision="ieee")
        p_x += BLOCK_K
        p_w += BLOCK_K * w_k_stride
    p_o = o_ptr + (o_token * HEADS + i_head)[:, None] * (N + TAIL)
    tl.store(p_o + o_n[None, :], b_o.to(o_ptr.dtype.element_ty), mask=inside & (o_n < N)[None, :])
    if TAIL > 0:
        o_t = tl.arange(0, BLOCK_T)
        within = inside & (o_t < tl.where(i_column == 0, TAIL, 0))[None, :]
        p_tail = tail_ptr + o_token[:, None] * tail_stride + i_head * tail_head_stride
        tl.store(p_o + N + o_t[None, :], tl.load(p_tail + o_t[None, :], mask=within), mask=within)


def _space(dims: Dims) -> Iterable[Config]:
    rows = _tile_rows(dims)
    if dims["bytes"] > 2:
        return [_config(min(rows, 32), 64, 32, 4, 2), _config(min(rows, 32), 32, 32, 4, 2)]
    small = [_config(rows, 32, 128, 4, 3), _config(rows, 64, 64, 4, 3), _config(rows, 64, 128, 4, 3)]
    return [*small, _config(rows, 128, 64, 4, 3), _config(rows, 128, 64, 8, 3), _config(rows, 128, 64, 4, 2)]


def _default(platform: Platform, dims: Dims) -> Config:
    rows = _tile_rows(dims)
    stages = 2 if platform.vendor == "amd" else 3
    if dims["bytes"] > 2:
        return _config(min(rows, 32), 64, 32, 4, 2)
    if rows > 32:
        return _config(rows, 128, 64, 4 if rows < 128 else 8, stages)
    # Few rows: a program should not walk far, and there should be many.
    return _config(rows, 32, 128, 4, stages) if dims["k"] > 256 else _config(rows, 64, 64, 4, stages)


def _tile_rows(dims: Dims) -> int:
    return min(max(dims["tokens"], 16), 128)


def _config(rows: int, columns: int, inner: int, warps: int, stages: int) -> Config:
    return {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": inner, "num_warps": warps, "num_stages": stages}


PROJECT = Tunable("mla_project", space=_space, default=_default)


def _launch_project(x: Tensor, weight: Tensor, tail: Tensor | None, out: Tensor) -> None:
    """`out` [tokens, heads, n + tail]: the products of `x` with the matrix [k, n] of each head, then `tail`."""
    tokens, heads, k = x.shape
    n = weight.shape[2]
    tail_width = 0 if tail is None else tail.shape[2]
    if out.numel() == 0:
        return
    config = PROJECT.pick(x.device, tokens=min(max(bucket(tokens), 16), 128), k=k, n=n, bytes=x.dtype.itemsize)
    tail_strides = (0, 0) if tail is None else tail.stride()[:2]
    columns = max(-(-n // config["BLOCK_N"]), 1)  # one, too, where there is only a tail
    _project[(-(-tokens // config["BLOCK_M"]), heads * columns)](
        x, weight, tail, out, *x.stride()[:2], *weight.stride(), *tail_strides,
        tokens, heads, columns, k, n, tail_width, triton.next_power_of_2(max(tail_width, 1)), **config,
    )  # fmt: skip


@portable(mla_forms.mla_absorb_query)
def mla_absorb_query(q_nope: Tensor, q_rope: Tensor, w_k: Tensor, *, out: Tensor | None = None) -> Tensor:
    tokens, heads, _ = q_nope.shape
    q = q_nope.new_empty(tokens, heads, w_k.shape[2] + q_rope.shape[2]) if out is None else out
    _launch_project(q_nope, w_k, q_rope if q_rope.shape[2] else None, q)
    return q


@portable(mla_forms.mla_value_up)
def mla_value_up(latent_out: Tensor, w_v: Tensor, *, out: Tensor | None = None) -> Tensor:
    tokens, heads, _ = latent_out.shape
    values = latent_out.new_empty(tokens, heads, w_v.shape[1]) if out is None else out
    _launch_project(latent_out, w_v.transpose(1, 2), None, values)
    return values


@triton.jit
def _write(
    latent_ptr,  # [tokens, LATENT], contiguous in the last
    rope_ptr,  # [tokens, ROPE], contiguous in the last
    slot_ptr,  # [tokens]
    kv_ptr,  # [pages, PAGE, LATENT + ROPE], contiguous in the last
    kv_scale_ptr,  # [1] or None
    latent_stride,
    rope_stride,
    page_stride,
    row_stride,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + i_token)
    if slot < 0:
        return
    p_row = kv_ptr + slot // PAGE * page_stride + slot % PAGE * row_stride
    o_l = tl.arange(0, BLOCK_L)
    o_p = tl.arange(0, BLOCK_P)
    b_latent = tl.load(latent_ptr + i_token * latent_stride + o_l, mask=o_l < LATENT).to(tl.float32)
    b_rope = tl.load(rope_ptr + i_token * rope_stride + o_p, mask=o_p < ROPE).to(tl.float32)
    if kv_scale_ptr is not None:
        kv_scale = tl.load(kv_scale_ptr)
        b_latent = tl.div_rn(b_latent, kv_scale)
        b_rope = tl.div_rn(b_rope, kv_scale)
    tl.store(p_row + o_l, _stored(b_latent, kv_ptr.dtype.element_ty, LARGEST), mask=o_l < LATENT)
    tl.store(p_row + LATENT + o_p, _stored(b_rope, kv_ptr.dtype.element_ty, LARGEST), mask=o_p < ROPE)


@triton.jit
def _stored(b_x, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    """`b_x` in the dtype of the cache; where it has a largest number, greater ones become that. NaN stays NaN."""
    if LARGEST > 0:
        b_x = tl.where(b_x > LARGEST, LARGEST, b_x)
        b_x = tl.where(b_x < -LARGEST, -LARGEST, b_x)
    return b_x.to(DTYPE)


@portable(mla.mla_cache_write)
def mla_cache_write(
    latent: Tensor, k_rope: Tensor, slot_mapping: Tensor, kv_cache: Tensor, *, kv_scale: Tensor | None = None
) -> None:
    tokens, width = latent.shape
    rope = k_rope.shape[1]
    if tokens * kv_cache.numel() == 0:
        return
    _write[(tokens,)](
        latent, k_rope, slot_mapping, kv_cache, kv_scale, latent.stride(0), k_rope.stride(0), *kv_cache.stride()[:2],
        width, rope, kv_cache.shape[1], 448.0 if kv_cache.dtype == torch.float8_e4m3fn else 0.0,
        triton.next_power_of_2(max(width, 1)), triton.next_power_of_2(max(rope, 1)), num_warps=1 if width <= 512 else 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "seqs", "max_pages"])
def _read(
    kv_ptr,  # [pages, PAGE, QK], contiguous in the last
    table_ptr,  # [seqs, max_pages]
    offsets_ptr,  # [seqs + 1]
    first_ptr,  # [seqs] or None
    kv_scale_ptr,  # [1] or None
    o_ptr,  # [rows, QK]
    page_stride,
    row_stride,
    max_pages,
    seqs,
    rows,
    PAGE: tl.constexpr,
    QK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = o_r < rows
    # The last sequence that starts at or before the row: those of no rows come before it.
    low = tl.zeros([BLOCK_R], tl.int32)
    high = low + seqs
    width = seqs
    while width > 1:
        middle = (low + high) // 2
        before = tl.load(offsets_ptr + middle) <= o_r
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
        width = (width + 1) // 2
    position = o_r - tl.load(offsets_ptr + low)
    if first_ptr is not None:
        position += tl.load(first_ptr + low)
    p_entry = table_ptr + low.to(tl.int64) * max_pages + position // PAGE
    entry = tl.load(p_entry, mask=inside, other=-1).to(tl.int64)
    p_row = kv_ptr + entry * page_stride + (position % PAGE).to(tl.int64) * row_stride
    live = (inside & (entry >= 0))[:, None] & (o_d < QK)[None, :]
    b_row = tl.load(p_row[:, None] + o_d[None, :], mask=live, other=0.0).to(tl.float32)  # [BR, BD]
    if kv_scale_ptr is not None:
        b_row *= tl.load(kv_scale_ptr)
    p_o = o_ptr + o_r.to(tl.int64)[:, None] * QK + o_d[None, :]
    tl.store(p_o, b_row.to(o_ptr.dtype.element_ty), mask=inside[:, None] & (o_d < QK)[None, :])


@portable(mla_forms.mla_cache_read)
def mla_cache_read(
    kv_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    first: Tensor | None = None,
    *,
    rows: int,
    dtype: torch.dtype,
    kv_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    page, qk = kv_cache.shape[1:]
    cached = torch.empty(rows, qk, dtype=dtype, device=kv_cache.device) if out is None else out
    if cached.numel():
        width = min(triton.next_power_of_2(qk), 1024)
        height = 4096 // width
        _read[(-(-rows // height), -(-qk // width))](
            kv_cache, page_table, cu_seqlens, first, kv_scale, cached, *kv_cache.stride()[:2],
            page_table.shape[1], page_table.shape[0], rows, page, qk, height, width,
        )  # fmt: skip
    return cached
