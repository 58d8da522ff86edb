"""Inputs for mixture of experts."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.cases import FLOATS
from tokenspeed_kernels.cases.paging import strided
from tokenspeed_registry.cases import CaseSet, Make, Params
from tokenspeed_registry.conformance import error_of

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
    shrink=[{"tokens": 3}],
    models={
        "qwen4_exp decode": {"tokens": 32, "experts": 512, "top_k": 10, "dtype": torch.bfloat16},
        "qwen4_exp prefill": {"tokens": 8192, "experts": 512, "top_k": 10, "dtype": torch.bfloat16},
        "deepseek_v3 decode": {"tokens": 32, "experts": 256, "top_k": 8},
    },
    sweeps={"qwen4_exp decode": [{"tokens": 1}, {"tokens": 32}], "qwen4_exp prefill": [{"tokens": 8192}]},
    compare=_route_error,
)


def _moe_route_grouped(p: Params, make: Make) -> dict[str, Any]:
    experts = p["groups"] * p["group"]
    logits = make.normal(p["tokens"], experts, scale=p["spread"])
    bias = make.normal(experts, scale=0.3) + p["bias"]
    if p["ties"]:  # few different values: most choices, and with them groups, are among equals
        logits, bias = (logits / p["spread"]).round(), torch.full_like(bias, p["bias"])
    top_groups = min(p["top_groups"], p["groups"])
    return {
        "logits": strided(logits) if p["strided"] else logits,
        "bias": bias,
        "top_k": min(p["top_k"], top_groups * p["group"]),
        "groups": p["groups"],
        "top_groups": top_groups,
        "renormalise": p["renormalise"],
        "scaling": p["scaling"],
    }


def _grouped_error(arguments: Mapping[str, Any], got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Any experts will do that are the best, place by place, of some `top_groups` groups as good as the best ones.

    Choices are compared on the scale of the largest, to which their float32 sums are accurate; the weights then follow.
    """
    groups, top_groups, top_k = (arguments[name] for name in ("groups", "top_groups", "top_k"))
    weights, experts = got[0].double(), got[1].long()
    if weights.shape != wanted[0].shape or experts.shape != wanted[1].shape:
        return float("inf")
    scores = arguments["logits"].double().sigmoid()
    choice = scores + arguments["bias"].double()
    if bool(((experts < 0) | (experts >= choice.shape[1])).any()):
        return float("inf")
    if experts.numel() == 0:
        return 0.0
    if bool((experts.sort(dim=-1).values.diff(dim=-1) == 0).any()):
        return float("inf")
    grouped = choice.unflatten(1, (groups, -1))
    worth = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(dim=-1)
    least = worth.sort(dim=-1, descending=True).values[:, top_groups - 1]
    misplaced = torch.full((choice.shape[0],), torch.inf, dtype=torch.float64)
    for kept in itertools.combinations(range(groups), top_groups):
        worse = (least - worth[:, kept].amin(dim=-1)).clamp_min(0.0)
        best = grouped[:, kept].flatten(1).sort(dim=-1, descending=True).values[:, :top_k]
        apart = (choice.gather(1, experts) - best).abs().amax(dim=-1)
        misplaced = misplaced.minimum(worse.maximum(apart))
    right = scores.gather(1, experts)
    if arguments["renormalise"]:
        right = right / (right.sum(dim=-1, keepdim=True) + 1e-20)
    return max(float(misplaced.max() / choice.abs().max()), error_of(weights, right * arguments["scaling"]))


moe_route_grouped = CaseSet(
    axes={
        "tokens": [5, 0, 1, 33],
        "groups": [4, 1, 2, 8],
        "group": [4, 2, 8, 32],
        "top_groups": [2, 1, 4],
        "top_k": [3, 1, 8],
        "bias": [0.0, -5.0, 10.0],
        "renormalise": [True, False],
        "scaling": [2.5, 1.0],
        "spread": [2.0, 40.0],
        "ties": [False, True],
        "strided": [False, True],
    },
    build=_moe_route_grouped,
    edges=[
        {"tokens": 33, "groups": 8, "group": 32, "top_groups": 4, "top_k": 8},
        {"tokens": 33, "bias": -5.0},
        {"groups": 1, "group": 1, "top_k": 1},
        {"groups": 2, "group": 2, "top_groups": 1, "top_k": 2},
        {"tokens": 33, "ties": True},
    ],
    shrink=[{"tokens": 3}],
    models={
        "deepseek_v3 decode": {"tokens": 32, "groups": 8, "group": 32, "top_groups": 4, "top_k": 8},
        "deepseek_v3 prefill": {"tokens": 8192, "groups": 8, "group": 32, "top_groups": 4, "top_k": 8},
        "kimi_k2 decode": {"tokens": 32, "groups": 1, "group": 384, "top_groups": 1, "top_k": 8, "scaling": 2.827},
    },
    sweeps={"deepseek_v3 decode": [{"tokens": 32}], "deepseek_v3 prefill": [{"tokens": 8192}]},
    compare=_grouped_error,
)


def routed_tokens(p: Params, make: Make) -> dict[str, Any]:
    """The arguments of the experts' ops but for the matrices; NaN wherever nothing may be read."""
    tokens, hidden, experts, top_k, first = (
        p[name] for name in ("tokens", "hidden", "experts", "top_k", "first_expert")
    )
    x = make.normal(tokens, hidden, dtype=p["dtype"])
    weights = make.uniform(tokens, top_k, low=0.0, high=1.0)
    # Distinct experts a token, but for the case where there are too few. A share of all has others on both sides.
    everywhere = first + experts + (2 if first else 0)
    ids = torch.argsort(make.uniform(tokens, max(everywhere, top_k), low=0.0, high=1.0), dim=-1)[:, :top_k] % everywhere
    match p["ids"]:
        case "crowded":
            ids = torch.full((tokens, top_k), first + experts - 1)
        case "padded":  # anywhere in a row, and whole rows
            gone = make.integers(tokens, top_k, low=0, high=3) == 0
            gone[::3] = True
            ids[gone] = -1
        case "none":
            ids.fill_(-1)
    unused = (ids < first) | (ids >= first + experts)
    weights[unused] = torch.nan
    x[unused.all(dim=-1)] = torch.nan
    return {
        "x": strided(x) if p["strided"] else x,
        "weights": weights,
        "ids": ids.int(),
        "first_expert": first,
    }


def count_hits(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Of a call of an experts' op: pairs of a token and an expert that is here, and the experts in them."""
    places = arguments["ids"] - arguments["first_expert"]
    here = places[(places >= 0) & (places < arguments["down"].shape[0])]
    return {"pairs": here.numel(), "experts_hit": here.unique().numel()}


def _moe_experts(p: Params, make: Make) -> dict[str, Any]:
    hidden, inter, experts, dtype = (p[name] for name in ("hidden", "inter", "experts", "dtype"))
    return {
        **routed_tokens(p, make),
        "gate_up": make.normal(experts, 2 * inter, hidden, dtype=dtype, scale=hidden**-0.5),
        "down": make.normal(experts, hidden, inter, dtype=dtype, scale=inter**-0.5),
    }


IDS = ["distinct", "crowded", "padded", "none"]
# A whole expert of the largest model takes long: all of one width and little of the other.
SHRINK = [
    {"tokens": 1, "experts": 1, "inter": 128, "ids": "crowded"},
    {"tokens": 1, "experts": 1, "hidden": 128, "ids": "crowded"},
]

SWEEPS = {
    "qwen4_exp decode": [{"tokens": tokens} for tokens in (1, 4, 32, 128)],
    "qwen4_exp prefill": [{"tokens": tokens} for tokens in (1024, 8192)],
}
"""Of the experts' ops: weights pass through once, few tokens each; in prefill an expert has a matrix of them."""

moe_experts = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17, 65],
        "hidden": [64, 24, 37, 136],
        "inter": [32, 7, 8, 40],
        "experts": [8, 1, 33],
        "top_k": [2, 1, 5],
        "first_expert": [0, 3, 40],
        "dtype": FLOATS,
        "ids": IDS,
        "strided": [False, True],
    },
    build=_moe_experts,
    edges=[
        {"tokens": 65, "ids": "padded"},
        {"tokens": 65, "ids": "padded", "first_expert": 3, "dtype": torch.bfloat16},
        {"experts": 1, "top_k": 5},
    ],
    shrink=SHRINK,
    counts=count_hits,
    models={
        "qwen4_exp decode": {"tokens": 32, **QWEN4, "dtype": torch.bfloat16},
        "qwen4_exp prefill": {"tokens": 8192, **QWEN4, "dtype": torch.bfloat16},
        "deepseek_v3 decode, 32 of 256 experts": {
            "tokens": 32,
            **DEEPSEEK,
            "experts": 32,
            "first_expert": 96,
            "dtype": torch.bfloat16,
        },
    },
    sweeps=SWEEPS,
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
    shrink=[{"rows": 3}],
    models={
        "qwen4_exp shared expert, decode": {"rows": 32, "inter": 640, "dtype": torch.bfloat16},
        "deepseek_v3 dense, prefill": {"rows": 8192, "inter": 18432, "dtype": torch.bfloat16},
    },
    sweeps={
        "qwen4_exp shared expert, decode": [{"rows": 1}, {"rows": 32}],
        "deepseek_v3 dense, prefill": [{"rows": 8192}],
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
    shrink=[{"rows": 3}],
    models={
        "qwen4_exp attention gate, decode": {"rows": 32 * 24, "dim": 256, "dtype": torch.bfloat16},
        "qwen4_exp shared expert, decode": {"rows": 32, "dim": 2560, "one_gate": True, "dtype": torch.bfloat16},
    },
    sweeps={
        "qwen4_exp attention gate, decode": [{"rows": rows * 24} for rows in (1, 32, 8192)],
        "qwen4_exp shared expert, decode": [{"rows": 32}],
    },
)
