"""Inputs for the indexer's choice in one step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.cases.sparse import DECODE, PREFILL, QWEN4_SCORES, SWEEPS, VERIFY, index_queries, index_scores
from tokenspeed_kernels.sparse import index_scores as index_scores_op
from tokenspeed_registry.cases import CaseSet, Make, Params


def _select_blocks(p: Params, make: Make) -> dict[str, Any]:
    arguments = index_queries(p, make)
    if p["ties"]:
        # Few products are positive: most blocks score 0, and the choice among those is free.
        arguments["q"].mul_(make.integers(*arguments["q"].shape[:2], 1, low=0, high=4) == 0)
    return arguments | {"top_k": p["top_k"]}


def _choice_error(arguments: Mapping[str, Any], got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """By how much the chosen blocks score below the best ones; infinite for a choice that no rounding explains.

    As many as wanted, distinct, visible, −1 last. Scores are compared in falling order, relative to their size.
    """
    blocks, best = got[0].long(), wanted[0].long()
    if blocks.shape != best.shape:
        return float("inf")
    described = {key: value for key, value in arguments.items() if key != "top_k"}
    scores = index_scores_op.contract.reference(**described)
    assert isinstance(scores, Tensor)
    visible = scores[scores > -torch.inf]
    typical = float(visible.square().mean().sqrt()) if len(visible) else 0.0
    worst = 0.0
    for row, mine, theirs in zip(scores, blocks.tolist(), best, strict=True):
        count = int((theirs >= 0).sum())
        chosen = mine[:count]
        if len(set(chosen)) != count or any(not 0 <= block < len(row) for block in chosen):
            return float("inf")
        if any(block != -1 for block in mine[count:]) or bool((row[chosen] == -torch.inf).any()):
            return float("inf")
        if count:
            highest = row[theirs[:count]].sort().values
            short = (highest - row[chosen].sort().values) / (highest.abs() + typical).clamp_min(1e-300)
            worst = max(worst, float(short.max()))
    return worst


select_blocks = CaseSet(
    axes={**index_scores.axes, "top_k": [3, 1, 9, 64], "ties": [False, True]},
    build=_select_blocks,
    edges=[
        *index_scores.edges,
        {"sequences": ((65, 8), (64, 3)), "blocks": 8, "top_k": 9, "ties": True},
        {"sequences": ((262_144, 2), (9, 1)), "ratio": 512, "blocks": 8, "top_k": 64},
        {"heads": 4, "dim": 128, "dtype": torch.bfloat16, "top_k": 9, "sequences": ((65, 8),)},
    ],
    shrink=[{"sequences": ((9, 1), (70, 4))}],
    models={
        f"qwen4_exp {phase}": {"sequences": sequences, **QWEN4_SCORES, "top_k": 512}
        for phase, sequences in {"decode": DECODE, "verify": VERIFY, "prefill": PREFILL}.items()
    },
    sweeps=SWEEPS,
    compare=_choice_error,
)
