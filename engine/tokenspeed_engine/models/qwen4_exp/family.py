"""What the engine needs to serve `qwen4_exp`, found by model type.

Describing a checkpoint takes no torch, so what computes is imported by the methods that need it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenspeed_engine.checkpoint.plan import WeightPlan
from tokenspeed_engine.models.families import CacheBytes
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig, parse_config
from tokenspeed_engine.models.qwen4_exp.weights import weight_plan

if TYPE_CHECKING:
    import torch

    from tokenspeed_engine.checkpoint.load import Weights
    from tokenspeed_engine.models.qwen4_exp.caches import Caches
    from tokenspeed_engine.models.qwen4_exp.model import Qwen4ExpModel


@dataclass(frozen=True)
class Qwen4ExpDescription:
    """See `ModelDescription`."""

    config: Qwen4ExpConfig
    family: str = "qwen4_exp"

    @property
    def context_tokens(self) -> int:
        """An n-gram reaches back over all of its tokens but the last."""
        return self.config.ngram_size - 1 if self.config.ple_layer_ids else 0

    @property
    def context_fill(self) -> int:
        return self.config.hash_eos_token_id if self.config.ple_layer_ids else 0

    def weight_plan(self, names: Collection[str]) -> WeightPlan:
        return weight_plan(self.config, names)

    def build(self, weights: "Weights") -> "Qwen4ExpModel":
        from tokenspeed_engine.models.qwen4_exp.model import Qwen4ExpModel

        return Qwen4ExpModel(self.config, weights)

    def cache_bytes(self, page_size: int, dtype: "torch.dtype") -> CacheBytes:
        from tokenspeed_engine.models.qwen4_exp.caches import cache_bytes

        return cache_bytes(self.config, page_size, dtype)

    def allocate_caches(
        self, num_pages: int, page_size: int, num_slots: int, dtype: "torch.dtype", device: "torch.device"
    ) -> "Caches":
        from tokenspeed_engine.models.qwen4_exp.caches import allocate_caches

        return allocate_caches(self.config, num_pages, page_size, num_slots, dtype, device)


def describe(raw: Mapping[str, Any], subject: str) -> Qwen4ExpDescription:
    """The model of a whole config.json, `qwen4_exp` or `qwen4_exp_text`. Raises ConfigError about `subject`."""
    return Qwen4ExpDescription(parse_config(raw, subject))
