"""What the model keeps of every sequence: a latent and a rotated key of each token and layer, in pages.

Pools are not cleared: pages are read only where they were written. There is no state outside the pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenspeed_engine.models.deepseek_v3.config import DeepseekV3Config
from tokenspeed_engine.models.families import CacheBytes, CacheSizes


@dataclass(frozen=True)
class Caches:
    """latents: [layers, pages, page_size, latent + rope]. A rejected draft needs no taking back: it is written over."""

    latents: Tensor
    slot_pools: tuple[Tensor, ...] = field(default=(), init=False)

    @property
    def page_pools(self) -> tuple[Tensor, ...]:
        return (self.latents,)

    def tensors(self) -> Iterator[Tensor]:
        """All pools."""
        yield self.latents


def allocate_caches(config: DeepseekV3Config, sizes: CacheSizes, dtype: torch.dtype, device: torch.device) -> Caches:
    """Pools of any content."""
    shape = (config.num_hidden_layers, sizes.num_pages, sizes.page_size, config.cache_width)
    return Caches(torch.empty(shape, dtype=dtype, device=device))


def cache_bytes(config: DeepseekV3Config, sizes: CacheSizes, dtype: torch.dtype) -> CacheBytes:
    """What one page takes over all layers; slots and rows take nothing."""
    return CacheBytes(config.num_hidden_layers * sizes.page_size * config.cache_width * dtype.itemsize, 0, 0, 0)
