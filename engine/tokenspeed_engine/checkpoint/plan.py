"""What a model expects of its checkpoint, as data.

A model family describes every parameter by the layouts in which checkpoints store it. A layout names the tensors on
disk and where each lands in the tensors the engine holds; one that stores a quantised weight and its scales has one
target for each. Names, shapes and dtypes are compared before anything is read.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

FLOAT_DTYPES = frozenset({"F32", "BF16", "F16"})
FP8_DTYPES = frozenset({"F8_E4M3"})
BYTE_DTYPES = frozenset({"U8"})

TargetDtype = Literal["model", "float32", "float8_e4m3fn", "uint8"]
"""dtype in memory: the one the model is served in, float32 where the maths is float32 whatever the model's, or that of
quantised elements (uint8: two four-bit codes)."""


NOTHING = (range(0),)
"""Part of a piece, of any shape, that another rank holds."""


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor `name` of `shape` that fills its target from element `offset` on (row-major).

    `part`: what of it is taken, a range a dim; None takes all, `NOTHING` checks that it is there as expected.
    """

    name: str
    shape: tuple[int, ...]
    offset: int = 0
    part: tuple[range, ...] | None = None

    @property
    def numel(self) -> int:
        """Elements that it fills."""
        return math.prod(self.shape if self.part is None else map(len, self.part))


@dataclass(frozen=True)
class Target:
    """A tensor the engine holds. Its pieces tile it: every element comes from exactly one.

    `disk`: the safetensors dtypes that its pieces may have.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: TargetDtype = "model"
    disk: frozenset[str] = FLOAT_DTYPES

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
    """One way in which checkpoints store a parameter; `refused` says why one that comes so cannot be served."""

    name: str
    targets: tuple[Target, ...]
    refused: str | None = None

    @property
    def pieces(self) -> Iterator[tuple[Piece, frozenset[str]]]:
        """Every piece, with the dtypes it may have."""
        return ((piece, target.disk) for target in self.targets for piece in target.pieces)


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


Part = tuple[range, ...] | None


def concatenated(pieces: Iterable[tuple[str, tuple[int, ...]]], part: Part = None) -> tuple[Piece, ...]:
    """Pieces from (name, shape) pairs that follow one another along the first dim of their target; of each, `part`."""
    return placed((name, shape, part) for name, shape in pieces)


def placed(pieces: Iterable[tuple[str, tuple[int, ...], Part]]) -> tuple[Piece, ...]:
    """As `concatenated`, of (name, shape, part)."""
    found: list[Piece] = []
    offset = 0
    for name, shape, part in pieces:
        found.append(Piece(name, shape, offset, part))
        offset += found[-1].numel
    return tuple(found)
