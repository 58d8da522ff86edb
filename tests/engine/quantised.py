"""Quantised twins of tiny `qwen4_exp` checkpoints: one in a quantised layout, one with the values that it stands for.

The second is what the first must compute, exactly the same maths on numbers that no longer need a scale.
"""

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny import tiny_checkpoint
from tokenspeed_kernels.quantise import from_fp8_block, from_nvfp4, to_fp8_block, to_nvfp4

Format = Literal["fp8", "nvfp4"]
Parts = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors on disk by the end of their names, and the values that they stand for."""

_scratch = tempfile.TemporaryDirectory(prefix="tiny-quantised-")


@functools.cache
def quantised_twins(format: Format, variant: str = "default") -> tuple[Path, Path]:
    """Folders of the quantised checkpoint and of its plain twin: experts in `format`, the n-gram table in FP8."""
    source = tiny_checkpoint(variant)
    tensors = load_file(source / "model.safetensors")
    quantise = _fp8 if format == "fp8" else _nvfp4
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    scales = _table_scales(tensors)
    for name, tensor in tensors.items():
        if ".experts." in name:
            parts, values[name] = quantise(tensor)
            stored |= {f"{name.removesuffix('.weight')}.{end}": part for end, part in parts.items()}
        elif ".ngram_embedding.shard_" in name:
            scale = scales[f"{name.partition('.shard_')[0]}.weight_scale"].float()
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            values[name] = stored[name].float() * scale
        else:
            stored[name] = values[name] = tensor
    quantisation: dict[str, object] = (
        {"quant_method": "fp8", "weight_block_size": [128, 128]}
        if format == "fp8"
        else {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    )
    return (
        _save(source, stored | scales, f"{variant}-{format}", quantisation),
        _save(source, values, f"{variant}-{format}-values", None),
    )


def _table_scales(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One scale a table, in bfloat16, such that its largest element fits."""
    largest: dict[str, float] = {}
    for name, tensor in tensors.items():
        if ".ngram_embedding.shard_" in name:
            table = name.partition(".shard_")[0]
            largest[table] = max(largest.get(table, 0.0), float(tensor.abs().max()))
    return {f"{table}.weight_scale": torch.tensor([value / 400]).bfloat16() for table, value in largest.items()}


def _fp8(weight: torch.Tensor) -> Parts:
    elements, scale = to_fp8_block(weight)
    stored = scale.bfloat16()
    return {"weight": elements, "weight_scale_inv": stored}, from_fp8_block(elements, stored)


def _nvfp4(weight: torch.Tensor) -> Parts:
    codes, scale, global_scale = to_nvfp4(weight)
    parts = {
        "weight": codes,
        "weight_scale": scale,
        "weight_scale_2": global_scale.view(()),
        "input_scale": torch.tensor(0.5),
    }
    return parts, from_nvfp4(codes, scale, global_scale)


def _save(source: Path, tensors: dict[str, torch.Tensor], name: str, quantisation: dict[str, object] | None) -> Path:
    folder = Path(_scratch.name) / name
    shutil.copytree(source, folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if quantisation is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return folder
