"""MLA decode on Hopper for at most 64 query rows (heads x new tokens): one launch, planned on the device.

See decode_few.cu.
"""

import torch
from torch import Tensor

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.counters import counters
from tokenspeed_cuda.declare import tuned
from tokenspeed_cuda.tensor_map import TensorMap, tensor_map
from tokenspeed_kernels import mla
from tokenspeed_kernels.triton.device import bucket, compute_units
from tokenspeed_registry import Alignment, Dim, Kernel

CODE = Code(__file__, "decode_few.cu")
LATENT, QK, TILE = 512, 576, 64


def _mla_decode(
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
    batch, q_len, heads, _ = q.shape
    page, max_pages = kv_cache.shape[1], page_table.shape[1]
    attended, lse = out or (
        torch.empty(batch, q_len, heads, LATENT, dtype=q.dtype, device=q.device),
        torch.empty(batch, q_len, heads, dtype=torch.float32, device=q.device),
    )
    if batch * q_len * heads == 0:
        return attended, lse
    narrow = heads * q_len <= 16
    rows = 16 if narrow else 64
    tiles = batch * max(-(-max_pages * page // TILE), 1)
    blocks = min(_blocks(compute_units(q.device), batch), tiles)
    parts = torch.empty(2 * blocks, rows, LATENT, dtype=torch.float16, device=q.device)
    states = torch.empty(2 * blocks, 8 if narrow else 2, rows, 2, dtype=torch.float32, device=q.device)
    fp8 = kv_cache.dtype == torch.float8_e4m3fn
    queries = _boxes(q.view(1, -1, QK))
    entry = CODE.entry("mla_decode_few", q.device, HEADS=heads, Q_LEN=q_len, PAGE=page, FP8=int(fp8))
    entry(
        blocks, 384 if narrow else 512, queries, _boxes(kv_cache) if kv_cache.shape[0] else queries,
        page_table, seq_lens, kv_scale, attended, lse, parts, states, counters(q.device, max(bucket(batch), 256)),
        batch, max_pages, float(scale),
        shared=_shared_bytes(rows, narrow, fp8), pdl=True,
    )  # fmt: skip
    return attended, lse


def _blocks(units: int, batch: int) -> int:
    """Blocks to deal tiles out to: where that idles few units, as many for each sequence, so that sequences of one
    length end where blocks do."""
    even = units // batch * batch
    return even if 20 * even >= 19 * units else units


def _shared_bytes(rows: int, narrow: bool, fp8: bool) -> int:
    """Of `Shared` in few_parts.cuh, with its alignment."""
    stages, parts = (5 if narrow else 2, 1) if fp8 else (2, 1 if narrow else 4)
    keys = stages * TILE * QK * (1 if fp8 else 2) + (TILE * QK * 2 if fp8 and not narrow else 0)
    queries, weights, numbers = rows * QK * 2, rows * TILE * 2, rows * 20 + (rows if narrow else 1) * 64
    return keys + queries + weights + numbers + 8 * (stages * (1 + parts) + 9) + 1024


def _boxes(cache: Tensor) -> TensorMap:
    """Boxes of eight rows, in which the slices of 64 numbers follow one another."""
    pages, page, _ = cache.shape
    if pages == 1:  # the stride may be anything
        cache = cache.as_strided(cache.shape, (page * cache.stride(1), *cache.stride()[1:]))
    return tensor_map(
        cache.view(pages, page, QK // 64, 64).transpose(1, 2), (1, QK // 64, 8, 64), 64 * cache.itemsize, 128
    )


def _declared(least_heads: int, most_heads: int) -> Kernel:
    return tuned(
        mla.mla_decode,
        CODE,
        name=f"cuda.mla_decode_few_{most_heads}",
        dtypes={"q": [torch.bfloat16], "kv_cache": [torch.bfloat16, torch.float8_e4m3fn]},
        constraints=[
            Dim("heads") >= least_heads,
            Dim("heads") <= most_heads,
            Dim("q_len") <= 64 // most_heads,
            Dim("qk").in_(QK),
            Dim("latent").in_(LATENT),
            Dim("page").multiple_of(8),
            Alignment("q") >= 16,
            Alignment("kv_cache") >= 16,
        ],
    )(_mla_decode)


mla_decode_few_8 = _declared(0, 8)
mla_decode_few_16 = _declared(9, 16)
mla_decode_few_32 = _declared(17, 32)
mla_decode_few_64 = _declared(33, 64)
