"""Inputs for sampling, and what of a sampled id can be held against a kernel."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.sampling import kept_tokens
from tokenspeed_registry.cases import CaseSet, Make, Params

_LARGEST_UNIFORM = 1 - 2**-24
"""The largest float32 below 1."""


def _logits(p: Params, make: Make) -> Tensor:
    """Rows of the kinds named: usual; rounded, with many ties; flat; with one token far ahead; with NaN or −inf."""
    batch, vocab, kind = p["batch"], p["vocab"], p["kind"]
    logits = make.normal(batch, vocab, scale=3.0)
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.full_like(logits, -7.0)
    elif kind == "peaked":
        logits = logits * 40
    elif kind == "masked":
        logits[make.integers(batch, vocab, low=0, high=2) == 0] = -torch.inf
    elif kind == "nan":
        logits[make.integers(batch, vocab, low=0, high=4) == 0] = torch.nan
        logits[::2] = torch.nan  # whole rows, between good ones
    elif kind == "infinite":
        logits[make.integers(batch, vocab, low=0, high=4) == 0] = torch.inf
    return logits


def _choose(p: Params, make: Make, name: str, dtype: torch.dtype) -> Tensor:
    """One value for all rows, or a different one of `choices` for each."""
    choices: list[float] = p[name]
    return torch.tensor([make.random.choice(choices) for _ in range(p["batch"])], dtype=dtype)


def _sample(p: Params, make: Make) -> dict[str, Any]:
    uniform = make.uniform(p["batch"], low=0.0, high=1.0).clamp_max(_LARGEST_UNIFORM)
    if p["uniform"] == "ends":
        uniform = torch.where(uniform < 0.5, 0.0, _LARGEST_UNIFORM)
    return {
        "logits": _logits(p, make),
        "temperature": _choose(p, make, "temperature", torch.float32),
        "top_k": _choose(p, make, "top_k", torch.int32),
        "top_p": _choose(p, make, "top_p", torch.float32),
        "uniform": uniform,
    }


def _distance(arguments: Mapping[str, Any], got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """How far the cumulative probabilities would have to move, at most over the rows, for each id to be right.

    An id is right where its interval of the cumulative distribution holds the row's uniform number. A kernel's
    float32 sums move the ends of the intervals, and, where a cumulative probability comes close to top_p, the number
    of tokens kept. Nothing moves the order of the logits, so greedy rows, rows without a token left and tokens that
    top-k or −inf drop, or whose probability is 0, allow no distance at all.
    """
    if got[0].shape != wanted[0].shape or got[0].dtype != torch.int64:
        return math.inf
    rows = zip(*(arguments[name] for name in ("logits", "temperature", "top_k", "top_p", "uniform")), strict=True)
    distances = (
        _row_distance(int(token), logits, float(temperature), int(top_k), float(top_p), float(uniform))
        for token, (logits, temperature, top_k, top_p, uniform) in zip(got[0], rows, strict=True)
    )
    return max(distances, default=0.0)


def _row_distance(token: int, logits: Tensor, temperature: float, top_k: int, top_p: float, uniform: float) -> float:
    order, probabilities = kept_tokens(logits, temperature, top_k)
    if not order:
        return 0.0 if token == 0 else math.inf
    if token not in order:
        return math.inf
    rank = order.index(token)
    if probabilities[rank] == 0:
        return math.inf
    bounds = [0.0, *itertools.accumulate(probabilities)]
    best = math.inf
    for kept in range(rank + 1, len(order) + 1):
        # Kept is exactly this many tokens if the mass before the last is short of top_p, and the mass with it is not.
        above = max(0.0, bounds[kept - 1] - top_p) if kept > 1 else 0.0
        below = max(0.0, top_p - bounds[kept]) if kept < len(order) else 0.0
        if top_p >= 1 and kept < len(order):
            continue
        low, high = bounds[rank] / bounds[kept], bounds[rank + 1] / bounds[kept]
        best = min(best, max(above, below, low - uniform, uniform - high))
    return best


def _logprobs_error(arguments: Mapping[str, Any], got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """The largest error of a log-probability, absolute up to 1 and relative above; ids must be equal.

    An error of a logarithm is a relative error of the probability, however close to 0 the logarithm is.
    """
    if not torch.equal(got[2], wanted[2]):
        return math.inf
    mine, theirs = (torch.cat([side[0].unsqueeze(1).double(), side[1].double()], 1) for side in (got, wanted))
    finite = theirs.isfinite()
    if not torch.equal(mine[~finite], theirs[~finite]) or not mine[finite].isfinite().all():
        return math.inf
    errors = (mine[finite] - theirs[finite]).abs() / theirs[finite].abs().clamp_min(1.0)
    return float(errors.max()) if errors.numel() else 0.0


def _logprobs(p: Params, make: Make) -> dict[str, Any]:
    ids = make.integers(p["batch"], low=0, high=p["vocab"], dtype=torch.int64)
    if p["padding"]:
        ids[make.integers(p["batch"], low=0, high=2) == 0] = -1
    return {"logits": _logits(p, make), "ids": ids, "top": min(p["top"], p["vocab"])}


_AXES = {"batch": [5, 0, 1, 33], "vocab": [50, 1, 2, 1000]}
_KINDS = ["usual", "ties", "flat", "peaked", "masked", "nan"]
_MODEL_VOCABULARIES = {"qwen4_exp": 248320, "deepseek_v3": 129280}

sample = CaseSet(
    axes={
        **_AXES,
        "kind": [*_KINDS, "infinite"],
        "temperature": [[1.0], [0.0], [0.3], [1e-30, 100.0], [0.0, 0.7]],
        "top_k": [[0], [1], [3], [2000, -1], [0, 1, 5, 40]],
        "top_p": [[1.0], [0.0], [0.5], [0.9, 1.5], [1e-6, 0.95, 1.0]],
        "uniform": ["random", "ends"],
    },
    build=_sample,
    edges=[
        {"batch": 33, "temperature": [0.7], "top_k": [20], "top_p": [0.95]},
        {"batch": 33, "temperature": [0.0], "top_p": [0.0]},
        {"batch": 33, "kind": "nan", "temperature": [0.0, 0.7], "top_k": [0, 5], "top_p": [0.9, 1.0]},
        {"batch": 33, "kind": "ties", "top_k": [4], "uniform": "ends"},
        {"batch": 33, "vocab": 1000, "kind": "flat", "top_p": [0.5, 0.9]},
        {"batch": 2, "vocab": 20000, "top_p": [0.9]},
    ],
    shrink=[{"batch": 1}],
    models={
        f"{model} decode": {"batch": 32, "vocab": vocab, "temperature": [0.7], "top_k": [20], "top_p": [0.95]}
        for model, vocab in _MODEL_VOCABULARIES.items()
    },
    sweeps={
        "qwen4_exp decode": [
            {"batch": batch, "top_k": [top_k]} for batch, top_k in ((1, 20), (32, 20), (128, 20), (1, 0), (32, 0))
        ]
    },
    compare=_distance,
)

logprobs = CaseSet(
    axes={**_AXES, "kind": _KINDS, "top": [3, 0, 1, 20], "padding": [False, True]},
    build=_logprobs,
    # Rounded logits hold zeros of both signs, which are equal.
    edges=[{"kind": "nan", "padding": True}, {"batch": 1, "kind": "peaked"}, {"kind": "ties", "top": 50}],
    shrink=[{"batch": 1}],
    models={
        f"{model} decode": {"batch": 32, "vocab": vocab, "top": 20} for model, vocab in _MODEL_VOCABULARIES.items()
    },
    sweeps={"qwen4_exp decode": [{"batch": batch} for batch in (1, 32, 128)]},
    compare=_logprobs_error,
)
