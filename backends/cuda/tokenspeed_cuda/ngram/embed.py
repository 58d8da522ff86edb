"""Hashes of n-grams and the table rows that they name, in one launch: the idea is in `embed.cu`."""

from ctypes import c_int64

import torch
from torch import Tensor

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.declare import tuned
from tokenspeed_kernels import ngram
from tokenspeed_registry import Alignment, Dim, Flag, OnHost
from tokenspeed_registry.constraints import Constraint

CODE = Code(__file__, "embed.cu")
_ARCHS = ("sm_90a", "sm_100a", "sm_103a")
_TABLES = {"table": [torch.float8_e4m3fn, torch.bfloat16]}
_PAIRS = {128: 1, 1024: 2, 65536: 16}
"""Of a token and a head, that a warp takes, by the most pairs of a call."""
_HOST_BLOCKS = 16
"""Enough for the rate of the link, and few enough to leave most multiprocessors to other work."""


def _limits(on_host: bool) -> list[Constraint]:
    return [
        Dim("dim").multiple_of(8),
        Dim("order") <= 4,
        Alignment("table") >= 16,
        Flag("dtype").in_(torch.bfloat16),
        OnHost("table").in_(on_host),
    ]


@tuned(ngram.ngram_embed, CODE, archs=_ARCHS, dtypes=_TABLES, constraints=_limits(False))
def ngram_embed(
    ids: Tensor,
    context: Tensor,
    cu_seqlens: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    table: Tensor,
    scale: Tensor | None,
    *,
    eos: int,
    dtype: torch.dtype,
    first_row: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    hashing = ids, context, cu_seqlens, multipliers, moduli, offsets
    return _embed(hashing, table, scale, eos, dtype, first_row or 0, out, on_host=False)


@tuned(
    ngram.ngram_embed,
    CODE,
    name="cuda.ngram_embed_host",
    archs=_ARCHS,
    dtypes=_TABLES,
    constraints=_limits(True),
)
def ngram_embed_host(
    ids: Tensor,
    context: Tensor,
    cu_seqlens: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    table: Tensor,
    scale: Tensor | None,
    *,
    eos: int,
    dtype: torch.dtype,
    first_row: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    hashing = ids, context, cu_seqlens, multipliers, moduli, offsets
    return _embed(hashing, table, scale, eos, dtype, first_row or 0, out, on_host=True)


def _embed(
    hashing: tuple[Tensor, ...],
    table: Tensor,
    scale: Tensor | None,
    eos: int,
    dtype: torch.dtype,
    first_row: int,
    out: Tensor | None,
    on_host: bool,
) -> Tensor:
    ids, context, _, multipliers, moduli, _ = hashing
    tokens, heads, dim = ids.shape[0], moduli.shape[0], table.shape[1]
    out = torch.empty(tokens, heads * dim, dtype=dtype, device=ids.device) if out is None else out
    if out.numel() == 0:
        return out
    pairs_of_warp, warps = _form(tokens * heads, on_host)
    entry = CODE.entry(
        "ngram_embed",
        ids.device,
        ORDER=multipliers.shape[0],
        HEADS=heads,
        DIM=dim,
        FP8=int(table.dtype == torch.float8_e4m3fn),
        SCALES=0 if scale is None else min(scale.shape[0], 2),
        PAIRS=pairs_of_warp,
        WARPS=warps,
        ON_HOST=int(on_host),
    )
    blocks = -(-tokens * heads // (pairs_of_warp * warps))
    seqs = context.shape[0]
    sizes = tokens, seqs, seqs / tokens, c_int64(table.shape[0]), c_int64(first_row)
    grid = min(blocks, _HOST_BLOCKS) if on_host else blocks
    entry(grid, 32 * warps, *hashing, table, scale, out, *sizes, c_int64(eos), pdl=True)
    return out


def _form(pairs: int, on_host: bool) -> tuple[int, int]:
    """How many pairs of a token and a head a warp takes, and warps of a block: few for latency, many for throughput."""
    if on_host:
        return (4, 8) if pairs <= 512 else (8, 16)
    return next((size for most, size in _PAIRS.items() if pairs <= most), 32), 1
