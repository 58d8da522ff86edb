"""What a model expects of its checkpoint, as data.

A model family describes every parameter by the layouts in which checkpoints store it. A layout names the tensors on
disk and where each lands in the tensors the engine holds; one that stores a quantised weight and its scales has one
target for each. Names, shapes and dtypes are compared before anything is read.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

FLOAT_DTYPES = frozenset({"F32", "BF16", "F16"})

TargetDtype = Literal["model", "float32"]
"""dtype in memory: the one the model is served in, or float32 where the maths is float32 whatever the model's."""


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor `name` of `shape` that fills its target from element `offset` on (row-major)."""

    name: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Target:
    """A tensor the engine holds. Its pieces tile it: every element comes from exactly one."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: TargetDtype = "model"

    def __post_init__(self) -> None:
        end = 0
        for piece in sorted(self.pieces, key=lambda piece: piece.offset):
            if piece.offset != end:
                raise ValueError(f"{self.name}: {piece.name} starts at element {piece.offset}, expected {end}")
            end += piece.numel
        if end != math.prod(self.shape):
            raise ValueError(f"{self.name}: pieces hold {end} elements, {self.shape} has {math.prod(self.shape)}")


@dataclass(frozen=True)
class Layout:
    """One way in which checkpoints store a parameter. `dtypes` are the safetensors dtypes its pieces may have."""

    name: str
    targets: tuple[Target, ...]
    dtypes: frozenset[str] = FLOAT_DTYPES

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for target in self.targets for piece in target.pieces)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model and the layouts it may come in, the most usual first."""

    name: str
    layouts: tuple[Layout, ...]


@dataclass(frozen=True)
class Constant:
    """Integers that the engine computes by itself; a checkpoint that ships them (I64) must ship these."""

    name: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class Unserved:
    """Checkpoint tensors of a part that is not served: known, skipped and logged as a group."""

    group: str
    matches: Callable[[str], bool]


@dataclass(frozen=True)
class WeightPlan:
    """Everything a checkpoint may contain. A name in none of the three lists stops start-up."""

    parameters: tuple[Parameter, ...]
    constants: tuple[Constant, ...]
    unserved: tuple[Unserved, ...]


def concatenated(pieces: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[Piece, ...]:
    """Pieces from (name, shape) pairs that follow one another along the first dim of their target."""
    placed: list[Piece] = []
    offset = 0
    for name, shape in pieces:
        placed.append(Piece(name, shape, offset))
        offset += placed[-1].numel
    return tuple(placed)
