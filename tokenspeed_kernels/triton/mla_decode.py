"""MLA decode: attention over the paged latent cache in the absorbed form, split over the keys.

A program takes one tile of query rows (heads x new tokens of one sequence) and one run of the sequence's keys. Every
tile of keys is read once, and serves as keys and as values: latents are both, rotated keys only the former.

How many runs there are follows from shapes alone; a sequence is cut into runs of equal size by its own length, and
those that have no keys exit at once. A second kernel adds the runs in their order. With one run there is none.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenspeed_kernels import mla
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket, compute_units, interpreted, platform_for
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry.platform import Platform


@triton.jit
def _run_size(length, splits, BLOCK_N: tl.constexpr):
    """Keys of each run of a sequence: whole tiles, so that all but the last run are full."""
    return tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N


@triton.jit
def _step(
    b_o,  # [BR, BL]
    b_max,  # [BR]
    b_sum,  # [BR]
    b_q,  # [BR, BL]
    b_qp,  # [BR, BP]
    b_kv,  # [BN, BL]
    b_kp,  # [BN, BP]
    log2_scale,
    i_key,
    b_visible,  # [BR]
    all_visible,
    last_visible,
    ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the keys from `i_key` on to the running softmax: of each row those before its `b_visible`. Before
    `all_visible` no row has a hidden one, from `last_visible` on every row has."""
    # Asynchronous matrix units lay out a product that feeds another so that all warps compute the same scores. So the
    # two parts are scaled before they are added, and masks, which few tiles need, stand in a branch.
    b_s = tl.dot(b_q, tl.trans(b_kv), input_precision="ieee") * log2_scale  # [BR, BN]
    if ROPE > 0:
        b_s += tl.dot(b_qp, tl.trans(b_kp), input_precision="ieee") * log2_scale
    if i_key + BLOCK_N > all_visible:
        o_key = i_key + tl.arange(0, BLOCK_N)
        b_s = tl.where(o_key[None, :] < b_visible[:, None], b_s, float("-inf"))
    # Always so, but a branch is placed after the loads of the next keys, which then have until its end to arrive.
    live = i_key < last_visible if BLOCK_R >= 64 else True
    if live:
        b_top = tl.maximum(b_max, tl.max(b_s, 1))
        # A row that has seen no key yet: its weights are exp2(-inf - 0).
        b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_decay = tl.exp2(b_max - b_base)
        b_w = tl.exp2(b_s - b_base[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_w, 1)
        b_max = b_top
        b_o = tl.dot(b_w.to(b_kv.dtype), b_kv, b_o * b_decay[:, None], input_precision="ieee")
    return b_o, b_max, b_sum


@triton.jit(do_not_specialize=["splits", "max_pages"])
def _attend(
    q_ptr,  # [batch, rows, QK]
    kv_ptr,  # [pages, PAGE, QK], contiguous in the last
    latent_ptr,  # descriptor of the cache's rows [rows, QK], of tiles [BLOCK_N, BLOCK_L]; None without DESCRIPTORS
    rope_ptr,  # the same, of tiles [BLOCK_N, BLOCK_P]
    table_ptr,  # [batch, max_pages]
    length_ptr,  # [batch]
    kv_scale_ptr,  # [1] or None
    o_ptr,  # [batch, splits, rows, LATENT]
    lse_ptr,  # [batch, splits, rows]
    page_stride,
    row_stride,
    page_rows,
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
    DESCRIPTORS: tl.constexpr,
    PDL: tl.constexpr,
):
    ONE_PAGE: tl.constexpr = PAGE % BLOCK_N == 0
    # Behind descriptors less than a tile is left: small tiles spare the registers of their addresses.
    TAIL_N: tl.constexpr = 16 if DESCRIPTORS else BLOCK_N
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
    o_l = tl.arange(0, BLOCK_L)
    o_p = LATENT + tl.arange(0, BLOCK_P)
    b_visible = length - Q_LEN + 1 + o_r // HEADS
    p_q = q_ptr + (i_batch * ROWS + o_r[:, None]) * QK
    inside = (o_r < ROWS)[:, None]
    b_q = tl.load(p_q + o_l[None, :], mask=inside & (o_l < LATENT)[None, :], other=0.0).to(COMPUTE)  # [BR, BL]
    b_qp = b_q
    if QK > LATENT:
        b_qp = tl.load(p_q + o_p[None, :], mask=inside & (o_p < QK)[None, :], other=0.0).to(COMPUTE)  # [BR, BP]
    kv_scale = 1.0
    if kv_scale_ptr is not None:
        kv_scale = tl.load(kv_scale_ptr)
    log2_scale = scale * kv_scale * 1.4426950408889634

    b_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_R], tl.float32)
    b_o = tl.zeros([BLOCK_R, BLOCK_L], tl.float32)

    p_table = table_ptr + i_batch * max_pages
    all_visible = length - Q_LEN + 1
    last_visible = all_visible + tl.minimum(i_group * BLOCK_R + BLOCK_R - 1, ROWS - 1) // HEADS
    followed = start
    if DESCRIPTORS:  # whole tiles: rows past the end may hold NaN, which no weight of zero would hide
        followed = start + tl.maximum(end - start, 0) // BLOCK_N * BLOCK_N
        b_page = tl.load(p_table + start // PAGE, mask=start < followed, other=0)
        for i_key in range(start, followed, BLOCK_N):
            i_row = b_page * page_rows + i_key % PAGE
            i_next = i_key + BLOCK_N
            b_page = tl.load(p_table + i_next // PAGE, mask=i_next < followed, other=0)
            b_kv = latent_ptr.load([i_row, 0]).to(COMPUTE)  # [BN, BL]
            b_kp = rope_ptr.load([i_row, LATENT]).to(COMPUTE)  # [BN, BP]
            b_o, b_max, b_sum = _step(
                b_o, b_max, b_sum, b_q, b_qp, b_kv, b_kp, log2_scale, i_key, b_visible, all_visible, last_visible,
                QK - LATENT, BLOCK_R, BLOCK_N,
            )  # fmt: skip
    o_n = tl.arange(0, TAIL_N)
    if ONE_PAGE:
        b_page = tl.load(p_table + followed // PAGE, mask=followed < end, other=0)
    for i_key in tl.range(followed, end, TAIL_N, num_stages=4 if DESCRIPTORS else None):
        o_key = i_key + o_n
        live = (o_key < end)[:, None]
        if ONE_PAGE:
            p_kv = kv_ptr + b_page.to(tl.int64) * page_stride + o_n.to(tl.int64)[:, None] * row_stride
            p_kv += tl.cast(i_key % PAGE, tl.int64) * row_stride
            i_next = i_key + TAIL_N
            b_page = tl.load(p_table + i_next // PAGE, mask=i_next < end, other=0)
        else:
            pages = tl.load(p_table + o_key // PAGE, mask=o_key < end, other=0).to(tl.int64)
            p_kv = kv_ptr + (pages * page_stride + (o_key % PAGE).to(tl.int64) * row_stride)[:, None]
        if BLOCK_L == LATENT:
            b_kv = tl.load(p_kv + o_l[None, :], mask=live, other=0.0).to(COMPUTE)  # [BN, BL]
        else:
            b_kv = tl.load(p_kv + o_l[None, :], mask=live & (o_l < LATENT)[None, :], other=0.0).to(COMPUTE)
        b_kp = b_kv
        if BLOCK_P == QK - LATENT:
            b_kp = tl.load(p_kv + o_p[None, :], mask=live, other=0.0).to(COMPUTE)  # [BN, BP]
        elif QK > LATENT:
            b_kp = tl.load(p_kv + o_p[None, :], mask=live & (o_p < QK)[None, :], other=0.0).to(COMPUTE)
        b_o, b_max, b_sum = _step(
            b_o, b_max, b_sum, b_q, b_qp, b_kv, b_kp, log2_scale, i_key, b_visible, all_visible, last_visible,
            QK - LATENT, BLOCK_R, TAIL_N,
        )  # fmt: skip

    if PDL:
        gdc_launch_dependents()
    b_norm = tl.where(b_sum > 0, kv_scale / b_sum, 0.0)
    b_lse = tl.where(b_sum > 0, (b_max + tl.log2(b_sum)) * 0.6931471805599453, float("-inf"))
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
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
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
    if dims["bytes"] > 2 or dims["latent"] > 512:
        return [_config(16, 16, 4, 1), _config(16, 32, 4, 1), _config(32, 32, 8, 1)]
    if dims["rows"] <= 16:
        plain = [_config(16, tile, 4, stages) for tile in (32, 64) for stages in (1, 2, 3)]
        return [*plain, _config(16, 64, 8, 3), _config(16, 32, 4, 3, True)]
    plain = [_config(64, 64, 8, 2), _config(64, 32, 8, 3), _config(32, 32, 8, 2), _config(32, 32, 4, 1)]
    return [*plain, _config(64, 64, 8, 2, True), _config(64, 32, 8, 3, True), _config(16, 64, 4, 3)]


def _default(platform: Platform, dims: Dims) -> Config:
    few = dims["rows"] <= 16
    if dims["bytes"] > 2 or dims["latent"] > 512:
        return _config(16, 16, 4, 1)
    if platform.vendor == "amd":
        return _config(16 if few else 32, 32, 4, 1)
    if few:
        return _config(16, 32, 4, 3, True) if dims["cached_bytes"] == 1 else _config(16, 64, 4, 3)
    if "tensor_memory" in platform.features:  # whose traffic takes the registers that the sum of 64 rows needs
        return _config(32, 32, 8, 2) if dims["cached_bytes"] > 1 else _config(16, 32, 4, 3, True)
    return _config(64, 64, 8, 2, dims["cached_bytes"] > 1)


def _config(rows: int, tile: int, warps: int, stages: int, descriptors: bool = False) -> Config:
    return {
        "BLOCK_R": rows,
        "BLOCK_N": tile,
        "DESCRIPTORS": descriptors,
        "num_warps": warps,
        "num_stages": stages,
    }


ATTEND = Tunable("mla_decode", space=_space, default=_default)


@cache
def choose_splits(programs: int, tiles: int, units: int) -> int:
    """Into how many runs to cut the keys, where `programs` share each run, the longest sequence has `tiles` tiles, and
    `units` programs run at a time.

    Counts time in tiles: waves of programs, each of which also loads its queries and writes its result, and the second
    kernel.
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
    config = ATTEND.pick(
        q.device,
        rows=min(bucket(rows), 64),
        latent=latent,
        bytes=compute.itemsize,
        cached_bytes=kv_cache.element_size(),
    )
    tile, groups = config["BLOCK_N"], -(-rows // config["BLOCK_R"])
    together = 2 if config["BLOCK_R"] * tile <= 512 else 1  # programs that share a compute unit
    splits = choose_splits(batch * groups, -(-max_pages * page // tile), together * compute_units(q.device))
    part, part_lse = attended, lse
    if splits > 1:
        part = torch.empty(batch, splits, rows, latent, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(batch, splits, rows, dtype=torch.float32, device=q.device)
    config, latents, ropes = _described(config, kv_cache, latent, max_pages * page // splits)
    overlap = "programmatic_launch" in platform_for(q.device).features and not interpreted()
    _attend[(batch * splits * groups,)](
        q,
        kv_cache,
        latents,
        ropes,
        page_table,
        seq_lens,
        kv_scale,
        part,
        part_lse,
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(0) // max(kv_cache.stride(1), 1),
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
        PDL=overlap,
        **config,
    )
    if splits > 1:
        # Starts while the last runs are written, and waits for them.
        early = {"PDL": True, "launch_pdl": True} if overlap else {"PDL": False}
        width = min(triton.next_power_of_2(latent), 64)
        _combine[(batch * rows, -(-latent // width))](
            part,
            part_lse,
            seq_lens,
            attended,
            lse,
            splits,
            rows,
            latent,
            tile,
            width,
            min(bucket(splits), 64),
            num_warps=2 if splits > 16 else 1,
            **early,
        )
    return attended, lse


def _described(config: Config, kv_cache: Tensor, latent: int, run: int) -> tuple[Config, Any, Any]:
    """Descriptors of the cache's rows for latents and rotated keys, where the config wants them, the cache fits, and
    runs are so long that the fetch of a descriptor pays."""
    pages, page, qk = kv_cache.shape
    rope, tile, bytes_ = qk - latent, config["BLOCK_N"], kv_cache.element_size()
    page_stride, row_stride, _ = kv_cache.stride()
    rows = (pages - 1) * (page_stride // max(row_stride, 1)) + page
    fits = (
        config["DESCRIPTORS"]
        and run > 8 * tile
        and page % tile == 0
        and 0 < rows < 1 << 31
        and latent == triton.next_power_of_2(latent)
        and rope == triton.next_power_of_2(max(rope, 1))
        and min(latent, rope) >= 16
        and row_stride * bytes_ % 16 == 0
        and page_stride % max(row_stride, 1) == 0
        and kv_cache.data_ptr() % 16 == 0
    )
    if not fits:
        return {**config, "DESCRIPTORS": False}, None, None
    return (
        config,
        TensorDescriptor(kv_cache, [rows, qk], [row_stride, 1], [tile, latent]),
        TensorDescriptor(kv_cache, [rows, qk], [row_stride, 1], [tile, rope]),
    )


_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
