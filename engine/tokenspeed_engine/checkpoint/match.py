"""Compares what a model expects with what a checkpoint holds, before a byte of weights is read."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.checkpoint.header import TensorInfo
from tokenspeed_engine.checkpoint.plan import Constant, Layout, Parameter, Piece, WeightPlan


@dataclass(frozen=True)
class SkippedGroup:
    """Tensors of a part that is not served: how many, and their bytes on disk."""

    group: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Match:
    """The layout each parameter comes in, the constants the checkpoint ships, and what is skipped."""

    layouts: Mapping[str, Layout]
    constants: tuple[Constant, ...]
    skipped: tuple[SkippedGroup, ...]


def match(plan: WeightPlan, tensors: Mapping[str, TensorInfo], subject: str) -> Match:
    """Finds the layout of every parameter and accounts for every tensor.

    Raises CheckpointError about `subject` with every tensor that is missing, unknown, mis-shaped or of an unexpected
    dtype.
    """
    problems: list[str] = []
    layouts: dict[str, Layout] = {}
    unclaimed = dict(tensors)
    for parameter in plan.parameters:
        layout = _choose_layout(parameter, tensors)
        layouts[parameter.name] = layout
        if layout.refused is not None:
            problems.append(f"{parameter.name}: {layout.refused}")
        for piece, dtypes in layout.pieces:
            unclaimed.pop(piece.name, None)
            problems += _check(piece, tensors.get(piece.name), dtypes)

    constants = tuple(constant for constant in plan.constants if constant.name in tensors)
    for constant in constants:
        unclaimed.pop(constant.name, None)
        expected = Piece(constant.name, (len(constant.values),))
        problems += _check(expected, tensors[constant.name], frozenset({"I64"}))

    skipped: list[SkippedGroup] = []
    for part in plan.unserved:
        members = [unclaimed.pop(name) for name in list(unclaimed) if part.matches(name)]
        if members:
            skipped.append(SkippedGroup(part.group, len(members), sum(info.nbytes for info in members)))

    problems += [f"{name}: unknown tensor ({info.dtype} {list(info.shape)})" for name, info in unclaimed.items()]
    if problems:
        raise CheckpointError(subject, problems)
    return Match(layouts, constants, tuple(skipped))


def _choose_layout(parameter: Parameter, tensors: Mapping[str, TensorInfo]) -> Layout:
    """The layout whose tensors are there in its dtypes, else the one to complain about."""
    present = [layout for layout in parameter.layouts if any(piece.name in tensors for piece, _ in layout.pieces)]
    readable = [layout for layout in present if _dtypes_fit(layout, tensors)]
    return (readable or present or list(parameter.layouts))[0]


def _dtypes_fit(layout: Layout, tensors: Mapping[str, TensorInfo]) -> bool:
    return all(tensors[piece.name].dtype in dtypes for piece, dtypes in layout.pieces if piece.name in tensors)


def _check(piece: Piece, info: TensorInfo | None, dtypes: frozenset[str]) -> Iterable[str]:
    if info is None:
        yield f"{piece.name}: missing, expected {list(piece.shape)}"
        return
    # A single number is stored with or without a dim.
    if info.shape != piece.shape and not (math.prod(info.shape) == piece.numel == 1):
        yield f"{piece.name}: shape {list(info.shape)}, expected {list(piece.shape)}"
    if info.dtype not in dtypes:
        yield f"{piece.name}: dtype {info.dtype}, expected {' or '.join(sorted(dtypes))}"
