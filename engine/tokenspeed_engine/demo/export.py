"""Writes a trained model as a Hugging Face folder, and reads one back."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .config import EOS_ID, IM_END_ID, PAD_ID, DemoConfig
from .model import DemoModel

WEIGHTS = "model.safetensors"
_TABLE = ".ngram_embedding.weight"


def checkpoint_tensors(model: DemoModel) -> dict[str, Tensor]:
    """All tensors by checkpoint name, on the CPU: floats as bfloat16, hash constants int64, n-gram table in shards."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if value.is_floating_point():
            value = value.to(torch.bfloat16)
        if name.endswith(_TABLE):
            stem = name.removesuffix("weight")
            for part, shard in enumerate(value.chunk(model.config.split_ngram_parts)):
                tensors[f"{stem}shard_{part}.weight"] = shard.contiguous()
        else:
            tensors[name] = value.contiguous()
    return tensors


def save_checkpoint(model: DemoModel, folder: Path) -> None:
    """Writes weights, config.json and generation_config.json into `folder`; the tokenizer is written on its own."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint_tensors(model), folder / WEIGHTS, metadata={"format": "pt"})
    _write_json(folder / "config.json", model.config.hugging_face())
    generation = {"do_sample": False, "eos_token_id": [EOS_ID, IM_END_ID], "pad_token_id": PAD_ID}
    _write_json(folder / "generation_config.json", generation)


def load_checkpoint(folder: Path, config: DemoConfig | None = None) -> DemoModel:
    """The model of a folder that `save_checkpoint` wrote, in float32. Raises on a missing or unknown tensor."""
    model = DemoModel(config or read_config(folder))
    tensors = load_file(folder / WEIGHTS)
    for name in [name for name in model.state_dict() if name.endswith(_TABLE)]:
        stem = name.removesuffix("weight")
        shards = [tensors.pop(f"{stem}shard_{part}.weight") for part in range(model.config.split_ngram_parts)]
        tensors[name] = torch.cat(shards)
    model.load_state_dict(tensors)
    return model


def read_config(folder: Path) -> DemoConfig:
    """The hyperparameters in config.json."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    values = {name: text[name] for name in DemoConfig.__dataclass_fields__ if name in text}
    values["ple_layer_ids"] = tuple(text["ple_layer_ids"])
    rope = text["rope_parameters"]
    return DemoConfig(**values | {key: rope[key] for key in ("partial_rotary_factor", "rope_theta")})


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
