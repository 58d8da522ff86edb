"""What the model keeps of every sequence: a latent and a rotated key of each token and layer, in pages.

Pools are not cleared: pages are read only where they were written. There is no state outside the pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_engine.models.deepseek_v3.config import DeepseekV3Config
from tokenspeed_engine.models.families import CacheBytes


@dataclass(frozen=True)
class Caches:
    """The pool of each layer, [pages, page_size, latent + rope]."""

    latents: tuple[Tensor, ...]

    def tensors(self) -> Iterator[Tensor]:
        """All pools."""
        return iter(self.latents)


def allocate_caches(
    config: DeepseekV3Config, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> Caches:
    """Pools of any content."""
    shape = (num_pages, page_size, config.cache_width)
    return Caches(tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)))


def cache_bytes(config: DeepseekV3Config, page_size: int, dtype: torch.dtype) -> CacheBytes:
    """What one page takes over all layers; a slot takes nothing."""
    return CacheBytes(config.num_hidden_layers * page_size * config.cache_width * dtype.itemsize, 0)
