"""Inputs for experts with quantised weights."""

from typing import Any

import torch

from tokenspeed_kernels.cases import FLOATS
from tokenspeed_kernels.cases.linear_quantised import fp8_block_weight, nvfp4_weight
from tokenspeed_kernels.cases.moe import DEEPSEEK, IDS, QWEN4, SHRINK, SWEEPS, count_hits, routed_tokens
from tokenspeed_registry.cases import CaseSet, Make, Params

MODELS = {
    "qwen4_exp decode": {"tokens": 32, **QWEN4, "dtype": torch.bfloat16},
    "qwen4_exp prefill": {"tokens": 8192, **QWEN4, "dtype": torch.bfloat16},
    "deepseek_v3 decode, 32 of 256 experts": {
        "tokens": 32,
        **DEEPSEEK,
        "experts": 32,
        "first_expert": 96,
        "dtype": torch.bfloat16,
    },
}


_WIDE = {"hidden": 2560, "inter": 640, "dtype": torch.bfloat16, "ids": "padded"}
_OF_MODEL: list[Params] = [
    *({"tokens": tokens, "experts": 4, **_WIDE} for tokens in (1, 8)),
    {"tokens": 5, "experts": 3, "first_expert": 3, **_WIDE, "ids": "crowded"},
    {"tokens": 3100, "hidden": 256, "inter": 128, "experts": 9, "dtype": torch.bfloat16},
    {"tokens": 3072, "hidden": 256, "inter": 256, "experts": 8, "dtype": torch.bfloat16, "ids": "padded", "top_k": 5},
]
"""What kernels for a model's own widths serve, and kernels for many tokens."""


def _fp8_block(p: Params, make: Make) -> dict[str, Any]:
    experts, inter, hidden = p["experts"], p["inter"], p["hidden"]
    gate_up, gate_up_scale = fp8_block_weight(make, experts, 2, inter, hidden, scale_dtype=p["scale_dtype"])
    down, down_scale = fp8_block_weight(make, experts, hidden, inter, scale_dtype=p["scale_dtype"])
    return {
        **routed_tokens(p, make),
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "down": down,
        "down_scale": down_scale,
    }


moe_experts_fp8_block = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17],
        "hidden": [136, 37, 128, 260],
        "inter": [132, 8, 128, 39],
        "experts": [4, 1, 9],
        "top_k": [2, 1, 5],
        "first_expert": [0, 3],
        "scale_dtype": [torch.float32, torch.bfloat16],
        "dtype": FLOATS,
        "ids": IDS,
        "strided": [False, True],
    },
    build=_fp8_block,
    edges=[
        {"tokens": 17, "ids": "padded", "first_expert": 3, "dtype": torch.bfloat16},
        {"tokens": 17, "hidden": 37, "dtype": torch.bfloat16, "strided": True},
        *_OF_MODEL,
    ],
    shrink=SHRINK,
    counts=count_hits,
    models=MODELS,
    sweeps=SWEEPS,
)


def _nvfp4(p: Params, make: Make) -> dict[str, Any]:
    experts, inter, hidden = p["experts"], p["inter"], p["hidden"]
    gate_up, gate_up_scale = nvfp4_weight(make, experts, 2, inter, hidden)
    down, down_scale = nvfp4_weight(make, experts, hidden, inter)
    return {
        **routed_tokens(p, make),
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "gate_up_global_scale": make.uniform(experts, 2, low=0.5, high=1.5) * (hidden**-0.5 / 3),
        "down": down,
        "down_scale": down_scale,
        "down_global_scale": make.uniform(experts, low=0.5, high=1.5) * (inter**-0.5 / 3),
    }


moe_experts_nvfp4 = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17],
        "hidden": [64, 16, 48, 144],
        "inter": [32, 16, 80],
        "experts": [4, 1, 9],
        "top_k": [2, 1, 5],
        "first_expert": [0, 3],
        "dtype": FLOATS,
        "ids": IDS,
        "strided": [False, True],
    },
    build=_nvfp4,
    edges=[{"tokens": 17, "ids": "padded", "first_expert": 3, "dtype": torch.bfloat16}, *_OF_MODEL],
    shrink=SHRINK,
    counts=count_hits,
    models=MODELS,
    sweeps=SWEEPS,
)
