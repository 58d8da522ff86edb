"""MLA decode: attention over the paged latent cache in the absorbed form, split over the keys.

A program of `attend` takes one tile of query rows (heads x new tokens of one sequence) and one run of the sequence's
keys. How many runs there are follows from shapes alone; a sequence is cut into runs of equal size by its own length,
and those that have no keys exit at once. A second kernel adds the runs in their order. With one run there is none.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenspeed_kernels import mla
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.device import bucket, compute_units, interpreted, platform_for
from tokenspeed_kernels.triton.mla_decode_attend import attend, run_size
from tokenspeed_kernels.triton.tuning import Config, Dims, Tunable
from tokenspeed_registry import Dim
from tokenspeed_registry.platform import Platform


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
    written = tl.cdiv(length, tl.maximum(run_size(length, splits, BLOCK_N), 1))
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
        return [*plain, _config(16, 64, 8, 3), *(_config(16, *tile, 3, True) for tile in ((32, 4), (64, 4), (64, 8)))]
    plain = [_config(64, 64, 8, 2), _config(64, 32, 8, 3), _config(32, 32, 8, 2), _config(32, 32, 4, 1)]
    return [*plain, _config(64, 64, 8, 2, True), _config(64, 32, 8, 3, True), _config(16, 64, 4, 3)]


def _default(platform: Platform, dims: Dims) -> Config:
    few, converted = dims["rows"] <= 16, dims["cached_bytes"] == 1
    if dims["bytes"] > 2 or dims["latent"] > 512:
        return _config(16, 16, 4, 1)
    if platform.vendor == "amd":
        return _config(16 if few else 32, 32, 4, 1)
    blackwell = "tensor_memory" in platform.features  # whose traffic takes the registers that the sum of 64 rows needs
    if converted and (few or blackwell):
        return _config(16, 64, 8, 3, True)
    if few:  # spills 40 bytes under Triton 3.9, and pays: 8 warps, which spill none, take 8 percent longer on H200
        return _config(16, 64, 4, 3)
    return _config(32, 32, 8, 2) if blackwell else _config(64, 64, 8, 2, not converted)


def _config(rows: int, tile: int, warps: int, stages: int, descriptors: bool = False) -> Config:
    tiles = {"BLOCK_R": rows, "BLOCK_N": tile, "DESCRIPTORS": descriptors}
    return {**tiles, "num_warps": warps, "num_stages": stages}


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


@portable(mla.mla_decode, constraints=[Dim("page") >= 1])
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
    if config["BLOCK_R"] == 16 and kv_cache.dtype == torch.float8_e4m3fn and compute == torch.bfloat16:
        # Devices convert to it faster. Where more rows go to asynchronous matrix units, converted queries would lie in
        # the registers that the sum needs.
        compute = torch.float16
    tile, groups = config["BLOCK_N"], -(-rows // config["BLOCK_R"])
    together = 2 if config["BLOCK_R"] * tile <= 512 else 1  # programs that share a compute unit
    splits = choose_splits(batch * groups, -(-max_pages * page // tile), together * compute_units(q.device))
    part, part_lse = attended, lse
    if splits > 1:
        part = torch.empty(batch, splits, rows, latent, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(batch, splits, rows, dtype=torch.float32, device=q.device)
    config, latents, ropes = _described(config, kv_cache, latent, max_pages * page // splits)
    overlap = "programmatic_launch" in platform_for(q.device).features and not interpreted()
    attend[(batch * splits * groups,)](
        q, kv_cache, latents, ropes, page_table, seq_lens, kv_scale, part, part_lse,
        *kv_cache.stride()[:2], kv_cache.stride(0) // max(kv_cache.stride(1), 1), max_pages, splits, scale,
        heads, q_len, qk, latent, page, _TRITON[compute],
        max(triton.next_power_of_2(latent), 16), max(triton.next_power_of_2(qk - latent), 16), PDL=overlap, **config,
    )  # fmt: skip
    if splits > 1:
        # Starts while the last runs are written, and waits for them.
        early = {"PDL": True, "launch_pdl": True} if overlap else {"PDL": False}
        width = min(triton.next_power_of_2(latent), 64)
        _combine[(batch * rows, -(-latent // width))](
            part, part_lse, seq_lens, attended, lse, splits, rows, latent, tile, width, min(bucket(splits), 64),
            num_warps=2 if splits > 16 else 1, **early,
        )  # fmt: skip
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
