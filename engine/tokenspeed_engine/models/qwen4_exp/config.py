"""Configuration of the text model, with the field names and defaults of its Hugging Face config."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tokenspeed_engine.checkpoint.errors import ConfigError
from tokenspeed_engine.models.qwen4_exp.checks import find_problems
from tokenspeed_engine.models.validation import FieldProblems, check_quantisation, validated

LayerKind = Literal["linear_attention", "full_attention"]

LAYER_TYPE_SYNONYMS: Mapping[str, LayerKind] = {
    "linear_attention": "linear_attention",
    "full_attention": "full_attention",  # the released checkpoint
    "indexed_attention": "full_attention",  # transformers 5
    "qwen_sparse_attention": "full_attention",  # transformers before that
}

ACTIVATION_SYNONYMS: Mapping[str, str] = {"swish": "silu"}

Size = Annotated[int, Field(gt=0)]


class RopeParameters(BaseModel):
    """Rotary embedding. mrope_* fields of the checkpoint are left out: for text, all three position rows are equal."""

    model_config = ConfigDict(frozen=True, strict=True)

    rope_type: str = "default"
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0


class Qwen4ExpConfig(BaseModel):
    """The text model's configuration; unknown fields are ignored, fields that would change the maths are refused."""

    model_config = ConfigDict(frozen=True, strict=True)

    vocab_size: Size = 248_320
    hidden_size: Size = 2048
    num_hidden_layers: Size = 40
    layer_types: tuple[LayerKind, ...]
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    max_position_embeddings: Size = 32_768
    tie_word_embeddings: bool = False
    eos_token_id: int | tuple[int, ...] | None = None
    dtype: str | None = None
    hidden_act: str = "silu"

    num_attention_heads: Size = 16
    num_key_value_heads: Size = 2
    head_dim: Size = 256
    attention_bias: bool = False
    rope_parameters: RopeParameters = RopeParameters()

    indexer_n_heads: Size | None = None
    indexer_kv_heads: Size | None = None
    indexer_head_dim: Size | None = None
    indexer_budget: Size | None = None
    indexer_compress_ratio: Size | None = None

    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_conv_kernel_dim: Size = 4
    output_gate_type: str | None = None
    mamba_ssm_dtype: str = "float32"

    num_experts: Size = 512
    num_experts_per_tok: Size = 10
    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: Size = 512
    norm_topk_prob: bool = True

    hc_count: int = 4
    hc_lowrank: Size = 320

    ple_layer_ids: tuple[int, ...] = ()
    """Layers with an n-gram block, counted from 1, ascending."""
    ple_embed_dim: Size
    ple_conv_kernel_size: Size = 4
    ngram_size: Size = 3
    heads_per_ngram: Size = 8
    ngram_vocab_size_base: Size = 20_000_000
    make_ngram_vocab_size_divisible_by: Size = 128
    split_ngram_parts: Size = 512
    seed: int = 1234

    mtp_num_hidden_layers: int = 0
    """Layers of the draft head; only one can be served."""

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
    def hash_eos_token_id(self) -> int:
        """The token that cuts n-grams: the config's first EOS, whatever the generation config stops at."""
        return self.eos_token_ids[0]

    @property
    def output_gate(self) -> str:
        """Activation of the delta rule's output gate, "sigmoid" or "silu"."""
        gate = self.output_gate_type or self.hidden_act
        return ACTIVATION_SYNONYMS.get(gate, gate)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope_parameters.partial_rotary_factor)

    @property
    def stream_width(self) -> int:
        """Width of the residual: `hc_count` streams of `hidden_size`."""
        return self.hc_count * self.hidden_size

    @property
    def has_indexer(self) -> bool:
        """Whether full attention is sparse; without an indexer it is dense."""
        return self.indexer_n_heads is not None

    @property
    def dense_limit(self) -> int:
        """Tokens up to which the indexer's blocks and the tail are the whole sequence; 0 without an indexer."""
        if self.indexer_budget is None or self.indexer_compress_ratio is None:
            return 0
        return self.indexer_budget + self.indexer_compress_ratio - 1

    @property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def ngram_heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    def ngram_index(self, layer: int) -> int | None:
        """Which n-gram block layer `layer` (from 0) has, counted from 0 over the model; None if it has none."""
        return self.ple_layer_ids.index(layer + 1) if layer + 1 in self.ple_layer_ids else None


def parse_config(raw: Mapping[str, Any], subject: str = "config.json") -> Qwen4ExpConfig:
    """The text model's configuration from a whole config.json, with its text_config inside or bare.

    Raises ConfigError about `subject`, each problem naming its field.
    """
    path = ""
    text: Any = raw
    if raw.get("model_type") == "qwen4_exp":
        path = "text_config."
        text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(subject, ["text_config: missing, or not an object"])
    inherited = {key: raw[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in raw}
    text = inherited | dict(text)
    check_quantisation(dict(text) | dict(raw), subject)
    try:
        fields = _normalise(text)
    except FieldProblems as error:
        raise ConfigError(subject, [f"{path}{problem}" for problem in error.problems]) from error
    return validated(Qwen4ExpConfig, fields, subject, path)


def _normalise(raw: dict[str, Any]) -> dict[str, Any]:
    """Fills defaults that depend on other fields and folds synonyms, as transformers does."""
    fields = dict(raw)
    fields["dtype"] = raw.get("dtype") or raw.get("torch_dtype")
    for name in ("layer_types", "ple_layer_ids", "ple_embed_dim"):
        if fields.get(name) is None:
            fields.pop(name, None)

    layers = fields.get("num_hidden_layers", Qwen4ExpConfig.model_fields["num_hidden_layers"].default)
    if "layer_types" not in fields and isinstance(layers, int):
        interval = fields.get("full_attention_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            raise FieldProblems([f"full_attention_interval: must be a positive integer, got {interval!r}"])
        kinds = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
        fields["layer_types"] = kinds
    elif isinstance(fields.get("layer_types"), list):
        fields["layer_types"] = [_layer_kind(kind) for kind in fields["layer_types"]]

    ids = fields.get("ple_layer_ids")
    if isinstance(ids, list) and all(type(layer_id) is int for layer_id in ids):
        fields["ple_layer_ids"] = sorted(set(ids))
    fields.setdefault("ple_embed_dim", fields.get("hidden_size", Qwen4ExpConfig.model_fields["hidden_size"].default))

    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if isinstance(rope, dict):
        outer = {key: fields[key] for key in ("rope_theta", "partial_rotary_factor") if key in fields}
        rope = {"rope_type": rope.get("type", "default")} | outer | rope
    fields["rope_parameters"] = rope
    return fields


def _layer_kind(kind: Any) -> Any:
    return LAYER_TYPE_SYNONYMS.get(kind, kind) if isinstance(kind, str) else kind
