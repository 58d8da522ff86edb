"""Multi-head latent attention in plain torch."""

from itertools import pairwise

import torch
from torch import Tensor

from tokenspeed_kernels import mla
from tokenspeed_kernels.torch.paged import gather_pages, reachable_pages, scatter_slots
from tokenspeed_kernels.torch.softmax import QUERY_BLOCK, softmax_attention
from tokenspeed_registry import copy_into, kernel


@kernel(mla.mla_decode, backend="torch")
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
    batch, q_len, heads, _ = q.shape
    rows = gather_pages(kv_cache, reachable_pages(page_table, seq_lens, kv_cache.shape[1]), seq_lens, kv_scale)
    visible = seq_lens.long()[:, None] + torch.arange(1 - q_len, 1, device=q.device)
    attended, lse = softmax_attention(
        q.float().flatten(1, 2), rows, rows[..., :latent], visible.repeat_interleave(heads, dim=1), scale
    )
    result = attended.reshape(batch, q_len, heads, latent).to(q.dtype), lse.reshape(batch, q_len, heads)
    return result if out is None else copy_into(out, result)


# Reads the offsets on the host: a batch padded to its longest sequence would cost many times the products.
@kernel(mla.mla_prefill, backend="torch", graph_capturable=False)
def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    causal: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    attended, lse = out or (q.new_empty(tokens, heads, v.shape[2]), q.new_empty(tokens, heads, dtype=torch.float32))
    spans = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (q_start, q_end), (k_start, k_end) in spans:
        keys, values = (side[k_start:k_end].transpose(0, 1).float() for side in (k, v))
        for start in range(q_start, q_end, QUERY_BLOCK):
            block = slice(start, min(start + QUERY_BLOCK, q_end))
            token = torch.arange(block.start, block.stop, device=q.device)
            visible = k_end - k_start - q_end + token + 1 if causal else torch.full_like(token, k_end - k_start)
            part, part_lse = softmax_attention(q[block].transpose(0, 1).float(), keys, values, visible, scale)
            attended[block], lse[block] = part.transpose(0, 1), part_lse.transpose(0, 1)
    return attended, lse


@kernel(mla.mla_cache_write, backend="torch")
def mla_cache_write(
    latent: Tensor, k_rope: Tensor, slot_mapping: Tensor, kv_cache: Tensor, *, kv_scale: Tensor | None = None
) -> None:
    scatter_slots(kv_cache, slot_mapping, torch.cat((latent, k_rope), dim=-1), kv_scale)


@kernel(mla.merge_states, backend="torch")
def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    merged_lse = torch.logaddexp(lse_a, lse_b)
    # Both sides empty: −inf − −inf is NaN, and the weights must be zero.
    weight_a = (lse_a - merged_lse).exp().nan_to_num(0.0).unsqueeze(-1)
    weight_b = (lse_b - merged_lse).exp().nan_to_num(0.0).unsqueeze(-1)
    merged = (weight_a * out_a.float() + weight_b * out_b.float()).to(out_a.dtype)
    return (merged, merged_lse) if out is None else copy_into(out, (merged, merged_lse))
