"""MLA decode: attention over the paged latent cache in the absorbed form, split over the keys.

A program takes one tile of query rows (heads x new tokens of one sequence) and one run of the sequence's keys. Every
tile of keys is read once, and serves as keys and as values. Where rows are few, products are laid with the keys, then
the latent, on the long side of the matrix units (`KEYS_FIRST`): Sᵀ = K·Qᵀ and Oᵀ = Vᵀ·Pᵀ waste nothing on padding.

How many runs there are follows from shapes alone; a sequence is cut into runs of equal size by its own length, and
those that have no keys exit at once. A second kernel adds the runs in their order. With one run there is none.
"""

from collections.abc import Iterable
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import mla
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket, compute_units
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


@triton.jit
def _run_size(length, splits, BLOCK_N: tl.constexpr):
    """Keys of each run of a sequence: whole tiles, so that all but the last run are full."""
    return tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["splits", "max_pages"])
def _attend(
    q_ptr,  # [batch, rows, QK]
    kv_ptr,  # [pages, PAGE, QK], contiguous in the last
    table_ptr,  # [batch, max_pages]
    length_ptr,  # [batch]
    kv_scale_ptr,  # [1] or None
    o_ptr,  # [batch, splits, rows, LATENT]
    lse_ptr,  # [batch, splits, rows]
    page_stride,
    row_stride,
    max_pages,
    splits,
    scale,
    HEADS: tl.constexpr,
    Q_LEN: tl.constexpr,
    QK: tl.constexpr,
    LATENT: tl.constexpr,
    PAGE: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    ROWS: tl.constexpr = HEADS * Q_LEN
    GROUPS: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    # Row groups of one run are neighbours: they read the same keys, through the L2 cache.
    i_group = tl.program_id(0) % GROUPS
    i_split = tl.program_id(0) // GROUPS % splits
    i_batch = (tl.program_id(0) // GROUPS // splits).to(tl.int64)
    length = tl.load(length_ptr + i_batch)
    run = _run_size(length, splits, BLOCK_N)
    start = i_split * run
    end = tl.minimum(start + run, length)
    if (i_split > 0) & (start >= length):
        return

    o_r = i_group * BLOCK_R + tl.arange(0, BLOCK_R)
    o_n = tl.arange(0, BLOCK_N)
    o_l = tl.arange(0, BLOCK_L)
    o_p = LATENT + tl.arange(0, BLOCK_P)
    b_visible = length - Q_LEN + 1 + o_r // HEADS
    p_q = q_ptr + (i_batch * ROWS + o_r[:, None]) * QK
    inside = (o_r < ROWS)[:, None]
    b_q = tl.load(p_q + o_l[None, :], mask=inside & (o_l < LATENT)[None, :], other=0.0).to(COMPUTE)  # [BR, BL]
    if QK > LATENT:
        b_qp = tl.load(p_q + o_p[None, :], mask=inside & (o_p < QK)[None, :], other=0.0).to(COMPUTE)  # [BR, BP]
    kv_scale = 1.0
    if kv_scale_ptr is not None:
        kv_scale = tl.load(kv_scale_ptr)
    log2_scale = scale * kv_scale * 1.4426950408889634

    AXIS: tl.constexpr = 0 if KEYS_FIRST else 1
    b_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_R], tl.float32)
    if KEYS_FIRST:
        b_o = tl.zeros([BLOCK_L, BLOCK_R], tl.float32)
    else:
        b_o = tl.zeros([BLOCK_R, BLOCK_L], tl.float32)

    p_table = table_ptr + i_batch * max_pages
    ONE_PAGE: tl.constexpr = PAGE % BLOCK_N == 0
    b_page = tl.load(p_table + start // PAGE, mask=start < end, other=0)
    p_row = kv_ptr + o_n.to(tl.int64)[:, None] * row_stride
    for i_key in range(start, end, BLOCK_N):
        live = (i_key + o_n < end)[:, None]
        if ONE_PAGE:
            p_kv = p_row + (b_page.to(tl.int64) * page_stride + tl.cast(i_key % PAGE, tl.int64) * row_stride)
            following = i_key + BLOCK_N
            b_page = tl.load(p_table + following // PAGE, mask=following < end, other=0)
        else:
            o_key = i_key + o_n
            pages = tl.load(p_table + o_key // PAGE, mask=o_key < end, other=0).to(tl.int64)
            p_kv = kv_ptr + (pages * page_stride + (o_key % PAGE).to(tl.int64) * row_stride)[:, None]
        # Rows past the end may hold NaN, which no weight of zero would hide.
        if BLOCK_L == LATENT:
            b_kv = tl.load(p_kv + o_l[None, :], mask=live, other=0.0).to(COMPUTE)  # [BN, BL]
        else:
            b_kv = tl.load(p_kv + o_l[None, :], mask=live & (o_l < LATENT)[None, :], other=0.0).to(COMPUTE)
        if QK > LATENT:
            if BLOCK_P == QK - LATENT:
                b_kp = tl.load(p_kv + o_p[None, :], mask=live, other=0.0).to(COMPUTE)  # [BN, BP]
            else:
                b_kp = tl.load(p_kv + o_p[None, :], mask=live & (o_p < QK)[None, :], other=0.0).to(COMPUTE)

        if KEYS_FIRST:
            b_s = tl.dot(b_kv, tl.trans(b_q), input_precision="ieee")  # [BN, BR]
            if QK > LATENT:
                b_s = tl.dot(b_kp, tl.trans(b_qp), b_s, input_precision="ieee")
            seen = (i_key + o_n)[:, None] < b_visible[None, :]
        else:
            b_s = tl.dot(b_q, tl.trans(b_kv), input_precision="ieee")  # [BR, BN]
            if QK > LATENT:
                b_s = tl.dot(b_qp, tl.trans(b_kp), b_s, input_precision="ieee")
            seen = (i_key + o_n)[None, :] < b_visible[:, None]
        b_s = tl.where(seen, b_s * log2_scale, float("-inf"))
        b_top = tl.maximum(b_max, tl.max(b_s, AXIS))
        # A row that has seen no key yet: its weights are exp2(-inf - 0).
        b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_decay = tl.exp2(b_max - b_base)
        b_w = tl.exp2(b_s - tl.expand_dims(b_base, AXIS))
        b_sum = b_sum * b_decay + tl.sum(b_w, AXIS)
        b_max = b_top
        if KEYS_FIRST:
            b_o = tl.dot(tl.trans(b_kv), b_w.to(COMPUTE), b_o * b_decay[None, :], input_precision="ieee")
        else:
            b_o = tl.dot(b_w.to(COMPUTE), b_kv, b_o * b_decay[:, None], input_precision="ieee")

    b_norm = tl.where(b_sum > 0, kv_scale / b_sum, 0.0)
    b_lse = tl.where(b_sum > 0, (b_max + tl.log2(b_sum)) * 0.6931471805599453, float("-inf"))
    if KEYS_FIRST:
        b_o = tl.trans(b_o * b_norm[None, :])
    else:
        b_o = b_o * b_norm[:, None]
    o_row = (i_batch * splits + i_split) * ROWS + o_r
    tl.store(lse_ptr + o_row, b_lse, mask=o_r < ROWS)
    p_o = o_ptr + o_row[:, None] * LATENT + o_l[None, :]
    tl.store(p_o, b_o.to(o_ptr.dtype.element_ty), mask=inside & (o_l < LATENT)[None, :])


@triton.jit(do_not_specialize=["splits"])
def _combine(
    part_ptr,  # [batch, splits, ROWS, LATENT]
    part_lse_ptr,  # [batch, splits, ROWS]
    length_ptr,  # [batch]
    o_ptr,  # [batch, ROWS, LATENT]
    lse_ptr,  # [batch, ROWS]
    splits,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    i_row = tl.program_id(0) % ROWS
    i_batch = (tl.program_id(0) // ROWS).to(tl.int64)
    o_l = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    o_s = tl.arange(0, BLOCK_S)
    length = tl.load(length_ptr + i_batch)
    written = tl.cdiv(length, tl.maximum(_run_size(length, splits, BLOCK_N), 1))
    b_max = -float("inf")
    b_sum = 0.0
    b_o = tl.zeros([BLOCK_L], tl.float32)
    for i_split in range(0, written, BLOCK_S):
        live = i_split + o_s < written
        o_row = (i_batch * splits + i_split + o_s) * ROWS + i_row
        b_lse = tl.load(part_lse_ptr + o_row, mask=live, other=float("-inf"))
        p_part = part_ptr + o_row[:, None] * LATENT + o_l[None, :]
        b_part = tl.load(p_part, mask=live[:, None] & (o_l < LATENT)[None, :], other=0.0)  # [BS, BL]
        b_top = tl.maximum(b_max, tl.max(b_lse, 0))
        b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_w = tl.exp(b_lse - b_base)
        b_decay = tl.exp(b_max - b_base)
        b_sum = b_sum * b_decay + tl.sum(b_w, 0)
        b_o = b_o * b_decay + tl.sum(b_part * b_w[:, None], 0)
        b_max = b_top
    b_o = tl.where(b_sum > 0, b_o / b_sum, 0.0)
    o_row = i_batch * ROWS + i_row
    tl.store(o_ptr + o_row * LATENT + o_l, b_o.to(o_ptr.dtype.element_ty), mask=o_l < LATENT)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + o_row, tl.where(b_sum > 0, b_max + tl.log(b_sum), float("-inf")))


def _space(dims: Dims) -> Iterable[Config]:
    rows = min(max(bucket(dims["rows"]), 16), 64)
    if dims["bytes"] > 2:
        return [_config(rows, 16, False, 4, 1), _config(rows, 32, False, 4, 1), _config(rows, 32, False, 8, 1)]
    return [
        _config(rows, tile, keys_first, warps, stages)
        for keys_first in (False, True)
        for tile in (32, 64)
        for warps in (4, 8)
        for stages in (2, 3)
        if not (stages == 3 and tile == 64) and not (warps == 4 and rows == 64)
    ]


def _default(platform: Platform, dims: Dims) -> Config:
    rows = min(max(bucket(dims["rows"]), 16), 64)
    if dims["bytes"] > 2:
        return _config(16, 16, False, 4, 1)
    if platform.vendor == "amd":
        return _config(rows, 32, False, 4, 1)
    return _config(rows, 64, rows < 64, 4 if rows == 16 else 8, 2)


def _config(rows: int, tile: int, keys_first: bool, warps: int, stages: int) -> Config:
    return {
        "BLOCK_R": rows,
        "BLOCK_N": tile,
        "KEYS_FIRST": keys_first,
        "num_warps": warps,
        "num_stages": stages,
    }


ATTEND = Tunable("mla_decode", space=_space, default=_default)


@cache
def choose_splits(programs: int, tiles: int, units: int) -> int:
    """Into how many runs to cut the keys: `programs` run per run, `tiles` are the tiles of the longest sequence.

    Counts time in tiles: full waves of programs, each of which also loads its queries and writes its result, and the
    second kernel.
    """

    def time(splits: int) -> float:
        waves = -(-programs * splits // units)
        return waves * (-(-tiles // splits) + 2) + (2 + splits / 64 if splits > 1 else 0)

    most = max(min(tiles, 4 * units // max(programs, 1)), 1)
    return min(range(1, most + 1), key=time)


@portable(mla.mla_decode)
def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    latent: int,
    scale: float,
    kv_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    batch, q_len, heads, qk = q.shape
    page, max_pages = kv_cache.shape[1], page_table.shape[1]
    rows = q_len * heads
    attended, lse = out or (
        torch.empty(batch, q_len, heads, latent, dtype=q.dtype, device=q.device),
        torch.empty(batch, q_len, heads, dtype=torch.float32, device=q.device),
    )
    if batch * rows == 0:
        return attended, lse
    same = kv_cache.dtype in (q.dtype, torch.float8_e4m3fn)
    compute = q.dtype if same else torch.float32
    config = ATTEND.pick(q.device, rows=min(bucket(rows), 64), latent=latent, bytes=compute.itemsize)
    tile, groups = config["BLOCK_N"], -(-rows // config["BLOCK_R"])
    splits = choose_splits(batch * groups, -(-max_pages * page // tile), compute_units(q.device))
    part, part_lse = attended, lse
    if splits > 1:
        part = torch.empty(batch, splits, rows, latent, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(batch, splits, rows, dtype=torch.float32, device=q.device)
    _attend[(batch * splits * groups,)](
        q,
        kv_cache,
        page_table,
        seq_lens,
        kv_scale,
        part,
        part_lse,
        kv_cache.stride(0),
        kv_cache.stride(1),
        max_pages,
        splits,
        scale,
        heads,
        q_len,
        qk,
        latent,
        page,
        _TRITON[compute],
        max(triton.next_power_of_2(latent), 16),
        max(triton.next_power_of_2(qk - latent), 16),
        **config,
    )
    if splits > 1:
        width = min(triton.next_power_of_2(latent), 128)
        _combine[(batch * rows, -(-latent // width))](
            part, part_lse, seq_lens, attended, lse, splits, rows, latent, tile, width, min(bucket(splits), 32)
        )
    return attended, lse


_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
