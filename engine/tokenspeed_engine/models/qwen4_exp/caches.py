"""What the model keeps of every sequence: paged keys and values, and one slot of each recurrent state.

Pools are not cleared: pages are read only where they were written, and slots are reset by the `fresh` rows of a batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tokenspeed_engine.models.families import CacheBytes
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig

SPARE_RING_ROWS = 4
"""Raw index keys kept beyond one block. While a step's drafts are verified, their keys pass over the ring; those of the
block still open must survive if all drafts are rejected. One row a draft: room for 4."""


@dataclass(frozen=True)
class IndexCache:
    """The indexer's keys of one layer. ring: [slots, rows, dim]. block_keys: [pages, blocks a page, dim]."""

    ring: Tensor
    block_keys: Tensor


@dataclass(frozen=True)
class AttentionCache:
    """One full-attention layer. k, v: [pages, page_size, kv_heads, dim]."""

    k: Tensor
    v: Tensor
    index: IndexCache | None


@dataclass(frozen=True)
class DeltaCache:
    """One linear-attention layer. state: Float32 [slots, v_heads, d_v, d_k]. conv: [slots, history, channels]."""

    state: Tensor
    conv: Tensor


@dataclass(frozen=True)
class Caches:
    """The pools of each layer that has them, by its number. ngram: [slots, history, streams · hidden]."""

    attention: Mapping[int, AttentionCache]
    delta: Mapping[int, DeltaCache]
    ngram: Mapping[int, Tensor]

    def tensors(self) -> Iterator[Tensor]:
        """All pools."""
        for pools in (self.attention, self.delta, self.ngram):
            for pool in pools.values():
                yield from _tensors(pool)


def allocate_caches(
    config: Qwen4ExpConfig, num_pages: int, page_size: int, num_slots: int, dtype: torch.dtype, device: torch.device
) -> Caches:
    """Pools of any content. Raises ValueError for pages that do not hold whole blocks of the indexer."""
    ratio = config.indexer_compress_ratio
    if ratio is not None and page_size % ratio:
        raise ValueError(f"page_size: expected a multiple of the indexer's compress ratio, {ratio}, got {page_size}")

    def pool(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device=device)

    def attention() -> AttentionCache:
        shape = (num_pages, page_size, config.num_key_value_heads, config.head_dim)
        index = None
        if config.indexer_head_dim is not None and ratio is not None:
            index = IndexCache(
                pool(num_slots, ratio + SPARE_RING_ROWS, config.indexer_head_dim),
                pool(num_pages, page_size // ratio, config.indexer_head_dim),
            )
        return AttentionCache(pool(*shape), pool(*shape), index)

    def delta() -> DeltaCache:
        heads, d_v, d_k = config.linear_num_value_heads, config.linear_value_head_dim, config.linear_key_head_dim
        channels = 2 * config.linear_key_dim + config.linear_value_dim
        return DeltaCache(
            pool(num_slots, heads, d_v, d_k, of=torch.float32),
            pool(num_slots, config.linear_conv_kernel_dim - 1, channels),
        )

    ngram_history = (config.ple_conv_kernel_size - 1) * config.ngram_size
    kinds = list(enumerate(config.layer_types))
    return Caches(
        {layer: attention() for layer, kind in kinds if kind == "full_attention"},
        {layer: delta() for layer, kind in kinds if kind == "linear_attention"},
        {layer_id - 1: pool(num_slots, ngram_history, config.stream_width) for layer_id in config.ple_layer_ids},
    )


def cache_bytes(config: Qwen4ExpConfig, page_size: int, dtype: torch.dtype) -> CacheBytes:
    """What one page and one slot take over all layers. Raises as `allocate_caches`."""

    def size(num_pages: int, num_slots: int) -> int:
        caches = allocate_caches(config, num_pages, page_size, num_slots, dtype, torch.device("meta"))
        return sum(tensor.nbytes for tensor in caches.tensors())

    return CacheBytes(per_page=size(1, 0), per_slot=size(0, 1))


def _tensors(pool: Tensor | AttentionCache | DeltaCache | IndexCache | None) -> Iterator[Tensor]:
    if isinstance(pool, Tensor):
        yield pool
    elif pool is not None:
        for part in fields(pool):
            yield from _tensors(getattr(pool, part.name))
