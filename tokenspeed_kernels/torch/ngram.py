"""n-gram embeddings in plain torch."""

import torch
from torch import Tensor

from tokenspeed_kernels import ngram
from tokenspeed_registry import copy_into, kernel

_LEAST_SCORE = 1e-6


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
    return rows if out is None else out.copy_(rows)


@kernel(ngram.ngram_lookup, backend="torch")
def ngram_lookup(
    rows: Tensor, table: Tensor, scale: Tensor | None, *, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    embedding = _lookup(rows, table, scale, dtype)
    return embedding if out is None else out.copy_(embedding)


@kernel(ngram.ngram_embed, backend="torch")
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
    out: Tensor | None = None,
) -> Tensor:
    embedding = _lookup(_hash(ids, context, cu_seqlens, multipliers, moduli, offsets, eos), table, scale, dtype)
    return embedding if out is None else out.copy_(embedding)


@kernel(ngram.ngram_gate, backend="torch")
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


@kernel(ngram.ngram_inject, backend="torch")
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
    token, bounds = torch.arange(ids.shape[0], device=ids.device), cu_seqlens.long()
    sequence = torch.searchsorted(bounds[1:], token, right=True)  # skips empty sequences
    position = token - bounds[sequence]
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


def _lookup(rows: Tensor, table: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    flat = rows.flatten().clamp_min(0)  # padding reads row 0 and drops it
    values = table[flat]
    if scale is not None:
        values = values.float() * (scale if scale.shape[0] == 1 else scale[flat]).unsqueeze(1)
    values = values.to(dtype).masked_fill((rows == -1).view(-1, 1), 0)
    return values.view(rows.shape[0], rows.shape[1] * table.shape[1])


def _grouped_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight.float())
