"""Inputs for dense projections with quantised weights."""

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.cases import FLOATS, FP8
from tokenspeed_kernels.cases.paging import strided
from tokenspeed_registry.cases import CaseSet, Make, Params


def fp8_block_weight(make: Make, *shape: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix, or a stack, with random scales: the mean square of a value is about 1/in."""
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    weight = make.normal(*shape, dtype=FP8, scale=32.0)
    return weight, make.uniform(*blocks, low=0.2, high=1.6, dtype=scale_dtype) * (shape[-1] ** -0.5 / 32)


def nvfp4_weight(make: Make, *shape: int) -> tuple[Tensor, Tensor]:
    """A matrix, or a stack, of random codes and scales: the mean square of a value without the global scale is 8."""
    # The bytes of Gaussian values, which are fast to draw, hold every code.
    packed = make.normal(*shape[:-1], shape[-1] // 8).view(torch.uint8)
    return packed, make.uniform(*shape[:-1], shape[-1] // 16, low=0.2, high=1.6).to(FP8)


def _x(p: Params, make: Make) -> Tensor:
    x = make.normal(p["tokens"], p["in_features"], dtype=p["dtype"])
    return strided(x) if p["strided"] else x


def _linear_fp8_block(p: Params, make: Make) -> dict[str, Any]:
    weight, scale = fp8_block_weight(make, p["out_features"], p["in_features"], scale_dtype=p["scale_dtype"])
    x = _x(p, make)
    if p["out_features"] == 1:  # a lone sum that cancels has no size to measure its error by
        x, weight = x.abs(), weight.float().abs().to(FP8)
    return {"x": x, "weight": weight, "scale": scale}


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
    shrink=[{"tokens": 3, "out_features": 136}, {"tokens": 17, "out_features": 136, "strided": True}],
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
    sweeps={
        "deepseek_v3 query up, decode": [{"tokens": tokens} for tokens in (1, 4, 16, 64, 512)],
        "deepseek_v3 latent down, decode": [{"tokens": tokens} for tokens in (1, 4, 16, 64)],
        "deepseek_v3 attention out, prefill": [{"tokens": tokens} for tokens in (1, 16, 512, 8192)],
    },
)


def _linear_nvfp4(p: Params, make: Make) -> dict[str, Any]:
    weight, scale = nvfp4_weight(make, p["out_features"], p["in_features"])
    x = _x(p, make)
    if p["out_features"] == 1:  # as above; 0x77 leaves the sign bits out
        x, weight = x.abs(), weight & 0x77
    global_scale = make.uniform(1, low=0.5, high=1.5) * (p["in_features"] ** -0.5 / 3)
    return {"x": x, "weight": weight, "scale": scale, "global_scale": global_scale}


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
    shrink=[{"tokens": 3, "out_features": 136}],
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
    sweeps={
        "deepseek_v3 shared expert gate and up, decode": [{"tokens": tokens} for tokens in (1, 4, 16, 64, 512)],
        "deepseek_v3 shared expert down, prefill": [{"tokens": tokens} for tokens in (1, 16, 512, 8192)],
    },
)
