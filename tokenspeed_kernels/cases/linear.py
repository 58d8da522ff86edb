"""Inputs for dense projections and embedding rows."""

from typing import Any

import torch

from tokenspeed_kernels.cases import FLOATS
from tokenspeed_kernels.cases.paging import strided
from tokenspeed_registry.cases import CaseSet, Make, Params


def _linear(p: Params, make: Make) -> dict[str, Any]:
    x = make.normal(p["tokens"], p["in_features"], dtype=p["dtype"])
    weight_dtype = p["weight_dtype"] or p["dtype"]
    weight_scale = max(p["in_features"], 1) ** -0.5
    return {
        "x": strided(x) if p["strided"] else x,
        "weight": make.normal(p["out_features"], p["in_features"], dtype=weight_dtype, scale=weight_scale),
        "bias": make.normal(p["out_features"], dtype=weight_dtype) if p["bias"] else None,
        "dtype": p["out_dtype"],
    }


linear = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17],
        "in_features": [64, 1, 37, 272, 512],
        "out_features": [48, 1, 19, 256],
        "dtype": FLOATS,
        "weight_dtype": [None, *FLOATS],
        "out_dtype": [None, *FLOATS],
        "bias": [False, True],
        "strided": [False, True],
    },
    build=_linear,
    edges=[
        *({"tokens": 17, "in_features": 37, "dtype": dtype, "strided": True} for dtype in FLOATS),
        *(
            {"dtype": torch.bfloat16, "weight_dtype": torch.float32, "out_dtype": dtype, "bias": True}
            for dtype in FLOATS
        ),
        *({"dtype": dtype, "out_dtype": torch.float32, "bias": True} for dtype in (torch.bfloat16, torch.float16)),
    ],
    shrink=[{"tokens": 3, "out_features": 640}, {"tokens": 17, "out_features": 640, "strided": True}],
    models={
        "qwen4_exp language head": {
            "tokens": 32,
            "in_features": 2560,
            "out_features": 248320,
            "dtype": torch.bfloat16,
            "out_dtype": torch.float32,
        },
        "qwen4_exp delta rule inputs": {
            "tokens": 512,
            "in_features": 2560,
            "out_features": 10240,
            "dtype": torch.bfloat16,
        },
        "deepseek_v3 query up": {"tokens": 512, "in_features": 1536, "out_features": 3072, "dtype": torch.bfloat16},
        "deepseek_v3 router": {
            "tokens": 32,
            "in_features": 7168,
            "out_features": 256,
            "dtype": torch.bfloat16,
            "weight_dtype": torch.float32,
            "out_dtype": torch.float32,
        },
    },
    sweeps={
        "qwen4_exp language head": [{"tokens": tokens} for tokens in (1, 16, 32, 64)],
        "qwen4_exp delta rule inputs": [{"tokens": tokens} for tokens in (1, 4, 16, 64, 512, 8192)],
        "deepseek_v3 query up": [{"tokens": tokens} for tokens in (1, 16, 512)],
        "deepseek_v3 router": [{"tokens": tokens} for tokens in (1, 32, 512)],
    },
)


def _embedding(p: Params, make: Make) -> dict[str, Any]:
    ids = make.integers(p["tokens"], low=0, high=p["vocab"], dtype=torch.int64)
    if p["padding"]:
        ids[make.integers(p["tokens"], low=0, high=2) == 0] = -1
    table = make.normal(p["vocab"], p["hidden"], dtype=p["dtype"])
    used = torch.zeros(p["vocab"], dtype=torch.bool)
    used[ids[ids >= 0]] = True
    table[~used] = torch.nan
    return {"ids": ids, "table": table}


embedding = CaseSet(
    axes={
        "tokens": [5, 0, 1, 65],
        "vocab": [11, 1, 300],
        "hidden": [64, 1, 7],
        "dtype": FLOATS,
        "padding": [False, True],
    },
    build=_embedding,
    shrink=[{"tokens": 5, "vocab": 300}],
    models={"qwen4_exp tokens": {"tokens": 512, "vocab": 248320, "hidden": 2560, "dtype": torch.bfloat16}},
    sweeps={"qwen4_exp tokens": [{"tokens": tokens} for tokens in (1, 32, 8192)]},
)
