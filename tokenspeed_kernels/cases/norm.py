"""Inputs for root-mean-square normalisation."""

from typing import Any

import torch

from tokenspeed_kernels.cases import FLOATS
from tokenspeed_kernels.cases.paging import strided
from tokenspeed_registry.cases import CaseSet, Make, Params

_AXES: dict[str, list[Any]] = {
    "rows": [3, 0, 1, 17],
    "dim": [64, 1, 5, 256],
    "dtype": FLOATS,
    "weight_dtype": [torch.float32, torch.bfloat16],
    # Squares of 1e-4 are far below eps, those of 1e3 above the largest float16.
    "magnitude": [1.0, 1e-4, 1e3],
    "eps": [1e-6, 1e-2],
    "zero_centred": [False, True],
    "strided": [False, True],
}


def _arguments(p: Params, make: Make, *groups: int) -> dict[str, Any]:
    x = make.normal(p["rows"], *groups, p["dim"], dtype=p["dtype"], scale=p["magnitude"])
    return {
        "x": strided(x) if p["strided"] else x,
        "weight": make.normal(*groups, p["dim"], dtype=p["weight_dtype"]),
        "eps": p["eps"],
        "zero_centred": p["zero_centred"],
    }


rms_norm = CaseSet(
    axes=_AXES,
    build=lambda p, make: _arguments(p, make),
    edges=[{"magnitude": 0.0}, *({"dim": dim, "dtype": torch.bfloat16} for dim in (512, 2560, 7168, 10240))],
    shrink=[{"rows": 3}, {"rows": 17, "dtype": torch.float16}],
    models={
        "qwen4_exp query heads": {"rows": 24 * 512, "dim": 256, "dtype": torch.bfloat16, "zero_centred": True},
        "qwen4_exp draft hidden": {"rows": 512, "dim": 10240, "dtype": torch.bfloat16, "zero_centred": True},
        "deepseek_v3 layer": {"rows": 512, "dim": 7168, "dtype": torch.bfloat16},
        "deepseek_v3 latent": {"rows": 512, "dim": 512, "dtype": torch.bfloat16, "strided": True},
    },
    sweeps={
        "qwen4_exp query heads": [{"rows": rows} for rows in (24, 24 * 32, 24 * 8192)],
        "deepseek_v3 layer": [{"rows": rows} for rows in (1, 32, 8192)],
    },
)


def _add_rms_norm(p: Params, make: Make) -> dict[str, Any]:
    residual = make.normal(p["rows"], p["dim"], dtype=p["dtype"], scale=p["magnitude"])
    return _arguments(p, make) | {"residual": strided(residual) if p["strided"] else residual}


add_rms_norm = CaseSet(
    axes=_AXES,
    build=_add_rms_norm,
    edges=rms_norm.edges,
    shrink=[{"rows": 3}, {"rows": 17, "dtype": torch.float16}],
    models={
        "deepseek_v3 layer": {"rows": 512, "dim": 7168, "dtype": torch.bfloat16},
        "deepseek_v3 decode": {"rows": 32, "dim": 7168, "dtype": torch.bfloat16},
    },
    sweeps={
        "deepseek_v3 layer": [{"rows": rows} for rows in (512, 8192)],
        "deepseek_v3 decode": [{"rows": rows} for rows in (1, 32)],
    },
)

grouped_rms_norm = CaseSet(
    axes=_AXES | {"groups": [4, 1, 3]},
    build=lambda p, make: _arguments(p, make, p["groups"]),
    edges=[{"magnitude": 0.0}, {"dim": 2560, "dtype": torch.bfloat16, "zero_centred": True}],
    shrink=[{"rows": 3}, {"rows": 17, "dtype": torch.float16}],
    models={
        "qwen4_exp streams": {"rows": 512, "groups": 4, "dim": 2560, "dtype": torch.bfloat16, "zero_centred": True}
    },
    sweeps={"qwen4_exp streams": [{"rows": rows} for rows in (1, 32, 512, 8192)]},
)
