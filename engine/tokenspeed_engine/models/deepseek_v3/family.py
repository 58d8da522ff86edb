"""What the engine needs to serve `deepseek_v3`, found by model type.

Describing a checkpoint takes no torch, so what computes is imported by the methods that need it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenspeed_engine.checkpoint.plan import WeightPlan
from tokenspeed_engine.models.deepseek_v3.config import DeepseekV3Config, parse_config
from tokenspeed_engine.models.deepseek_v3.shares import share_of
from tokenspeed_engine.models.deepseek_v3.weights import weight_plan
from tokenspeed_engine.models.families import CacheBytes, CacheSizes
from tokenspeed_engine.parallel.ranks import ALONE, Ranks

if TYPE_CHECKING:
    import torch

    from tokenspeed_engine.checkpoint.load import Weights
    from tokenspeed_engine.models.deepseek_v3.caches import Caches
    from tokenspeed_engine.models.deepseek_v3.model import DeepseekV3Model


@dataclass(frozen=True)
class DeepseekV3Description:
    """See `ModelDescription`. The model looks at no tokens but through its caches, and its draft head is not served."""

    config: DeepseekV3Config
    family: str = "deepseek_v3"
    ranks: Ranks = ALONE
    context_tokens: int = 0
    context_fill: int = 0

    has_state: bool = False
    has_draft_head: bool = False
    path_lengths: tuple[int, ...] = ()
    table_names: tuple[str, ...] = ()

    def on(self, ranks: Ranks) -> "DeepseekV3Description":
        share_of(self.config, ranks)
        return replace(self, ranks=ranks)

    def weight_plan(self, names: Collection[str], draft_head: bool = False) -> WeightPlan:
        return weight_plan(self.config, self.ranks)

    def build(self, weights: "Weights") -> "DeepseekV3Model":
        from tokenspeed_engine.models.deepseek_v3.model import DeepseekV3Model

        return DeepseekV3Model(share_of(self.config, self.ranks), weights, self.ranks)

    def cache_bytes(self, sizes: CacheSizes, dtype: "torch.dtype") -> CacheBytes:
        from tokenspeed_engine.models.deepseek_v3.caches import cache_bytes

        return cache_bytes(share_of(self.config, self.ranks), sizes, dtype)

    def allocate_caches(self, sizes: CacheSizes, dtype: "torch.dtype", device: "torch.device") -> "Caches":
        from tokenspeed_engine.models.deepseek_v3.caches import allocate_caches

        return allocate_caches(share_of(self.config, self.ranks), sizes, dtype, device)


def describe(raw: Mapping[str, Any], subject: str) -> DeepseekV3Description:
    """The model of a whole config.json. Raises ConfigError about `subject`."""
    return DeepseekV3Description(parse_config(raw, subject))
