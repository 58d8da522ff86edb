"""Inputs for dense projections with quantised weights."""

from typing import Any

import torch

from tokenspeed_kernels.cases.linear import FLOATS
from tokenspeed_kernels.cases.paging import strided
from tokenspeed_kernels.quantise import to_fp8_block, to_nvfp4
from tokenspeed_registry.cases import CaseSet, Make, Params


def _linear(p: Params, make: Make) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations, and weights of which rows and columns differ widely in size, so that each scale matters."""
    tokens, in_features, out_features = p["tokens"], p["in_features"], p["out_features"]
    x = make.normal(tokens, in_features, dtype=p["dtype"])
    weight = make.normal(out_features, in_features, scale=in_features**-0.5)
    weight *= 2.0 ** make.integers(out_features, 1, low=-3, high=4) * 2.0 ** make.integers(in_features, low=-3, high=4)
    return strided(x) if p["strided"] else x, weight


def _linear_fp8_block(p: Params, make: Make) -> dict[str, Any]:
    x, weight = _linear(p, make)
    quantised, scale = to_fp8_block(weight)
    return {"x": x, "weight": quantised, "scale": scale.to(p["scale_dtype"])}


linear_fp8_block = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17],
        "in_features": [200, 1, 37, 128, 129, 384],
        "out_features": [136, 1, 127, 128, 257],
        "scale_dtype": [torch.float32, torch.bfloat16],
        "dtype": FLOATS,
        "strided": [False, True],
    },
    build=_linear_fp8_block,
    edges=[{"in_features": 37, "tokens": 17, "dtype": dtype, "strided": True} for dtype in FLOATS],
    models={
        "deepseek_v3 query up, decode": {
            "tokens": 32,
            "in_features": 1536,
            "out_features": 24576,
            "dtype": torch.bfloat16,
        },
        "deepseek_v3 latent down, decode": {  # 576 rows are four and a half blocks
            "tokens": 32,
            "in_features": 7168,
            "out_features": 576,
            "dtype": torch.bfloat16,
        },
        "deepseek_v3 attention out, prefill": {
            "tokens": 8192,
            "in_features": 16384,
            "out_features": 7168,
            "dtype": torch.bfloat16,
        },
    },
)


def _linear_nvfp4(p: Params, make: Make) -> dict[str, Any]:
    x, weight = _linear(p, make)
    packed, scale, global_scale = to_nvfp4(weight)
    return {"x": x, "weight": packed, "scale": scale, "global_scale": global_scale}


linear_nvfp4 = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17],
        "in_features": [64, 16, 48, 272],
        "out_features": [40, 1, 17, 136],
        "dtype": FLOATS,
        "strided": [False, True],
    },
    build=_linear_nvfp4,
    edges=[{"tokens": 17, "in_features": 48, "dtype": dtype, "strided": True} for dtype in FLOATS],
    models={
        "deepseek_v3 shared expert gate and up, decode": {
            "tokens": 32,
            "in_features": 7168,
            "out_features": 4096,
            "dtype": torch.bfloat16,
        },
        "deepseek_v3 shared expert down, prefill": {
            "tokens": 8192,
            "in_features": 2048,
            "out_features": 7168,
            "dtype": torch.bfloat16,
        },
    },
)
