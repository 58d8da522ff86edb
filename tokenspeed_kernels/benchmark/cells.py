"""Which cases are timed: the models' calls of each op, or those of the sweeps over them."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from tokenspeed_registry import Contract, UnknownNameError
from tokenspeed_registry.cases import Case, CaseSet, Params, case_set
from tokenspeed_registry.registry import default_registry

MOST_BYTES, MOST_FLOPS = 50e6, 1e9
"""Of a case without an accelerator: there eager calls are a look, and no wait."""


class Shapes(StrEnum):
    MODEL = "model"
    SWEEP = "sweep"


@dataclass(frozen=True)
class Cell:
    """A case to be timed, its name and the model's whose case it is or varies; `command` times it again."""

    contract: Contract
    source: CaseSet
    model: str
    shape: str
    case: Case
    command: str = ""


def cells_of(
    ops: Sequence[str] | None, shapes: Shapes, wanted: str | None, peers: bool = False
) -> tuple[list[Cell], list[str]]:
    """The cases to be timed, and what to know of them. Raises `UnknownNameError` where the filters leave none."""
    contracts = [default_registry.contract(op) for op in ops or default_registry.contracts]
    cells, unswept, large = [], [], 0
    for contract in contracts:
        source = case_set(contract)
        cases = {name: (name, source.model(name)) for name in source.models}
        if shapes is Shapes.SWEEP and source.sweeps:
            cases = {name: (_model_of(source.sweeps, name), case) for name, case in source.swept().items()}
        elif shapes is Shapes.SWEEP:
            unswept.append(contract.name)
        if wanted is not None:
            chosen = [wanted] if wanted in cases else [name for name in cases if wanted in name]
            cases = {name: cases[name] for name in chosen}
        for name, (model, case) in cases.items():
            if not torch.cuda.is_available():
                cost = contract.cost(source.signature(contract, case))
                if cost.nbytes > MOST_BYTES or cost.flops > MOST_FLOPS:
                    large += 1
                    continue
            again = ["tokenspeed-kernels", "bench", contract.name, "--shapes", shapes, "--case", name]
            cells.append(Cell(contract, source, model, name, case, shlex.join(again + ["--peers"] * peers)))
    if not cells and not large:
        raise UnknownNameError(f"no case to time: none of these ops has one whose name contains {wanted!r}")
    notes = [f"no sweeps, so the models' shapes: {', '.join(unswept)}"] if unswept else []
    if large:
        notes.append(f"{large} cases left out that are too large to time without an accelerator")
    return cells, notes


def spread(cells: Sequence[Cell]) -> list[Cell]:
    """The first cell of every op, then the second: those of one op often compile to the same."""
    seen: dict[str, int] = {}
    ranks = []
    for cell in cells:
        seen[cell.contract.name] = seen.get(cell.contract.name, -1) + 1
        ranks.append(seen[cell.contract.name])
    return [cell for _, cell in sorted(zip(ranks, cells, strict=True), key=lambda pair: pair[0])]


def _model_of(sweeps: Mapping[str, Sequence[Params]], name: str) -> str:
    """The model of a swept case's name: the longest that it begins with."""
    return max((model for model in sweeps if name.startswith(model)), key=len)
