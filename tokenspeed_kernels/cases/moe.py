"""Inputs for mixture of experts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.cases.paging import strided
from tokenspeed_registry.cases import CaseSet, Make, Params
from tokenspeed_registry.conformance import error_of

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
QWEN4 = {"hidden": 2560, "inter": 640, "experts": 512, "top_k": 10}
DEEPSEEK = {"hidden": 7168, "inter": 2048, "experts": 256, "top_k": 8}


def _moe_route(p: Params, make: Make) -> dict[str, Any]:
    logits = make.normal(p["tokens"], p["experts"], scale=p["spread"])
    if p["ties"]:  # whole numbers from few: most choices are among equals
        logits = (logits / p["spread"]).round()
    logits = logits.to(p["dtype"])
    return {
        "logits": strided(logits) if p["strided"] else logits,
        "top_k": min(p["top_k"], p["experts"]),
        "renormalise": p["renormalise"],
    }


def _route_error(arguments: Mapping[str, Any], got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Any experts will do whose logits are, place by place, those of the best; their weights are then determined."""
    logits, top_k = arguments["logits"].double(), arguments["top_k"]
    weights, experts = got[0].double(), got[1].long()
    if weights.shape != wanted[0].shape or experts.shape != wanted[1].shape:
        return float("inf")
    in_range = bool(((experts >= 0) & (experts < logits.shape[1])).all())
    ordered = experts.sort(dim=-1).values
    if not in_range or bool((ordered.diff(dim=-1) == 0).any()):
        return float("inf")
    best = logits.sort(dim=-1, descending=True).values[:, :top_k]
    # A difference of logits is a relative difference of probabilities, and so comparable with that of the weights.
    misplaced = float((logits.gather(1, experts) - best).abs().max()) if experts.numel() else 0.0
    return max(misplaced, error_of(weights, wanted[0]))


moe_route = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17],
        "experts": [8, 1, 60, 512],
        "top_k": [2, 1, 8, 10],
        "renormalise": [True, False],
        "spread": [3.0, 1000.0],
        "ties": [False, True],
        "dtype": FLOATS,
        "strided": [False, True],
    },
    build=_moe_route,
    edges=[{"experts": 8, "top_k": 8}, {"tokens": 33, "experts": 512, "top_k": 10, "ties": True}],
    models={
        "qwen4_exp decode": {"tokens": 32, "experts": 512, "top_k": 10, "dtype": torch.bfloat16},
        "qwen4_exp prefill": {"tokens": 8192, "experts": 512, "top_k": 10, "dtype": torch.bfloat16},
        "deepseek_v3 decode": {"tokens": 32, "experts": 256, "top_k": 8},
    },
    compare=_route_error,
)


def _moe_experts(p: Params, make: Make) -> dict[str, Any]:
    tokens, hidden, inter, experts, top_k = (p[name] for name in ("tokens", "hidden", "inter", "experts", "top_k"))
    dtype = p["dtype"]
    x = make.normal(tokens, hidden, dtype=dtype)
    weights = make.uniform(tokens, top_k, low=0.0, high=1.0)
    # Distinct experts a token, but for the case where there are too few.
    ids = torch.argsort(make.uniform(tokens, max(experts, top_k), low=0.0, high=1.0), dim=-1)[:, :top_k] % experts
    match p["ids"]:
        case "crowded":
            ids = torch.full((tokens, top_k), experts - 1)
        case "padded":  # anywhere in a row, and whole rows, whose inputs are then not to be read
            gone = make.integers(tokens, top_k, low=0, high=3) == 0
            gone[::3] = True
            ids[gone] = -1
            weights[gone] = torch.nan
            x[gone.all(dim=-1)] = torch.nan
        case "none":
            ids.fill_(-1)
    return {
        "x": strided(x) if p["strided"] else x,
        "gate_up": make.normal(experts, 2 * inter, hidden, dtype=dtype, scale=hidden**-0.5),
        "down": make.normal(experts, hidden, inter, dtype=dtype, scale=inter**-0.5),
        "weights": weights,
        "ids": ids.int(),
    }


moe_experts = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17, 65],
        "hidden": [64, 24, 136],
        "inter": [32, 8, 40],
        "experts": [8, 1, 33],
        "top_k": [2, 1, 5],
        "dtype": FLOATS,
        "ids": ["distinct", "crowded", "padded", "none"],
        "strided": [False, True],
    },
    build=_moe_experts,
    edges=[{"tokens": 65, "ids": "padded"}, {"experts": 1, "top_k": 5}],
    models={
        "qwen4_exp decode": {"tokens": 32, **QWEN4, "dtype": torch.bfloat16},
        "qwen4_exp prefill": {"tokens": 8192, **QWEN4, "dtype": torch.bfloat16},
        "deepseek_v3 decode, 32 of 256 experts": {"tokens": 32, **DEEPSEEK, "experts": 32, "dtype": torch.bfloat16},
    },
)


def _silu_mul(p: Params, make: Make) -> dict[str, Any]:
    # A spread past the range where exp(-x) of a half would overflow.
    gate_up = make.normal(p["rows"], 2 * p["inter"], dtype=p["dtype"], scale=p["spread"])
    gate_up[:1] = 1.0  # results far below the smallest float16 need one of ordinary size to be measured by
    return {"gate_up": strided(gate_up) if p["strided"] else gate_up}


silu_mul = CaseSet(
    axes={
        "rows": [3, 0, 1, 17],
        "inter": [32, 1, 7, 640],
        "dtype": FLOATS,
        "spread": [2.0, 40.0],
        "strided": [False, True],
    },
    build=_silu_mul,
    models={
        "qwen4_exp shared expert, decode": {"rows": 32, "inter": 640, "dtype": torch.bfloat16},
        "deepseek_v3 dense, prefill": {"rows": 8192, "inter": 18432, "dtype": torch.bfloat16},
    },
)


def _sigmoid_mul(p: Params, make: Make) -> dict[str, Any]:
    x = make.normal(p["rows"], p["dim"], dtype=p["dtype"])
    gate = make.normal(p["rows"], 1 if p["one_gate"] else p["dim"], dtype=p["dtype"], scale=p["spread"])
    gate[:1], x[:1] = 1.0, 1.0  # as in silu_mul
    return {"x": strided(x), "gate": strided(gate)} if p["strided"] else {"x": x, "gate": gate}


sigmoid_mul = CaseSet(
    axes={
        "rows": [3, 0, 1, 17],
        "dim": [64, 1, 7, 256],
        "one_gate": [False, True],
        "dtype": FLOATS,
        "spread": [2.0, 40.0],
        "strided": [False, True],
    },
    build=_sigmoid_mul,
    models={
        "qwen4_exp attention gate, decode": {"rows": 32 * 24, "dim": 256, "dtype": torch.bfloat16},
        "qwen4_exp shared expert, decode": {"rows": 32, "dim": 2560, "one_gate": True, "dtype": torch.bfloat16},
    },
)
