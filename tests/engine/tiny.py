"""Tiny random `qwen4_exp` checkpoints, written by transformers, and transformers' answers to them in float32.

A checkpoint is made once a process; its folder goes away with the process.
"""

import functools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import save_file

EOS = 3

BASE: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "hc_count": 4,
    "hc_lowrank": 8,
    "ple_layer_ids": [2],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 11,  # shard_10 sorts before shard_2, and the last one is smaller
    # So many index heads that a block of score 0, where selections tie, is rare.
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "eos_token_id": EOS,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Variant:
    """A change to BASE and the layout it is stored in.

    "text" is what transformers saves for its text-only class: one file, each expert by itself. "multimodal" is as the
    released checkpoint: shards with an index, fused experts, the text model's config and names one level down, and
    tensors of parts that a text engine does not serve.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    layout: Literal["text", "multimodal"] = "text"


VARIANTS: Mapping[str, Variant] = {
    "default": Variant(),
    "multimodal": Variant(layout="multimodal"),
    "two_streams": Variant({"hc_count": 2}),
    "bigrams": Variant({"ngram_size": 2}),
    "several_ngram_layers": Variant({"ple_layer_ids": [1, 2, 4]}),
    "no_ngrams": Variant({"ple_layer_ids": []}),
    "compress_ratio_2": Variant({"indexer_compress_ratio": 2}),
    "silu_gate": Variant({"output_gate_type": None}),
    # With so few heads many blocks score 0, and such ties must be broken as the oracle does.
    "two_index_heads": Variant({"indexer_n_heads": 2}),
    "raw_router_weights": Variant({"norm_topk_prob": False}),
}

UNSERVED_NAMES = (
    "model.visual.patch_embed.proj.weight",
    "model.visual.patch_embed.proj.bias",
    "mtp.fc_hidden.weight",
    "model.language_model.layers.1.ple.ple_embedding.hashstats_counts",
    "model.language_model.layers.1.ple.ple_embedding.token_lookup",
    "model.language_model.hyper_connection_mixer.block_inject_weight.weight",
)
"""Tensors of parts that are not served, which the "multimodal" layout adds; each has 6 float32 elements."""

_scratch = tempfile.TemporaryDirectory(prefix="tiny-qwen4-exp-")


@functools.cache
def tiny_checkpoint(variant: str = "default", dtype: torch.dtype = torch.float32) -> Path:
    """The folder of a variant's checkpoint, its weights stored in `dtype`. Read only: others use it too."""
    folder = Path(_scratch.name) / f"{variant}-{str(dtype).removeprefix('torch.')}"
    chosen = VARIANTS[variant]
    _quieten()
    config = transformers.Qwen4ExpTextConfig(**(dict(BASE) | dict(chosen.changes)))
    model = transformers.Qwen4ExpForCausalLM(config).eval()
    randomise(model, seed=sum(variant.encode()))
    model = model.to(dtype)
    if chosen.layout == "text":
        model.save_pretrained(folder)
    else:
        _save_multimodal(model, folder)
    return folder


def hf_logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab] float32: transformers' logits after each token of `ids`, in one uncached pass."""
    with torch.no_grad():
        logits: torch.Tensor = hf_model(folder)(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def hf_greedy(folder: Path, ids: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that transformers adds to `ids`, EOS or not.

    Raises RuntimeError where the best two logits are so close that another order of summing could swap them.
    """
    model = hf_model(folder)
    tokens: list[int] = []
    cache = None
    step = list(ids)
    with torch.no_grad():
        for _ in range(count):
            output = model(torch.tensor([step]), cache=cache, use_cache=True)
            cache = output.cache
            best = output.logits[0, -1].topk(2)
            margin = float(best.values[0] - best.values[1])
            if margin < 1e-3:
                raise RuntimeError(f"token {len(ids) + len(tokens)} is a near-tie (margin {margin}): change the prompt")
            step = [int(best.indices[0])]
            tokens += step
    return tokens


@functools.cache
def hf_model(folder: Path) -> Any:
    """transformers' model of a folder, in float32."""
    _quieten()
    model, info = transformers.Qwen4ExpForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    if info["missing_keys"] or info["mismatched_keys"]:
        raise RuntimeError(f"transformers made up weights of {folder.name}: {info}")
    return model.eval()


def _quieten() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def randomise(model: Any, seed: int) -> None:
    """Weights that leave no term idle: norms off their neutral value, n-gram convolutions off zero, gates that vary."""
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.05, 4.0, generator=generator).log())
            elif name.endswith("dt_bias"):
                normal(parameter, 1.0)
            elif name.endswith("linear_attn.norm.weight"):
                normal(parameter, 0.2, mean=1.0)
            elif "norm" in name:
                normal(parameter, 0.2)
            elif "embed" in name:
                normal(parameter, 1.0)
            elif "conv1d" in name:
                normal(parameter, 0.5)
            elif name == "lm_head.weight":
                normal(parameter, 3.0 / math.sqrt(parameter.shape[-1]))
            else:
                normal(parameter, 1.5 / math.sqrt(parameter.shape[-1]))


def _save_multimodal(model: Any, folder: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        name = name if name.startswith("lm_head") else name.replace("model.", "model.language_model.", 1)
        if name.endswith("ngram_embedding.weight"):
            for shard, rows in enumerate(tensor.chunk(model.config.split_ngram_parts)):
                tensors[name.replace("ngram_embedding.", f"ngram_embedding.shard_{shard}.")] = rows.clone()
        else:
            tensors[name] = tensor.contiguous()
    tensors |= {name: torch.ones(2, 3) for name in UNSERVED_NAMES}

    folder.mkdir()
    names = sorted(tensors)
    shards = [names[0::3], names[1::3], names[2::3]]
    weight_map: dict[str, str] = {}
    for number, members in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensors[name] for name in members}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(members, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    dtype = str(model.dtype).removeprefix("torch.")
    text_config = model.config.to_dict() | {"layer_types": BASE["layer_types"], "dtype": dtype}
    config = transformers.Qwen4ExpConfig(text_config=text_config).to_dict() | {"text_config": text_config}
    config["architectures"] = ["Qwen4ExpForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config))
