"""Inputs for multi-head latent attention."""

from typing import Any

import torch
from tokenspeed_registry.cases import CaseSet, Make, Params

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def _merge_states(p: Params, make: Make) -> dict[str, Any]:
    shape = p["tokens"], p["heads"]
    sides: dict[str, Any] = {}
    for side in "ab":
        sides[f"out_{side}"] = make.normal(*shape, p["dim"], dtype=p["dtype"])
        # A spread of some units makes either side dominate now and then; a third of the rows has no keys.
        sides[f"lse_{side}"] = make.normal(*shape, scale=3.0)
        if p["empty_rows"]:
            empty = make.integers(*shape, low=0, high=3) == 0
            sides[f"lse_{side}"][empty] = -torch.inf
            sides[f"out_{side}"][empty] = 0.0
    return sides


merge_states = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17],
        "heads": [2, 1, 16],
        "dim": [64, 512],
        "dtype": FLOATS,
        "empty_rows": [False, True],
    },
    build=_merge_states,
    models={"deepseek_v3 prefill with cached prefix": {"tokens": 8192, "heads": 16, "dim": 128}},
)
