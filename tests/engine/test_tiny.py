"""The tiny checkpoints leave no part of the model idle: each one, disturbed, changes what transformers answers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny import BASE, EOS, hf_greedy, hf_logits, tiny_checkpoint

IDS = [(7 * index * index + 3 * index + 5) % BASE["vocab_size"] for index in range(70)]
IDS[20] = EOS


def altered(
    folder: Path, tmp_path: Path, weights: Callable[[str, torch.Tensor], torch.Tensor], **config: object
) -> Path:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: weights(name, tensor) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def change_of_logits(folder: Path, other: Path) -> torch.Tensor:
    return (hf_logits(folder, IDS) - hf_logits(other, IDS)).abs().amax(-1)


@pytest.mark.parametrize(
    "part",
    [
        "ple.conv1d",
        "ple.value_proj",
        "ple.norm_conv",
        "hyper_connection_mixer.hc_norm",
        "attn_hyper_connection.block_inject_weight",
        "mlp_hyper_connection.hc_norm",
        "linear_attn.in_proj_a",
        "linear_attn.dt_bias",
        "linear_attn.conv1d",
        "self_attn.q_norm",
        "indexer.q_layernorm",
        "indexer.index_qk_proj",
        "mlp.shared_expert_gate",
        "mlp.experts.3.up_proj",
    ],
)
def test_each_weight_matters(tmp_path: Path, part: str) -> None:
    folder = tiny_checkpoint("default")
    noise = torch.Generator().manual_seed(0)

    def disturb(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + torch.randn(tensor.shape, generator=noise) if part in name else tensor

    assert change_of_logits(folder, altered(folder, tmp_path, disturb)).max() > 1e-2


def test_selection_is_sparse_just_past_the_budget(tmp_path: Path) -> None:
    folder = tiny_checkpoint("default")
    dense = altered(folder, tmp_path, lambda name, tensor: tensor, indexer_budget=400)
    change = change_of_logits(folder, dense)
    first = BASE["indexer_budget"] + BASE["indexer_compress_ratio"] - 1
    assert change[:first].max() == 0
    assert change[first:].max() > 1e-2


def test_eos_cuts_ngrams(tmp_path: Path) -> None:
    folder = tiny_checkpoint("default")
    elsewhere = altered(folder, tmp_path, lambda name, tensor: tensor, eos_token_id=IDS[40])
    assert change_of_logits(folder, elsewhere)[21:23].max() > 1e-2


def test_greedy_is_the_argmax_of_the_logits() -> None:
    folder = tiny_checkpoint("default")
    tokens = hf_greedy(folder, IDS, 6)
    logits = hf_logits(folder, [*IDS, *tokens])
    assert logits[len(IDS) - 1 : -1].argmax(-1).tolist() == tokens


def test_a_checkpoint_is_made_once() -> None:
    assert tiny_checkpoint("bigrams") is tiny_checkpoint("bigrams")
