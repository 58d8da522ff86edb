"""What the engine needs to serve `qwen4_exp`, found by model type.

Describing a checkpoint takes no torch, so what computes is imported by the methods that need it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenspeed_engine.checkpoint.plan import WeightPlan
from tokenspeed_engine.models.families import CacheBytes, CacheSizes
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig, parse_config
from tokenspeed_engine.models.qwen4_exp.shares import share_of
from tokenspeed_engine.models.qwen4_exp.weights import weight_plan
from tokenspeed_engine.parallel.ranks import ALONE, Ranks

if TYPE_CHECKING:
    import torch

    from tokenspeed_engine.checkpoint.load import Weights
    from tokenspeed_engine.models.qwen4_exp.caches import Caches
    from tokenspeed_engine.models.qwen4_exp.model import Qwen4ExpModel


NGRAM_TABLE = "ple.ple_embedding.ngram_embedding"


@dataclass(frozen=True)
class Qwen4ExpDescription:
    """See `ModelDescription`."""

    config: Qwen4ExpConfig
    family: str = "qwen4_exp"
    ranks: Ranks = ALONE

    @property
    def context_tokens(self) -> int:
        """An n-gram reaches back over all of its tokens but the last."""
        return self.config.ngram_size - 1 if self.config.ple_layer_ids else 0

    @property
    def context_fill(self) -> int:
        return self.config.hash_eos_token_id if self.config.ple_layer_ids else 0

    @property
    def has_state(self) -> bool:
        """Convolutions and the delta rule, and raw keys of the indexer."""
        return "linear_attention" in self.config.layer_types or self.config.has_indexer

    @property
    def has_draft_head(self) -> bool:
        return self.config.mtp_num_hidden_layers == 1

    @property
    def path_lengths(self) -> tuple[int, ...]:
        """Attention is dense up to the indexer's budget."""
        return (self.config.dense_limit,) if self.config.has_indexer else ()

    @property
    def table_names(self) -> tuple[str, ...]:
        """The n-gram tables."""
        return tuple(f"layers.{layer_id - 1}.{NGRAM_TABLE}" for layer_id in self.config.ple_layer_ids)

    def on(self, ranks: Ranks) -> "Qwen4ExpDescription":
        share_of(self.config, ranks)
        return replace(self, ranks=ranks)

    def weight_plan(self, names: Collection[str], draft_head: bool = False) -> WeightPlan:
        return weight_plan(self.config, names, draft_head, self.ranks)

    def build(self, weights: "Weights") -> "Qwen4ExpModel":
        from tokenspeed_engine.models.qwen4_exp.model import Qwen4ExpModel

        return Qwen4ExpModel(share_of(self.config, self.ranks), weights, self.ranks)

    def cache_bytes(self, sizes: CacheSizes, dtype: "torch.dtype") -> CacheBytes:
        from tokenspeed_engine.models.qwen4_exp.caches import cache_bytes

        return cache_bytes(share_of(self.config, self.ranks), sizes, dtype)

    def allocate_caches(self, sizes: CacheSizes, dtype: "torch.dtype", device: "torch.device") -> "Caches":
        from tokenspeed_engine.models.qwen4_exp.caches import allocate_caches

        return allocate_caches(share_of(self.config, self.ranks), sizes, dtype, device)


def describe(raw: Mapping[str, Any], subject: str) -> Qwen4ExpDescription:
    """The model of a whole config.json, `qwen4_exp` or `qwen4_exp_text`. Raises ConfigError about `subject`."""
    return Qwen4ExpDescription(parse_config(raw, subject))
