"""What surrounds the attention of latent caches, in plain torch."""

import torch
from torch import Tensor

from tokenspeed_kernels import mla_forms
from tokenspeed_kernels.torch.paged import token_sequences
from tokenspeed_registry import copy_into, kernel


@kernel(mla_forms.mla_absorb_query, backend="torch")
def mla_absorb_query(q_nope: Tensor, q_rope: Tensor, w_k: Tensor, *, out: Tensor | None = None) -> Tensor:
    tokens, heads, latent = q_nope.shape[0], q_nope.shape[1], w_k.shape[2]
    q = q_nope.new_empty(tokens, heads, latent + q_rope.shape[2]) if out is None else out
    q[..., :latent] = _per_head(q_nope, w_k)
    q[..., latent:] = q_rope
    return q


@kernel(mla_forms.mla_value_up, backend="torch")
def mla_value_up(latent_out: Tensor, w_v: Tensor, *, out: Tensor | None = None) -> Tensor:
    values = _per_head(latent_out, w_v.transpose(1, 2)).contiguous()
    return values if out is None else copy_into(out, values)


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [tokens, heads, k] times the matrix [k, n] of each head: [tokens, heads, n], in the dtype of both."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


@kernel(mla_forms.mla_cache_read, backend="torch")
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
    cached = kv_cache.new_zeros(rows, kv_cache.shape[2], dtype=dtype) if out is None else out.zero_()
    if rows == 0 or kv_cache.shape[0] == 0:
        return cached
    page = kv_cache.shape[1]
    sequence, position = token_sequences(cu_seqlens, rows)
    if first is not None:
        position = position + first.long()[sequence]
    entry = page_table.long()[sequence, position // page]
    values = kv_cache[entry.clamp_min(0), position % page].to(torch.float32)
    if kv_scale is not None:
        values *= kv_scale
    return cached.copy_(values.masked_fill_((entry < 0)[:, None], 0.0))
