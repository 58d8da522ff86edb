"""What the model keeps of every sequence: paged keys and values, and one slot of each recurrent state.

Pools are not cleared: pages are read only where they were written, and slots are reset by the `fresh` rows of a batch.
Those of all layers of a kind are one tensor, so that a slot or a page is moved in few copies.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_engine.models.families import CacheBytes, CacheSizes, scratch_pages
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig


@dataclass(frozen=True)
class IndexCache:
    """The indexer's keys of one layer. ring: [slots, rows, dim]. block_keys: [pages, blocks a page, dim].

    Nothing is taken back of it: a block that rejected drafts closed is written again when it is truly closed. For that
    the ring keeps the raw keys of the open block while those of drafts pass.
    """

    ring: Tensor
    block_keys: Tensor


@dataclass(frozen=True)
class AttentionCache:
    """One full-attention layer. k, v: [pages, page_size, kv_heads, dim]."""

    k: Tensor
    v: Tensor
    index: IndexCache | None


class Kept(NamedTuple):
    """Tokens that the delta rule's states still miss: k, v, g and beta, [slots, capacity, heads, …] each."""

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


@dataclass(frozen=True)
class DeltaCache:
    """One linear-attention layer. state: Float32 [slots, v_heads, d_v, d_k]. conv: [slots, history, channels].

    Where drafts are run, either `kept` holds tokens to replay, or `state` has more places: after the slots, as many for
    each row that runs at once as it has drafts.
    """

    state: Tensor
    conv: Tensor
    kept: Kept | None


@dataclass(frozen=True)
class Caches:
    """The pools of each layer that has them, by its number, the draft head's after the model's last.

    ngram: [slots, history, streams · hidden]. `kept_pools` are those of all `Kept`, which no settled slot needs.
    """

    attention: Mapping[int, AttentionCache]
    delta: Mapping[int, DeltaCache]
    ngram: Mapping[int, Tensor]
    slot_pools: tuple[Tensor, ...]
    page_pools: tuple[Tensor, ...]
    kept_pools: tuple[Tensor, ...]

    def tensors(self) -> Iterator[Tensor]:
        """All pools, each [layers, …]."""
        yield from (*self.slot_pools, *self.page_pools, *self.kept_pools)


def allocate_caches(config: Qwen4ExpConfig, sizes: CacheSizes, dtype: torch.dtype, device: torch.device) -> Caches:
    """Pools of any content. Raises ValueError for pages that do not hold whole blocks of the indexer."""
    ratio, page_size = config.indexer_compress_ratio, sizes.page_size
    if ratio is not None and page_size % ratio:
        raise ValueError(f"page_size: expected a multiple of the indexer's compress ratio, {ratio}, got {page_size}")
    slot_pools: list[Tensor] = []
    page_pools: list[Tensor] = []
    kept_pools: list[Tensor] = []

    def pool(kind: list[Tensor], *shape: int, of: torch.dtype = dtype) -> Tensor:
        """[layers, ...]; pools without layers are not kept."""
        tensor = torch.empty(shape, dtype=of, device=device)
        if shape[0]:
            kind.append(tensor)
        return tensor

    def attention(layers: list[int], num_pages: int, spare_rows: int) -> dict[int, AttentionCache]:
        count, dim = len(layers), config.indexer_head_dim
        shape = (count, num_pages, page_size, config.num_key_value_heads, config.head_dim)
        k, v = pool(page_pools, *shape), pool(page_pools, *shape)
        if dim is None or ratio is None:
            return {layer: AttentionCache(k[i], v[i], None) for i, layer in enumerate(layers)}
        ring = pool(slot_pools, count, sizes.num_slots, ratio + spare_rows, dim)
        block_keys = pool(page_pools, count, num_pages, page_size // ratio, dim)
        return {layer: AttentionCache(k[i], v[i], IndexCache(ring[i], block_keys[i])) for i, layer in enumerate(layers)}

    def delta(layers: list[int]) -> dict[int, DeltaCache]:
        count, slots, drafts = len(layers), sizes.num_slots, sizes.num_drafts
        k_heads, v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        d_k, d_v = config.linear_key_head_dim, config.linear_value_head_dim
        scratch = sizes.num_rows * drafts if sizes.verify == "states" else 0
        state = pool(slot_pools, count, slots + scratch, v_heads, d_v, d_k, of=torch.float32)
        history = config.linear_conv_kernel_dim - 1 + drafts
        conv = pool(slot_pools, count, slots, history, 2 * config.linear_key_dim + config.linear_value_dim)
        if not drafts or sizes.verify == "states":
            return {layer: DeltaCache(state[i], conv[i], None) for i, layer in enumerate(layers)}
        capacity = sizes.replay_capacity
        kept = Kept(
            pool(kept_pools, count, slots, capacity, k_heads, d_k),
            pool(kept_pools, count, slots, capacity, v_heads, d_v),
            pool(kept_pools, count, slots, capacity, v_heads, of=torch.float32),
            pool(kept_pools, count, slots, capacity, v_heads, of=torch.float32),
        )
        return {
            layer: DeltaCache(state[i], conv[i], Kept(*(part[i] for part in kept))) for i, layer in enumerate(layers)
        }

    full, linear = (
        [layer for layer, kind in enumerate(config.layer_types) if kind == f"{name}_attention"]
        for name in ("full", "linear")
    )
    by_layer = attention(full, sizes.num_pages, sizes.num_drafts)
    if sizes.draft_head:
        # Guesses run further ahead than drafts that are verified, on pages that no plan names.
        pages = sizes.num_pages + sizes.num_rows * scratch_pages(sizes.num_drafts, page_size)
        by_layer |= attention([config.num_hidden_layers], pages, 2 * sizes.num_drafts)
    ngram_history = (config.ple_conv_kernel_size - 1) * config.ngram_size + sizes.num_drafts
    ngram_layers = [layer_id - 1 for layer_id in config.ple_layer_ids]
    ngram = pool(slot_pools, len(ngram_layers), sizes.num_slots, ngram_history, config.stream_width)
    return Caches(
        attention=by_layer,
        delta=delta(linear),
        ngram={layer: ngram[i] for i, layer in enumerate(ngram_layers)},
        slot_pools=tuple(slot_pools),
        page_pools=tuple(page_pools),
        kept_pools=tuple(kept_pools),
    )


def cache_bytes(config: Qwen4ExpConfig, sizes: CacheSizes, dtype: torch.dtype) -> CacheBytes:
    """What one page, slot, row and host snapshot take over all layers. Raises as `allocate_caches`."""

    def caches(num_pages: int, num_slots: int, num_rows: int) -> Caches:
        counts = replace(sizes, num_pages=num_pages, num_slots=num_slots, num_rows=num_rows)
        return allocate_caches(config, counts, dtype, torch.device("meta"))

    def size(tensors: Iterator[Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    return CacheBytes(
        per_page=size(caches(1, 0, 0).tensors()),
        per_slot=size(caches(0, 1, 0).tensors()),
        per_row=size(caches(0, 0, 1).tensors()),
        per_snapshot=size(iter(caches(0, 1, 0).slot_pools)),
    )
