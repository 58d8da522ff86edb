"""Dense attention over a paged cache in plain torch: padded batches, in blocks that bound the memory of the scores."""

import torch
from torch import Tensor

from tokenspeed_kernels import attention
from tokenspeed_kernels.torch.paged import (
    gather_pages,
    gather_rows,
    pad_sequences,
    reachable_pages,
    scatter_slots,
    token_sequences,
)
from tokenspeed_kernels.torch.softmax import QUERY_BLOCK, softmax_attention
from tokenspeed_registry import copy_into, kernel


@kernel(attention.kv_cache_write, backend="torch")
def kv_cache_write(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    scatter_slots(k_cache, slot_mapping, k, k_scale)
    scatter_slots(v_cache, slot_mapping, v, v_scale)


@kernel(attention.paged_attention, backend="torch")
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_q_len: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    kv_heads = k_cache.shape[2]
    group = q.shape[1] // kv_heads
    table = reachable_pages(page_table, seq_lens, k_cache.shape[1])
    # [seqs, kv_heads, keys, dim]
    keys = gather_pages(k_cache, table, seq_lens, k_scale).transpose(1, 2)
    values = gather_pages(v_cache, table, seq_lens, v_scale).transpose(1, 2)
    tokens = pad_sequences(cu_seqlens_q, max_q_len)
    first = seq_lens.long() - cu_seqlens_q.long().diff() + 1
    visible = first[:, None] + torch.arange(max_q_len, device=q.device)
    outs, lses = [], []
    for start in range(0, max(max_q_len, 1), QUERY_BLOCK):
        rows, seen = tokens[:, start : start + QUERY_BLOCK], visible[:, start : start + QUERY_BLOCK]
        queries = _fold(gather_rows(q, rows).float(), kv_heads)
        block, block_lse = softmax_attention(queries, keys, values, seen[:, None].repeat_interleave(group, -1), scale)
        outs.append(_unfold(block, group))
        lses.append(_unfold(block_lse.unsqueeze(-1), group).squeeze(-1))
    places = token_sequences(cu_seqlens_q, q.shape[0])
    result = torch.cat(outs, dim=1)[places].to(q.dtype), torch.cat(lses, dim=1)[places]
    return result if out is None else copy_into(out, result)


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[seqs, rows, heads, dim] to [seqs, kv_heads, rows*group, dim]: the heads of a group share one product."""
    seqs, rows, heads, dim = x.shape
    return x.reshape(seqs, rows, kv_heads, heads // kv_heads, dim).transpose(1, 2).flatten(2, 3)


def _unfold(x: Tensor, group: int) -> Tensor:
    """[seqs, kv_heads, rows*group, dim] back to [seqs, rows, heads, dim]."""
    seqs, kv_heads, rows, dim = x.shape
    return x.reshape(seqs, kv_heads, rows // group, group, dim).transpose(1, 2).flatten(2, 3)
