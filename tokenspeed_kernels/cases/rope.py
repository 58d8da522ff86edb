"""Inputs for rotary position embedding."""

from typing import Any

import torch

from tokenspeed_kernels.cases import FLOATS
from tokenspeed_kernels.cases.paging import strided
from tokenspeed_registry.cases import CaseSet, Make, Params


def _rope(p: Params, make: Make) -> dict[str, Any]:
    x = make.normal(p["tokens"], p["heads"], p["dim"], dtype=p["dtype"])
    half = min(p["half"], p["dim"] // 2)
    return {
        "x": strided(x) if p["strided"] else x,
        "positions": make.integers(p["tokens"], low=0, high=p["context"], dtype=torch.int64),
        "inv_freq": p["theta"] ** (-torch.arange(half, dtype=torch.float32) / half),
        "style": p["style"],
        "factor": p["factor"],
    }


_QWEN: dict[str, Any] = {"tokens": 512, "half": 32, "dtype": torch.bfloat16, "theta": 1e7}
_DEEPSEEK: dict[str, Any] = {"tokens": 512, "half": 32, "dtype": torch.bfloat16, "style": "interleaved"}

rope = CaseSet(
    axes={
        "tokens": [5, 0, 1, 17],
        "heads": [2, 1, 24],
        "dim": [16, 3, 64, 256],
        "half": [4, 1, 8, 32],
        "dtype": FLOATS,
        "style": ["neox", "interleaved"],
        "factor": [1.0, 1.3689],
        "theta": [1e4, 1e7],
        "context": [262144, 1, 8],
        "strided": [False, True],
    },
    build=_rope,
    edges=[
        {"dim": 256, "half": 32, "heads": 24, "dtype": torch.bfloat16, "theta": 1e7},
        {"dim": 64, "half": 32, "heads": 16, "dtype": torch.bfloat16, "style": "interleaved"},
    ],
    shrink=[{"tokens": 5}, {"tokens": 17, "dtype": torch.float16}],
    models={
        "qwen4_exp queries": _QWEN | {"heads": 24, "dim": 256},
        "qwen4_exp indexer": _QWEN | {"heads": 4, "dim": 128},
        "deepseek_v3 queries": _DEEPSEEK | {"heads": 16, "dim": 64},
        "deepseek_v3 key": _DEEPSEEK | {"heads": 1, "dim": 64, "strided": True},
    },
    sweeps={
        "qwen4_exp queries": [{"tokens": tokens} for tokens in (1, 32, 8192)],
        "deepseek_v3 queries": [{"tokens": tokens} for tokens in (32, 8192)],
    },
)
