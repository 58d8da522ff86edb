"""Checks a kernel against its op's reference: the one run that every backend faces.

For each case the reference works in float64 on CPU copies. The kernel gets outputs poisoned with NaN and must write
all of them; must leave inputs alone that the contract does not say it mutates; and in mutated pools must leave every
row bit-identical that the reference leaves so. Numbers are judged by the contract's tolerance (see `tolerance`).

The kernel may run in other ways than by being called: `Way`. At model shapes, where the reference takes minutes,
another kernel that has passed may be the oracle.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenspeed_registry.cases import CPU, Case, CaseSet, case_set
from tokenspeed_registry.contract import Contract
from tokenspeed_registry.edges import edge_case, edges
from tokenspeed_registry.kernel import Kernel
from tokenspeed_registry.platform import Platform, platform_of
from tokenspeed_registry.signature import Signature
from tokenspeed_registry.validation import signature_of

Arguments = Mapping[str, Any]
Run = Callable[[Kernel, tuple[Any, ...], Mapping[str, Any]], Any]
"""`run(kernel, args, kwargs)` does what `kernel.function(*args, **kwargs)` would, in an emulator for example."""


@dataclass(frozen=True)
class Outcome:
    """One case: its error, the tolerance that it was held to, and what was wrong beside numbers (empty: nothing)."""

    error: float
    tolerance: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        return not self.fault and self.error <= self.tolerance

    @property
    def severity(self) -> float:
        """Comparable across dtypes: the error as a multiple of the tolerance."""
        if self.fault or math.isnan(self.error):
            return float("inf")
        return self.error / self.tolerance if self.tolerance else (0.0 if self.error == 0 else float("inf"))


@dataclass
class Report:
    """A kernel over a case set. `refused` cases lie outside the kernel's declared constraints and were not run.

    `worst` is the outcome with the largest error relative to its tolerance. `unreached` lists declared bounds, in
    words, at which no case ran: of those nothing is known.
    """

    op: str
    kernel: str
    backend: str
    cases: int = 0
    refused: int = 0
    worst: Outcome = field(default_factory=lambda: Outcome(0.0, 0.0))
    failures: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.cases > 0 and not self.failures

    def add(self, case: Case, outcome: Outcome) -> None:
        self.cases += 1
        if self.cases == 1 or outcome.severity > self.worst.severity:
            self.worst = outcome
        if not outcome.ok:
            detail = outcome.fault or f"error {outcome.error:.3g} above {outcome.tolerance:.3g}"
            self.failures.append(f"{case}: {detail}")


@dataclass(frozen=True)
class Way:
    """How a kernel is run and what it is held against, where that is not the kernel's function and the reference.

    `on_host`: placeable tensors that lie in pinned host memory, where `device` is an accelerator.
    """

    device: torch.device = CPU
    on_host: tuple[str, ...] = ()
    run: Run = lambda kernel, args, kwargs: kernel.function(*args, **kwargs)
    oracle: Kernel | None = None


def check_kernel(
    contract: Contract,
    kernel: Kernel,
    device: torch.device,
    cases: Iterable[Case] | None = None,
    *,
    platform: Platform | None = None,
    run: Run | None = None,
    oracle: Kernel | None = None,
) -> Report:
    """Runs `kernel` over `cases` (the op's own, and those at the kernel's declared bounds, unless given).

    `platform`: whose requirements count, that of `device` unless given: a kernel for a chip may run in an interpreter
    on the CPU. `run` replaces the call of the kernel's function. `oracle`: a kernel to be compared with instead of the
    reference; the data is then made on `device`, and as the oracle has errors too, twice the tolerance is allowed.
    """
    source = case_set(contract)
    platform = platform or platform_of(device)
    way = Way(device, kernel.on_host, run or Way.run, oracle)
    report = Report(contract.name, kernel.name, kernel.backend)
    ran: list[tuple[Case, Signature]] = []

    def check(case: Case) -> None:
        signature = source.signature(contract, case)
        signature = signature if way.device.type == "cpu" else signature.placed(way.on_host)
        if not kernel.refusals(platform, signature)[0]:
            report.refused += 1
            return
        arguments = source.arguments(contract, case, CPU if oracle is None else device)
        report.add(case, check_case(contract, kernel, source, arguments, way))
        if not ran and report.ok and contract.outputs:  # once more, where the kernel allocates
            allocated = check_case(contract, kernel, source, arguments, way, allocates=True)
            if not allocated.ok:
                report.failures.append(f"{case}: without out: {allocated.fault or f'error {allocated.error:.3g}'}")
        ran.append((case, signature))

    for case in source.cases() if cases is None else cases:
        check(case)
    if cases is None:
        for limit, goals in edges(kernel):
            if not any(goal.holds(signature) for goal in goals for _, signature in ran):
                edge = edge_case(contract, kernel, source, platform, ran, goals)
                if edge is not None:
                    check(edge)
                else:
                    report.unreached.append(f"{limit.needs()} at {' or '.join(str(goal.value) for goal in goals)}")
    return report


def check_case(
    contract: Contract,
    kernel: Kernel,
    source: CaseSet,
    arguments: Arguments,
    way: Way,
    allocates: bool = False,
) -> Outcome:
    """Runs one case. `arguments` are not changed; they lie on the CPU, or, with an oracle, on the way's device.

    `allocates`: the kernel gets no `out`.
    """
    signature = signature_of(contract, arguments)
    wanted_arguments = _copy(arguments)
    got_arguments = _copy(arguments, way.device, contract.host, way.on_host)
    factor = 1.0
    try:
        if way.oracle is None:
            wanted = _as_tuple(contract.reference(**wanted_arguments))
        else:
            wanted, factor = _call(contract, way.oracle, Way.run, wanted_arguments, None), 2.0
        out = None if allocates else _poisoned(contract, signature, wanted, way.device)
        got = _call(contract, kernel, way.run, got_arguments, out)
    except Exception as error:  # a kernel may fail in any way; the report says how
        return Outcome(float("inf"), 0.0, f"raised {type(error).__name__}: {error}")
    outcomes = []
    if source.compare is not None:
        on_host = _copy(arguments, CPU)
        distance = source.compare(on_host, tuple(t.cpu() for t in got), tuple(t.cpu() for t in wanted))
        outcomes.append(Outcome(distance, factor * contract.tolerance(signature, contract.outputs[0].name)))
    else:
        for output, mine, theirs in zip(contract.outputs, got, wanted, strict=True):
            allowed = factor * contract.tolerance(signature, output.name)
            outcomes.append(_compare(output.name, mine.to(theirs.device), theirs, allowed))
            if mine.dtype != signature.dtype(output.name):
                outcomes.append(Outcome(0.0, 0.0, f"{output.name} has dtype {mine.dtype}"))
    for tensor in contract.tensors:
        if arguments[tensor.name] is None:
            continue
        before = arguments[tensor.name]
        mine = got_arguments[tensor.name].to(before.device)
        if tensor.name in contract.mutates:
            allowed = factor * contract.tolerance(signature, tensor.name)
            outcomes.append(_compare(tensor.name, mine, wanted_arguments[tensor.name], allowed))
            outcomes.append(_untouched(tensor.name, mine, before, wanted_arguments[tensor.name]))
        elif not _same_bits(mine, before):
            outcomes.append(Outcome(0.0, 0.0, f"changed its input {tensor.name}"))
    return max(outcomes, key=lambda outcome: outcome.severity)


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """max |got − wanted| / (|wanted| + rms(wanted)); infinite where an infinity, a NaN or an integer differs."""
    if wanted.numel() == 0:
        return 0.0
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(got.to(wanted.dtype), wanted) else float("inf")
    mine, theirs = got.double(), wanted.double()
    finite = theirs.isfinite()
    alike = finite | (mine == theirs) | (mine.isnan() & theirs.isnan())
    if not torch.equal(mine.isfinite(), finite) or not alike.all():
        return float("inf")
    values = theirs.where(finite, 0.0)
    rms = values.norm() / max(int(finite.sum()), 1) ** 0.5
    difference = (mine - theirs).where(finite, 0.0).abs()
    return float((difference / (values.abs() + rms).clamp_min(torch.finfo(torch.float64).tiny)).max())


def _poisoned(
    contract: Contract, signature: Signature, like: tuple[torch.Tensor, ...], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Outputs of the promised shapes and dtypes, full of what no kernel may leave there."""
    poisoned = []
    for output, wanted in zip(contract.outputs, like, strict=True):
        dtype = signature.dtype(output.name)
        poison = float("nan") if dtype.is_floating_point else (torch.iinfo(dtype).min if dtype != torch.bool else True)
        poisoned.append(torch.full(wanted.shape, poison, dtype=dtype, device=device))
    return tuple(poisoned)


def _call(
    contract: Contract, kernel: Kernel, run: Run, arguments: Arguments, out: tuple[torch.Tensor, ...] | None
) -> tuple[Any, ...]:
    """Calls the kernel, with the given outputs where there are any."""
    positional = tuple(arguments[p.name] for p in contract.parameters if not p.keyword)
    keywords = {p.name: arguments[p.name] for p in contract.parameters if p.keyword}
    if not out:
        results = _as_tuple(run(kernel, positional, keywords))
        if len(results) != len(contract.outputs):
            raise AssertionError(f"returned {len(results)} results, not {len(contract.outputs)}")
        return results
    results = _as_tuple(run(kernel, positional, {**keywords, "out": out if len(out) > 1 else out[0]}))
    if any(result.data_ptr() != given.data_ptr() for result, given in zip(results, out, strict=True)):
        raise AssertionError("did not return the given out")
    return results


def _compare(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> Outcome:
    if got.shape != wanted.shape:
        return Outcome(float("inf"), tolerance, f"{name} has shape {tuple(got.shape)}, not {tuple(wanted.shape)}")
    return Outcome(error_of(got, wanted), tolerance)


def _untouched(name: str, got: torch.Tensor, before: torch.Tensor, wanted: torch.Tensor) -> Outcome:
    """Rows (of the first dim) that the reference leaves bit-identical must be so after the kernel too."""
    mine, old, theirs = _bits(got), _bits(before), _bits(wanted)
    touched = (mine != old).any(1) & ~(theirs != old).any(1)
    if touched.any():
        return Outcome(0.0, 0.0, f"wrote to row {int(touched.nonzero()[0])} of {name}, which the call does not touch")
    return Outcome(0.0, 0.0)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_bits(a[None]), _bits(b[None]))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of each row of the first dim, eight at a time where they divide; a copy, for any stride."""
    flat = torch.cat([x.flatten()]).view(torch.uint8)
    row = flat.numel() // max(x.shape[0], 1)
    return (flat if row % 8 else flat.view(torch.int64)).reshape(x.shape[0], row if row % 8 else row // 8)


def _copy(
    arguments: Arguments, device: torch.device | None = None, host: Iterable[str] = (), pinned: Iterable[str] = ()
) -> dict[str, Any]:
    """Copies tensors, keeping strides, to `device` (those in `host` stay; `pinned` ones go to pinned host memory)."""
    copies: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            # A clone of a strided view would be compact: copy the whole storage to keep what the kernel will see.
            flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage()).clone()
            if device is not None and name in pinned and device.type != "cpu":
                flat = flat.cpu().pin_memory()
            elif device is not None and name not in host:
                flat = flat.to(device)
            copies[name] = flat.as_strided(value.shape, value.stride(), value.storage_offset())
        else:
            copies[name] = value
    return copies


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)
