"""n-gram embeddings in plain torch."""

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels import ngram, ngram_block
from tokenspeed_kernels.torch.paged import token_sequences
from tokenspeed_registry import OnHost, copy_into, kernel, vendor

_LEAST_SCORE = 1e-6
_ON_HOST = [OnHost("table").in_(True)]
_ON_DEVICE = [OnHost("table").in_(False), OnHost("scale").in_(False)]


@kernel(ngram.ngram_hash, backend="torch")
def ngram_hash(
    ids: Tensor,
    context: Tensor,
    cu_seqlens: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    *,
    eos: int,
    out: Tensor | None = None,
) -> Tensor:
    rows = _hash(ids, context, cu_seqlens, multipliers, moduli, offsets, eos)
    return rows if out is None else copy_into(out, rows)


def _ngram_lookup(
    rows: Tensor,
    table: Tensor,
    scale: Tensor | None,
    *,
    dtype: torch.dtype,
    first_row: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    embedding = _lookup(rows, table, scale, dtype, first_row)
    return embedding if out is None else copy_into(out, embedding)


def _ngram_embed(
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
    rows = _hash(ids, context, cu_seqlens, multipliers, moduli, offsets, eos)
    embedding = _lookup(rows, table, scale, dtype, first_row)
    return embedding if out is None else copy_into(out, embedding)


ngram_lookup = kernel(ngram.ngram_lookup, backend="torch", constraints=_ON_DEVICE)(_ngram_lookup)
ngram_embed = kernel(ngram.ngram_embed, backend="torch", constraints=_ON_DEVICE)(_ngram_embed)
# Indexing a table in host memory waits for the rows to arrive there, which keeps the call out of graphs.
_FROM_HOST: dict[str, Any] = {"backend": "torch", "requires": vendor("nvidia", "amd"), "graph_capturable": False}
ngram_lookup_host = kernel(ngram.ngram_lookup, name="torch.ngram_lookup_host", constraints=_ON_HOST, **_FROM_HOST)(
    _ngram_lookup
)
ngram_embed_host = kernel(ngram.ngram_embed, name="torch.ngram_embed_host", constraints=_ON_HOST, **_FROM_HOST)(
    _ngram_embed
)


@kernel(ngram_block.ngram_gate, backend="torch")
def ngram_gate(
    x: Tensor,
    key: Tensor,
    value: Tensor,
    norm_key: Tensor,
    norm_query: Tensor,
    norm_conv: Tensor,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    query = _grouped_rms_norm(x.float(), norm_query, eps)
    score = (_grouped_rms_norm(key.float(), norm_key, eps) * query).sum(-1, keepdim=True) * x.shape[-1] ** -0.5
    score = score.sign() * score.abs().clamp_min(_LEAST_SCORE).sqrt()
    gated = score.sigmoid() * value.float().unsqueeze(1)
    results = gated.to(x.dtype), _grouped_rms_norm(gated, norm_conv, eps).to(x.dtype)
    return results if out is None else copy_into(out, results)


@kernel(ngram_block.ngram_inject, backend="torch")
def ngram_inject(x: Tensor, gated: Tensor, conv: Tensor) -> None:
    x.copy_(x.float() + gated.float() + conv.float())


def _hash(
    ids: Tensor,
    context: Tensor,
    cu_seqlens: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    eos: int,
) -> Tensor:
    order, heads = multipliers.shape[0], moduli.shape[0]
    if ids.shape[0] == 0:
        return ids.new_empty(0, heads)
    sequence, position = token_sequences(cu_seqlens, ids.shape[0])
    token = torch.arange(ids.shape[0], device=ids.device)
    value, ended = ids * multipliers[0], torch.zeros_like(ids, dtype=torch.bool)
    columns = []
    for back in range(1, order):
        # Column order-1-back of the context is `back` tokens before the chunk; position 0 sees it, position 1 the next.
        earlier = context[sequence, (order - 1 - back + position).clamp_max(order - 2)]
        previous = torch.where(position >= back, ids[(token - back).clamp_min(0)], earlier)
        ended = ended | (previous == -1) | (previous == eos)
        value = value ^ (previous.masked_fill(ended, eos) * multipliers[back])
        group = slice((back - 1) * heads // (order - 1), back * heads // (order - 1))
        columns.append(torch.remainder(value.unsqueeze(1), moduli[group]) + offsets[group])
    return torch.cat(columns, 1).masked_fill((ids == -1).unsqueeze(1), -1)


def _lookup(rows: Tensor, table: Tensor, scale: Tensor | None, dtype: torch.dtype, first_row: int | None) -> Tensor:
    local = rows.flatten() - (first_row or 0)
    absent = (rows.flatten() == -1) | (local < 0) | (local >= table.shape[0])
    flat = local.masked_fill(absent, 0)  # what is absent reads the first row and drops it
    values = _rows_of(table, flat)
    if scale is not None:
        values = values.float() * (_rows_of(scale, flat) if scale.shape[0] > 1 else scale.to(rows.device)).unsqueeze(1)
    values = values.to(dtype).masked_fill(absent.unsqueeze(1), 0)
    return values.view(rows.shape[0], rows.shape[1] * table.shape[1])


def _rows_of(table: Tensor, index: Tensor) -> Tensor:
    """table[index] on the device of `index`, wherever the table lies."""
    return table[index.to(table.device)].to(index.device)


def _grouped_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight.float())
