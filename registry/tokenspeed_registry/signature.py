"""What of a call decides which kernel serves it: dims, dtypes and flags, by name, without the tensors.

Constraints, cost models and tolerances are functions of a `Signature`. One made from a command line knows only part
of the dims; whatever depends on the rest answers "unknown" there.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tokenspeed_registry.layout import Layout

Flag = bool | int | float | str | torch.dtype | None


class UnknownDimError(LookupError):
    """A dim, dtype or flag that this signature does not know."""


@dataclass(frozen=True)
class Signature:
    """Dims by name, tensor dtypes and shapes by role (parameter or output name), and scalar arguments by name.

    `shapes` lists the dim expressions of each role present, from which `nbytes` counts; a signature without shapes is
    partial. `layouts` says how the call's tensors lie in memory. `present` names optional tensors that a partial
    signature knows to be there, whatever their dtype. `counts` holds what the contents of index tensors decide and no
    shape says, for example how many experts a call hits.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    flags: Mapping[str, Flag] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
    counts: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, dim: str) -> int:
        try:
            return self.dims[dim]
        except KeyError:
            raise UnknownDimError(dim) from None

    def dtype(self, role: str) -> torch.dtype:
        """The dtype of a parameter or output."""
        try:
            return self.dtypes[role]
        except KeyError:
            raise UnknownDimError(role) from None

    def flag(self, name: str) -> Flag:
        """The value of a scalar argument."""
        try:
            return self.flags[name]
        except KeyError:
            raise UnknownDimError(name) from None

    def given(self, role: str) -> bool:
        """Whether an optional tensor is there."""
        return role in self.dtypes or role in self.present

    def count(self, name: str, default: float) -> float:
        """What was counted for this very call, or what can be said without: usually the most it may be."""
        return self.counts.get(name, default)

    def placed(self, on_host: Iterable[str]) -> "Signature":
        """The same call on an accelerator with these tensors in host memory: case sets put all on one device."""
        names = set(on_host)
        layouts = {name: replace(layout, on_host=name in names) for name, layout in self.layouts.items()}
        return replace(self, layouts=layouts)

    def numel(self, role: str) -> int:
        """Elements of a parameter or output; 0 for an optional tensor that is absent."""
        if role not in self.shapes:
            return 0
        return math.prod(evaluate(expr, self.dims) for expr in self.shapes[role])

    def nbytes(self, *roles: str) -> int:
        """Bytes of the named parameters and outputs together, each moved once."""
        return sum(self.numel(role) * self.dtypes[role].itemsize for role in roles if role in self.shapes)


def evaluate(expr: str, dims: Mapping[str, int]) -> int:
    """The value of a dim expression such as `tokens`, `seqs+1`, `streams*hidden` or `4`."""
    if expr in dims:
        return dims[expr]
    if expr.isdecimal():
        return int(expr)
    try:
        value: int = eval(expr, {"__builtins__": {}}, dims)  # stays a SymInt under tracing
        return value
    except NameError as error:
        raise UnknownDimError(expr) from error
