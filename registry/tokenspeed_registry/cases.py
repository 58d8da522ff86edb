"""Inputs for an op: named axes, edge cases and model shapes, from which conformance, property tests and benches draw.

    merge_states = CaseSet(
        axes={"tokens": [3, 0, 1, 17], "heads": [2, 1, 16], "dim": [64, 512], "dtype": FLOATS},
        build=lambda p, make: {"out_a": make.normal(p["tokens"], p["heads"], p["dim"], dtype=p["dtype"]), ...},
        models={"deepseek_v3 decode": {"tokens": 32, "heads": 16, "dim": 512}},
    )

The first value of an axis is its default. Case sets live in sibling modules of the contracts, which only tests,
conformance and benches import.
"""

import importlib
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tokenspeed_registry.contract import Contract

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Params = Mapping[str, Any]
Compare = Callable[[Mapping[str, Any], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], float]
RANDOM_CASES = 8
"""Random combinations of axis values that `CaseSet.cases` adds to those that vary one axis at a time."""


class Make:
    """Seeded data on the CPU: the same on every machine and, moved, on every device."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.random = random.Random(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Gaussian values, rounded once to `dtype`."""
        return (torch.randn(shape, generator=self._generator) * scale).to(dtype)

    def uniform(self, *shape: int, low: float, high: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.rand(shape, generator=self._generator) * (high - low) + low).to(dtype)

    def integers(self, *shape: int, low: int, high: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Uniform in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator).to(dtype)

    def permutation(self, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """0..size-1 in random order: page and slot ids that no kernel may assume to be sorted."""
        return torch.randperm(size, generator=self._generator).to(dtype)

    def lengths(self, count: int, *, low: int, high: int) -> list[int]:
        """`count` lengths in [low, high]."""
        return [self.random.randint(low, high) for _ in range(count)]


@dataclass(frozen=True)
class Case:
    """One set of parameters and the seed of its data."""

    params: Params
    seed: int

    def __str__(self) -> str:
        return ", ".join(f"{key}={str(value).removeprefix('torch.')}" for key, value in self.params.items())


@dataclass(frozen=True)
class CaseSet:
    """`build(params, make)` returns the op's arguments by name; what it leaves out takes its default.

    `edges` are full or partial parameter sets over the defaults. `compare(arguments, got, wanted)` replaces the usual
    comparison for ops whose right answer is not unique (ties of a top-k); it returns an error as the usual one does.
    """

    axes: Mapping[str, Sequence[Any]]
    build: Callable[[Params, Make], dict[str, Any]]
    edges: Sequence[Params] = ()
    models: Mapping[str, Params] = field(default_factory=dict)
    compare: Compare | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        return {axis: values[0] for axis, values in self.axes.items()}

    def cases(self, seed: int = 0) -> list[Case]:
        """The defaults, every value of every axis alone, the edges, and some random combinations; always the same."""
        choose = random.Random(seed)
        found: list[Params] = [self.defaults]
        found += [self.defaults | {axis: value} for axis, values in self.axes.items() for value in values[1:]]
        found += [self.defaults | dict(edge) for edge in self.edges]
        found += [{axis: choose.choice(values) for axis, values in self.axes.items()} for _ in range(RANDOM_CASES)]
        unique = {str(sorted(params.items(), key=lambda item: item[0])): params for params in found}
        return [self.case(params) for params in unique.values()]

    def case(self, params: Params) -> Case:
        """A case over the defaults, with a seed of its own."""
        full = self.defaults | dict(params)
        return Case(full, zlib.crc32(repr(sorted(full.items(), key=lambda item: item[0])).encode()))

    def arguments(self, contract: Contract, case: Case) -> dict[str, Any]:
        """All arguments of the op by name, on the CPU, in the contract's order."""
        built = self.build(case.params, Make(case.seed))
        defaults: dict[str, Any] = {scalar.name: scalar.default for scalar in contract.scalars}
        defaults |= {tensor.name: None for tensor in contract.tensors if tensor.optional}
        if unknown := set(built) - {parameter.name for parameter in contract.parameters}:
            raise KeyError(f"{contract.name}: the case set builds unknown arguments {sorted(unknown)}")
        return {parameter.name: (defaults | built)[parameter.name] for parameter in contract.parameters}

    def strategy(self) -> "SearchStrategy[Case]":
        """A hypothesis strategy over all combinations and any seed."""
        from hypothesis import strategies as st

        axes = {axis: st.sampled_from(list(values)) for axis, values in self.axes.items()}
        return st.builds(Case, st.fixed_dictionaries(axes), st.integers(0, 2**31))


def case_set(contract: Contract) -> CaseSet:
    """Imports the case set that a contract names."""
    module, _, attribute = contract.cases.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, CaseSet), contract.cases
    return found


def edge_cases(cases: CaseSet, bounds: Iterable[tuple[str, int]]) -> Iterator[Case]:
    """The defaults with one axis at a kernel's declared bound, for each bound on an axis."""
    for axis, bound in bounds:
        if axis in cases.axes:
            yield cases.case({axis: bound})
