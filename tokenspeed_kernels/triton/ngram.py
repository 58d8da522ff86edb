"""n-gram embeddings: one launch hashes a program's tokens and copies the table rows that they name.

A program takes a few tokens with all their heads: see `ngram_hash` for the rows, `ngram_lookup` for the copy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernels import ngram
from tokenspeed_kernels.triton.declare import portable
from tokenspeed_kernels.triton.ngram_hash import hash_tile, ngram_hash
from tokenspeed_kernels.triton.ngram_lookup import (
    ON_DEVICE,
    ON_HOST,
    copy_config,
    copy_rows,
    ngram_lookup,
    ngram_lookup_host,
    pieces,
    scales_kind,
)
from tokenspeed_kernels.triton.overlap import overlapping, wait_for_predecessor

__all__ = ["ngram_embed", "ngram_embed_host", "ngram_hash", "ngram_lookup", "ngram_lookup_host"]


@triton.jit(do_not_specialize=["tokens", "seqs", "table_rows", "first_row"])
def _ngram_embed(
    ids_ptr,
    context_ptr,
    cu_ptr,
    multipliers_ptr,
    moduli_ptr,
    offsets_ptr,
    table_ptr,
    scale_ptr,
    o_ptr,
    tokens,
    seqs,
    table_rows,
    first_row,
    eos,
    ORDER: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    SCALES: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    o_t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    rows = hash_tile(
        o_t, ids_ptr, context_ptr, cu_ptr, multipliers_ptr, moduli_ptr, offsets_ptr, tokens, seqs, eos,
        ORDER, HEADS, LANES,
    )  # fmt: skip
    rows = tl.reshape(rows, [TOKENS * LANES])
    o_pair = tl.arange(0, TOKENS * LANES)
    i_token = tl.program_id(0).to(tl.int64) * TOKENS + o_pair // LANES
    i_head = o_pair % LANES
    inside = (i_token < tokens) & (i_head < HEADS)
    o_row = i_token * HEADS + i_head
    copy_rows(rows, o_row, inside, table_ptr, scale_ptr, o_ptr, table_rows, first_row, DIM, WIDE, REST, SCALES)


def _ngram_embed_tokens(
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
    tokens, heads, dim = ids.shape[0], moduli.shape[0], table.shape[1]
    out = torch.empty(tokens, heads * dim, dtype=dtype, device=ids.device) if out is None else out
    if out.numel():
        lanes = triton.next_power_of_2(heads)
        config = copy_config(table, tokens * heads)
        block = max(config.pop("rows") // lanes, 1)
        _ngram_embed[(triton.cdiv(tokens, block),)](
            ids, context, cu_seqlens, multipliers, moduli, offsets, table, scale, out,
            tokens, context.shape[0], table.shape[0], first_row or 0, eos,
            multipliers.shape[0], heads, lanes, **pieces(dim), SCALES=scales_kind(scale), TOKENS=block,
            **config, **overlapping(ids.device),
        )  # fmt: skip
    return out


ngram_embed = portable(ngram.ngram_embed, constraints=ON_DEVICE)(_ngram_embed_tokens)
ngram_embed_host = portable(ngram.ngram_embed, name="triton.ngram_embed_host", constraints=ON_HOST)(_ngram_embed_tokens)
