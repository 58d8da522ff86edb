"""Checks of what index tensors hold, as data on the contract.

They run where reading the values costs no sync and next to nothing: short CPU tensors always; every tensor, whatever
the sync costs, under `TOKENSPEED_KERNELS_DEBUG=1`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenspeed_registry.errors import ContentError
from tokenspeed_registry.signature import evaluate

SHORT = 64
"""Longest tensor, in elements, that is read on every call on the CPU."""


class ContentCheck(Protocol):
    """A property of one tensor argument's values.

    A check may have an attribute `quick`: an expression over dims and `_values`, a flat list, that is true of right
    values. It stands in the generated dispatch and spares right calls `verify`, which says what is wrong.
    """

    @property
    def argument(self) -> str: ...

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the dims that `verify` reads; it is handed no others, since it may run on every call."""
        ...

    def verify(self, op: str, values: torch.Tensor, dims: Mapping[str, int]) -> None:
        """Raises `ContentError`."""


@dataclass(frozen=True)
class Offsets:
    """Cumulative offsets such as `cu_seqlens`: start at 0, never decrease, end at dim `total`."""

    argument: str
    total: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.total,)

    @property
    def quick(self) -> str:
        return f"_values and _values[0] == 0 and _values[-1] == {self.total} and _values == sorted(_values)"

    def verify(self, op: str, values: torch.Tensor, dims: Mapping[str, int]) -> None:
        offsets = values.tolist()
        total = dims[self.total]
        if offsets and offsets[0] == 0 and offsets[-1] == total and offsets == sorted(offsets):
            return
        expected = f"offsets from 0 to {self.total}={total} that never decrease"
        raise ContentError(op, self.argument, expected, _shorten(offsets))


@dataclass(frozen=True)
class Indices:
    """Indices below dim (or product of dims) `below`; -1 marks padding."""

    argument: str
    below: str

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(self.below.split("*"))

    @property
    def quick(self) -> str:
        return f"not _values or min(_values) >= -1 and max(_values) < {self.below}"

    def verify(self, op: str, values: torch.Tensor, dims: Mapping[str, int]) -> None:
        limit = dims[self.below] if self.below in dims else evaluate(self.below, dims)
        indices = values.tolist()
        if indices and isinstance(indices[0], list):
            indices = values.flatten().tolist()
        for index in indices:
            if not -1 <= index < limit:
                raise ContentError(op, self.argument, f"indices from -1 to {self.below}-1={limit - 1}", str(index))


@dataclass(frozen=True)
class Lengths:
    """Lengths between 0 and a product of dims, for example of what a page table can address."""

    argument: str
    capacity: tuple[str, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        return self.capacity

    @property
    def quick(self) -> str:
        return f"not _values or min(_values) >= 0 and max(_values) <= {'*'.join(self.capacity)}"

    def verify(self, op: str, values: torch.Tensor, dims: Mapping[str, int]) -> None:
        limit = 1
        for dim in self.capacity:
            limit *= dims[dim]
        for length in values.tolist():
            if not 0 <= length <= limit:
                raise ContentError(
                    op, self.argument, f"lengths from 0 to {'*'.join(self.capacity)}={limit}", str(length)
                )


def _shorten(values: list[int]) -> str:
    return str(values) if len(values) <= 16 else f"[{', '.join(map(str, values[:8]))}, ..., {values[-1]}]"
