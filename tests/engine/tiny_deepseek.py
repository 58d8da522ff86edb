"""Tiny random `deepseek_v3` checkpoints, written by transformers, and transformers' answers to them in float32.

A checkpoint is made once a process; its folder goes away with the process.
"""

import functools
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

PLAIN_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

BASE: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-2,  # so large that it differs from that of the latents' norms, always 1e-6
    "rope_parameters": YARN,
    "max_position_embeddings": 512,
    "eos_token_id": 3,
}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "plain_rope": {"rope_parameters": PLAIN_ROPE},
    "no_q_lora": {"q_lora_rank": None},
    "no_groups": {"n_group": 1, "topk_group": 1},
    "bare": {"rope_parameters": PLAIN_ROPE, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    # Two mscales, so that cosine and sine have a factor beside that of the softmax.
    "two_mscales": {"rope_parameters": dict(YARN) | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    # As Kimi-K2: no groups, one turn for both ends of the blend.
    "one_beta": {"n_group": 1, "topk_group": 1, "rope_parameters": dict(YARN) | {"beta_fast": 1.0}},
    "no_mscale": {"rope_parameters": {key: YARN[key] for key in YARN if "mscale" not in key}},
    "pairs_in_halves": {"rope_interleave": False},
    "raw_router_weights": {"norm_topk_prob": False, "first_k_dense_replace": 0},
    "all_dense": {"first_k_dense_replace": 3},
    "tied": {"tie_word_embeddings": True},
}

_scratch = tempfile.TemporaryDirectory(prefix="tiny-deepseek-v3-")


@functools.cache
def tiny_checkpoint(variant: str = "default", dtype: torch.dtype = torch.float32) -> Path:
    """The folder of a variant's checkpoint, its weights stored in `dtype`. Read only: others use it too."""
    folder = Path(_scratch.name) / f"{variant}-{str(dtype).removeprefix('torch.')}"
    _quieten()
    config = transformers.DeepseekV3Config(**(dict(BASE) | dict(VARIANTS[variant])))
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    _randomise(model, seed=sum(variant.encode()))
    model.to(dtype).save_pretrained(folder)
    return folder


@functools.cache
def hf_model(folder: Path) -> Any:
    """transformers' model of a folder, in float32."""
    _quieten()
    model, info = transformers.DeepseekV3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    if info["missing_keys"] or info["mismatched_keys"]:
        raise RuntimeError(f"transformers made up weights of {folder.name}: {info}")
    return model.eval()


def hf_logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab] float32: transformers' logits after each token of `ids`, in one uncached pass."""
    with torch.no_grad():
        logits: torch.Tensor = hf_model(folder)(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def hf_greedy(folder: Path, ids: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that transformers adds to `ids`, EOS or not.

    Raises RuntimeError where the best two logits are so close that another order of summing could swap them.
    """
    tokens = list(ids)
    for _ in range(count):
        best = hf_logits(folder, tokens)[-1].topk(2)
        margin = float(best.values[0] - best.values[1])
        if margin < 1e-3:
            raise RuntimeError(f"token {len(tokens)} is a near-tie (margin {margin}): change the prompt")
        tokens.append(int(best.indices[0]))
    return tokens[len(ids) :]


def _quieten() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _randomise(model: Any, seed: int) -> None:
    """Weights that leave no term idle: norms off 1, routing biases that decide, biased scores of both signs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))

    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            if name.endswith("e_score_correction_bias"):
                normal(parameter, 0.3, mean=-0.5)
            elif "norm" in name:
                normal(parameter, 0.2, mean=1.0)
            elif "embed" in name:
                normal(parameter, 1.0)
            elif name == "lm_head.weight":
                normal(parameter, 3.0 / math.sqrt(parameter.shape[-1]))
            else:
                normal(parameter, 1.5 / math.sqrt(parameter.shape[-1]))
