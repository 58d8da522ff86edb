"""Configuration of the model, with the field names and defaults of its Hugging Face config."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tokenspeed_engine.models.deepseek_v3.checks import find_problems
from tokenspeed_engine.models.validation import FieldProblems, check_quantisation, validated

Size = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]


class RopeParameters(BaseModel):
    """Rotary embedding: plain ("default") or stretched to longer contexts ("yarn")."""

    model_config = ConfigDict(frozen=True, strict=True)

    rope_type: str = "default"
    rope_theta: Positive = 10_000.0
    partial_rotary_factor: Positive = 1.0

    factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    """The context before stretching. Filled in at parsing."""
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: Positive | None = None

    @property
    def rotary_factor(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.rope_type != "yarn" or self.factor is None:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """What the scale of attention scores is multiplied by."""
        if self.rope_type != "yarn" or self.factor is None or not self.mscale_all_dim:
            return 1.0
        return _mscale(self.factor, self.mscale_all_dim) ** 2


class DeepseekV3Config(BaseModel):
    """The model's configuration; unknown fields are ignored, fields that would change the maths are refused."""

    model_config = ConfigDict(frozen=True, strict=True)

    vocab_size: Size = 129_280
    hidden_size: Size = 7168
    num_hidden_layers: Size = 61
    rms_norm_eps: Positive = 1e-6
    max_position_embeddings: Size = 4096
    tie_word_embeddings: bool = False
    eos_token_id: int | tuple[int, ...] | None = 1
    dtype: str | None = None
    hidden_act: str = "silu"
    num_nextn_predict_layers: Annotated[int, Field(ge=0)] = 1

    num_attention_heads: Size = 128
    num_key_value_heads: Size | None = None
    attention_bias: bool = False
    q_lora_rank: Size | None = 1536
    kv_lora_rank: Size = 512
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128
    rope_interleave: bool = True
    rope_parameters: RopeParameters = RopeParameters()

    intermediate_size: Size = 18_432
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 3
    moe_layer_freq: int = 1
    n_routed_experts: Size = 256
    n_shared_experts: Size = 1
    moe_intermediate_size: Size = 2048
    num_experts_per_tok: Size = 8
    n_group: Size = 8
    topk_group: Size = 4
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 2.5

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = find_problems(self)
        if problems:
            raise FieldProblems(problems)
        return self

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @property
    def cache_width(self) -> int:
        """What a layer caches of a token: its latent and its rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of attention scores in both forms: that of the width of an expanded key, not of a cached row."""
        return self.rope_parameters.softmax_factor / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)

    def is_dense(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has one MLP instead of experts."""
        return layer < self.first_k_dense_replace


def parse_config(raw: Mapping[str, Any], subject: str = "config.json") -> DeepseekV3Config:
    """The configuration in a config.json. Raises ConfigError about `subject`, each problem naming its field."""
    check_quantisation(raw, subject)
    fields = dict(raw)
    fields["dtype"] = raw.get("dtype") or raw.get("torch_dtype")
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    fields["rope_parameters"] = _rope_fields(raw, rope) if isinstance(rope, dict) else rope
    return validated(DeepseekV3Config, fields, subject)


def _rope_fields(raw: Mapping[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Fills what other fields decide, as transformers does. Older config.json files have some of it further out."""
    outer = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if key in raw}
    context = raw.get("max_position_embeddings", DeepseekV3Config.model_fields["max_position_embeddings"].default)
    fields = {"rope_type": rope.get("type", "default"), "original_max_position_embeddings": context} | outer | rope
    if "original_max_position_embeddings" in raw:
        fields["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    for name in ("beta_fast", "beta_slow"):
        if not fields.get(name):  # transformers takes 0 for absent too
            fields.pop(name, None)
    return fields


def _mscale(factor: float, weight: float) -> float:
    """Growth of attention's magnitude that YaRN makes up for; see arXiv:2309.00071, section 3.4."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
