"""Inputs for the gated residual."""

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.cases import FLOATS
from tokenspeed_registry.cases import CaseSet, Make, Params

_AXES: Params = {
    "tokens": [3, 0, 1, 17],
    "streams": [4, 1, 2],
    "hidden": [32, 9, 40],
    "dtype": FLOATS,
    # At 1e-3 the epsilon decides the norm.
    "magnitude": [1.0, 1e-3, 300.0],
}
_MIX_AXES: Params = {
    **_AXES,
    "rank": [8, 1, 5],
    "injects": [True, False],
    "eps": [1e-6, 1e-3],
    "weights": ["as x", "float8", "float8 unscaled"],
}
_CANCELLING = [{"cancels": True, "dtype": torch.bfloat16}]
_MODELS = {
    "qwen4_exp decode": {"tokens": 32, "streams": 4, "hidden": 2560, "dtype": torch.bfloat16},
    "qwen4_exp prefill": {"tokens": 8192, "streams": 4, "hidden": 2560, "dtype": torch.bfloat16},
}
_MIX_MODELS = {name: {**params, "rank": 320} for name, params in _MODELS.items()}
_SWEEPS: dict[str, list[Params]] = {
    "qwen4_exp decode": [{"tokens": tokens} for tokens in (1, 4, 8, 32, 128)],
    "qwen4_exp prefill": [{"tokens": tokens} for tokens in (1024, 8192)],
}
_MIX_SWEEPS: dict[str, list[Params]] = {
    **_SWEEPS,
    "qwen4_exp decode": [
        *_SWEEPS["qwen4_exp decode"],
        *({"tokens": tokens, "weights": "float8"} for tokens in (1, 4, 32)),
    ],
}


def _streams(p: Params, make: Make) -> Tensor:
    """Streams of different size, which one mean over all of them would not normalise."""
    x = make.normal(p["tokens"], p["streams"], p["hidden"], scale=p["magnitude"])
    return (x * torch.arange(1, p["streams"] + 1).view(1, -1, 1)).to(p["dtype"])


def _weights(p: Params, make: Make) -> dict[str, Any]:
    """Projections that leave their outputs of size one, where silu and sigmoid bend most."""
    width = p["streams"] * p["hidden"]
    gates = p["streams"] if p["injects"] else 0
    # The inputs are divided by the number of streams before silu and sigmoid.
    scale = p["streams"] * width**-0.5
    arguments: dict[str, Any] = {
        "norm_weight": make.normal(p["streams"], p["hidden"], dtype=p["dtype"], scale=0.3),
        "w_down": make.normal(p["rank"], width, dtype=p["dtype"], scale=scale),
        "w_up": make.normal(width, p["rank"], dtype=p["dtype"], scale=2 * p["rank"] ** -0.5),
        "w_inject": make.normal(gates, width, dtype=p["dtype"], scale=scale),
        "eps": p["eps"],
    }
    if p["weights"] != "as x":
        for weight, factor in (("w_down", "down_scale"), ("w_up", "up_scale")):
            rows = arguments[weight].float()
            if p["weights"] == "float8":
                arguments[factor] = rows.abs().amax(1).clamp_min(1e-6) / 448
                rows = rows / arguments[factor][:, None]
            arguments[weight] = rows.to(torch.float8_e4m3fn)
    return arguments


def _injection(p: Params, make: Make) -> dict[str, Any]:
    x = _streams(p, make)
    y = make.normal(p["tokens"], p["hidden"], dtype=p["dtype"], scale=p["magnitude"])
    inject = make.uniform(p["tokens"], p["streams"], low=0.0, high=2.0)
    if p["cancels"] and p["dtype"] == torch.bfloat16:
        # What remains is what rounding took from the product. float32 would leave only its own rounding errors, and
        # float16 subnormal numbers.
        x = -(inject.unsqueeze(-1) * y.float().unsqueeze(1)).to(p["dtype"])
    return {"x": x, "y": y, "inject": inject}


_MANY = [
    {"tokens": tokens, "dtype": dtype}
    for tokens in (65, 300)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
"""Kernels take many tokens another way than few."""
_OF_MODEL: list[Params] = [
    *(
        {"tokens": tokens, "hidden": 2560, "rank": 320, "weights": weights, "injects": injects, "dtype": torch.bfloat16}
        for tokens, weights, injects in ((1, "as x", True), (4, "float8", True), (8, "float8 unscaled", False))
    ),
    *({"tokens": tokens, "hidden": 256, "rank": 320, "dtype": torch.bfloat16} for tokens in (512, 601)),
]
"""What kernels for the model's own widths serve."""

residual_mix = CaseSet(
    axes=_MIX_AXES,
    build=lambda p, make: {"x": _streams(p, make), **_weights(p, make)},
    edges=[*_MANY, *_OF_MODEL],
    shrink=[{"tokens": 3}, {"tokens": 17, "dtype": torch.float16}],
    models=_MIX_MODELS,
    sweeps=_MIX_SWEEPS,
)

residual_inject = CaseSet(
    axes={**_AXES, "cancels": [False, True]},
    build=_injection,
    edges=_CANCELLING,
    shrink=[{"tokens": 3}, {"tokens": 17, "dtype": torch.float16}],
    models=_MODELS,
    sweeps=_SWEEPS,
)

residual_inject_mix = CaseSet(
    axes={**_MIX_AXES, "cancels": [False, True]},
    build=lambda p, make: {**_injection(p, make), **_weights(p, make)},
    edges=[*_CANCELLING, *_MANY, *_OF_MODEL],
    shrink=[{"tokens": 3}, {"tokens": 17, "dtype": torch.float16}],
    models=_MIX_MODELS,
    sweeps=_MIX_SWEEPS,
)
