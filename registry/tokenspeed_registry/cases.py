"""Inputs for an op: named axes, edge cases and model shapes, from which conformance, property tests and benches draw.

    merge_states = CaseSet(
        axes={"tokens": [3, 0, 1, 17], "heads": [2, 1, 16], "dim": [64, 512], "dtype": FLOATS},
        build=lambda p, make: {"out_a": make.normal(p["tokens"], p["heads"], p["dim"], dtype=p["dtype"]), ...},
        models={"deepseek_v3 decode": {"tokens": 32, "heads": 16, "dim": 512}},
        shrink=[{"tokens": 3}],
    )

The first value of an axis is its default. Case sets live in sibling modules of the contracts, which only tests,
conformance and benches import.
"""

import importlib
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from tokenspeed_registry.contract import Contract
from tokenspeed_registry.errors import UnknownNameError
from tokenspeed_registry.signature import Signature
from tokenspeed_registry.steering import differences, facts_of, steer
from tokenspeed_registry.validation import signature_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Params = Mapping[str, Any]
Arguments = Mapping[str, Any]
Compare = Callable[[Arguments, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], float]
CPU = torch.device("cpu")
RANDOM_CASES = 8
"""Random combinations of axis values that `CaseSet.cases` adds to those that vary one axis at a time."""


class Make:
    """Seeded data. On the CPU it is the same on every machine.

    On another device Gaussian values are drawn by that device's own generator, fast at model shapes: of the same
    distribution, not of the same bits. All else, such as lengths, pages and chosen experts, is the same everywhere.
    `blank` leaves Gaussian values uninitialised, where only shapes are asked for.
    """

    def __init__(self, seed: int, device: torch.device = CPU, *, blank: bool = False) -> None:
        # Two streams, so that what a blank does not draw changes nothing else.
        self._gaussian = torch.Generator(device).manual_seed(seed)
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._device = device
        self._blank = blank
        self.random = random.Random(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Gaussian values, rounded once to `dtype`."""
        if self._blank:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return (torch.randn(shape, generator=self._gaussian, device=self._device) * scale).to(dtype)

    def uniform(self, *shape: int, low: float, high: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = torch.rand(shape, generator=self._generator, device=CPU) * (high - low) + low
        return values.to(self._device, dtype)

    def integers(self, *shape: int, low: int, high: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Uniform in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator, device=CPU).to(self._device, dtype)

    def permutation(self, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """0..size-1 in random order: page and slot ids that no kernel may assume to be sorted."""
        return torch.randperm(size, generator=self._generator, device=CPU).to(self._device, dtype)

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

    `edges` are full or partial parameter sets over the defaults. `models` names the shapes at which models call the
    op; each of `shrink` is laid over every one of them, where it makes numbers no larger, for a case that has the
    model's static dims, to which kernels are specialised, and is small in all others. `sweeps` lays, over the model of
    that name, each of a list of parameters: the sizes at which the op is timed and tuned. `compare(arguments, got,
    wanted)` replaces the usual comparison for ops whose right answer is not unique (ties of a top-k); it returns an
    error as the usual one does. `counts(arguments)` counts what no shape says and the cost depends on, for example
    the experts hit; see `Signature.count`.
    """

    axes: Mapping[str, Sequence[Any]]
    build: Callable[[Params, Make], dict[str, Any]]
    edges: Sequence[Params] = ()
    models: Mapping[str, Params] = field(default_factory=dict)
    shrink: Sequence[Params] = ()
    sweeps: Mapping[str, Sequence[Params]] = field(default_factory=dict)
    compare: Compare | None = None
    counts: Callable[[Arguments], Mapping[str, int]] | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        return {axis: values[0] for axis, values in self.axes.items()}

    @property
    def statics(self) -> dict[str, list[Params]]:
        """The models' static dims at small sizes of all others, by model."""
        return {name: [self._shrunk(model, small) for small in self.shrink] for name, model in self.models.items()}

    def cases(self, seed: int = 0) -> list[Case]:
        """Always the same: defaults, every value of every axis alone, edges, random combinations, models' statics."""
        choose = random.Random(seed)
        found: list[Params] = [self.defaults]
        found += [self.defaults | {axis: value} for axis, values in self.axes.items() for value in values[1:]]
        found += [self.defaults | dict(edge) for edge in self.edges]
        found += [{axis: choose.choice(values) for axis, values in self.axes.items()} for _ in range(RANDOM_CASES)]
        found += [self.defaults | dict(small) for smalls in self.statics.values() for small in smalls]
        unique = {str(sorted(params.items(), key=lambda item: item[0])): params for params in found}
        return [self.case(params) for params in unique.values()]

    def case(self, params: Params) -> Case:
        """A case over the defaults, with a seed of its own."""
        full = self.defaults | dict(params)
        return Case(full, zlib.crc32(repr(sorted(full.items(), key=lambda item: item[0])).encode()))

    def model(self, name: str) -> Case:
        """The case of a model's shape. Raises `UnknownNameError` that lists the models."""
        if name not in self.models:
            raise UnknownNameError(f"unknown model {name!r}; known: {', '.join(map(repr, self.models))}")
        return self.case(self.models[name])

    def swept(self) -> dict[str, Case]:
        """The cases of all sweeps, by the model's name and what differs from it: `qwen4_exp decode, batch=8`."""
        cells = ((model, overlay) for model, overlays in self.sweeps.items() for overlay in overlays)
        return {
            ", ".join([model, *(f"{name}={value}" for name, value in overlay.items())]): self.case(
                {**self.models[model], **overlay}
            )
            for model, overlay in cells
        }

    def arguments(self, contract: Contract, case: Case, device: torch.device = CPU) -> dict[str, Any]:
        """All arguments of the op by name, in the contract's order, made on `device` (but those of `host`)."""
        return self._arguments(contract, case, Make(case.seed, device), device)

    def signature(self, contract: Contract, case: Case) -> Signature:
        """The signature of a case, its counts included, without the cost of its data.

        Raises `ArgumentError` for a case whose arguments do not fit the contract.
        """
        return self.describe(contract, self.blank(contract, case))

    def blank(self, contract: Contract, case: Case) -> dict[str, Any]:
        """The arguments of a case on the CPU, Gaussian values left uninitialised: for all but numbers."""
        return self._arguments(contract, case, Make(case.seed, blank=True), CPU)

    def describe(self, contract: Contract, arguments: Arguments) -> Signature:
        """The signature of given arguments, with counts. Raises `ArgumentError` where they do not fit."""
        signature = signature_of(contract, arguments)
        return signature if self.counts is None else replace(signature, counts=self.counts(arguments))

    def strategy(self) -> "SearchStrategy[Case]":
        """A hypothesis strategy over all combinations and any seed."""
        from hypothesis import strategies as st

        axes = {axis: st.sampled_from(list(values)) for axis, values in self.axes.items()}
        return st.builds(Case, st.fixed_dictionaries(axes), st.integers(0, 2**31))

    def _shrunk(self, model: Params, small: Params) -> Params:
        full = self.defaults | dict(model)
        numbers = {axis: min(full[axis], size) for axis, size in small.items() if type(size) is int}
        return {**model, **small, **numbers}

    def _arguments(self, contract: Contract, case: Case, make: Make, device: torch.device) -> dict[str, Any]:
        with device:  # what a builder makes itself, by torch.full or torch.tensor, lies there too
            built = self.build(case.params, make)
        defaults: dict[str, Any] = {scalar.name: scalar.default for scalar in contract.scalars}
        defaults |= {tensor.name: None for tensor in contract.tensors if tensor.optional}
        if unknown := set(built) - {parameter.name for parameter in contract.parameters}:
            raise KeyError(f"{contract.name}: the case set builds unknown arguments {sorted(unknown)}")
        built |= {name: built[name].cpu() for name in contract.host if built.get(name) is not None}
        return {parameter.name: (defaults | built)[parameter.name] for parameter in contract.parameters}


def case_set(contract: Contract) -> CaseSet:
    """Imports the case set that a contract names."""
    module, _, attribute = contract.cases.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, CaseSet), contract.cases
    return found


def matching_cases(contract: Contract, signature: Signature, limit: int = 4) -> list[Case]:
    """Up to `limit` cases for a call of `signature`: of its static dims, dtypes, flags and optional tensors.

    Where the case set has none such, and none can be made by changing its parameters, the nearest ones. First those
    that agree in most, then those of near dims.
    """
    source = case_set(contract)
    wanted = facts_of(contract, signature)
    near = sorted(source.cases(), key=lambda case: differences(source.signature(contract, case), wanted))
    found: dict[str, Case] = {}
    for case in near[: 2 * limit]:
        steered = steer(contract, source, case, wanted)
        found.setdefault(str(steered), steered)
    ranked = sorted(found.values(), key=lambda case: differences(source.signature(contract, case), wanted))
    best = [case for case in ranked if not differences(source.signature(contract, case), wanted)[0]]
    return (best or ranked)[:limit]
