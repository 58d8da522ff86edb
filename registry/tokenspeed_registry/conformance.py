"""Checks a kernel against its op's reference: the one run that every backend faces.

For each case the reference works in float64 on CPU copies. The kernel gets outputs poisoned with NaN and must write
all of them; must leave inputs alone that the contract does not say it mutates; and in mutated pools must leave every
row bit-identical that the reference leaves so. Numbers are judged by the contract's tolerance (see `tolerance`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenspeed_registry.cases import Case, CaseSet, case_set, edge_cases
from tokenspeed_registry.contract import Contract
from tokenspeed_registry.kernel import Kernel
from tokenspeed_registry.platform import platform_of
from tokenspeed_registry.signature import Signature
from tokenspeed_registry.validation import signature_of

Arguments = Mapping[str, Any]


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

    `worst` is the outcome with the largest error relative to its tolerance.
    """

    op: str
    kernel: str
    backend: str
    cases: int = 0
    refused: int = 0
    worst: Outcome = field(default_factory=lambda: Outcome(0.0, 0.0))
    failures: list[str] = field(default_factory=list)

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


def check_kernel(
    contract: Contract, kernel: Kernel, device: torch.device, cases: Iterable[Case] | None = None
) -> Report:
    """Runs `kernel` over `cases` (the op's own, and those at the kernel's declared bounds, unless given)."""
    source = case_set(contract)
    report = Report(contract.name, kernel.name, kernel.backend)
    if cases is None:
        limits = [limit for limit in kernel.constraints if limit.kind == "dim"]
        bounds = [(limit.name, bound) for limit in limits for bound in limit.bound if isinstance(bound, int)]
        cases = [*source.cases(), *edge_cases(source, bounds)]
    for case in cases:
        arguments = source.arguments(contract, case)
        accepted, _ = kernel.refusals(platform_of(device), signature_of(contract, arguments))
        if accepted:
            report.add(case, check_case(contract, kernel, source, arguments, device))
            if report.cases == 1 and report.ok and contract.outputs:  # once more, where the kernel allocates
                allocated = check_case(contract, kernel, source, arguments, device, allocates=True)
                if not allocated.ok:
                    report.failures.append(f"{case}: without out: {allocated.fault or f'error {allocated.error:.3g}'}")
        else:
            report.refused += 1
    return report


def check_case(
    contract: Contract,
    kernel: Kernel,
    source: CaseSet,
    arguments: Arguments,
    device: torch.device,
    allocates: bool = False,
) -> Outcome:
    """Runs one case. `arguments` lie on the CPU and are not changed. `allocates`: the kernel gets no `out`."""
    signature = signature_of(contract, arguments)
    wanted_arguments = _copy(arguments)
    wanted = _as_tuple(contract.reference(**wanted_arguments))
    got_arguments = _copy(arguments, device, contract.host)
    try:
        out = None if allocates else _poisoned(contract, signature, wanted, device)
        got = _run(contract, kernel, got_arguments, out)
    except Exception as error:  # a kernel may fail in any way; the report says how
        return Outcome(float("inf"), 0.0, f"raised {type(error).__name__}: {error}")
    outcomes = []
    if source.compare is not None:
        distance = source.compare(arguments, tuple(t.cpu() for t in got), wanted)
        outcomes.append(Outcome(distance, contract.tolerance(signature, contract.outputs[0].name)))
    else:
        for output, mine, theirs in zip(contract.outputs, got, wanted, strict=True):
            allowed = contract.tolerance(signature, output.name)
            outcomes.append(_compare(output.name, mine.cpu(), theirs, allowed))
            if mine.dtype != signature.dtype(output.name):
                outcomes.append(Outcome(0.0, 0.0, f"{output.name} has dtype {mine.dtype}"))
    for tensor in contract.tensors:
        if arguments[tensor.name] is None:
            continue
        mine, before = got_arguments[tensor.name].cpu(), arguments[tensor.name]
        if tensor.name in contract.mutates:
            allowed = contract.tolerance(signature, tensor.name)
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
    alike = torch.equal(mine[~finite].nan_to_num(), theirs[~finite].nan_to_num())
    if not alike or not torch.equal(mine.isnan(), theirs.isnan()) or not mine[finite].isfinite().all():
        return float("inf")
    if not finite.any():
        return 0.0
    difference = (mine[finite] - theirs[finite]).abs()
    scale = theirs[finite].abs() + theirs[finite].square().mean().sqrt()
    return float((difference / scale.clamp_min(torch.finfo(torch.float64).tiny)).max())


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


def _run(
    contract: Contract, kernel: Kernel, arguments: Arguments, out: tuple[torch.Tensor, ...] | None
) -> tuple[Any, ...]:
    """Calls the kernel, with the given outputs where there are any."""
    positional = [arguments[p.name] for p in contract.parameters if not p.keyword]
    keywords = {p.name: arguments[p.name] for p in contract.parameters if p.keyword}
    if not out:
        results = _as_tuple(kernel.function(*positional, **keywords))
        if len(results) != len(contract.outputs):
            raise AssertionError(f"returned {len(results)} results, not {len(contract.outputs)}")
        return results
    results = _as_tuple(kernel.function(*positional, **keywords, out=out if len(out) > 1 else out[0]))
    if any(result.data_ptr() != given.data_ptr() for result, given in zip(results, out, strict=True)):
        raise AssertionError("did not return the given out")
    return results


def _compare(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> Outcome:
    if got.shape != wanted.shape:
        return Outcome(float("inf"), tolerance, f"{name} has shape {tuple(got.shape)}, not {tuple(wanted.shape)}")
    error = error_of(got, wanted)
    return Outcome(error, tolerance)


def _untouched(name: str, got: torch.Tensor, before: torch.Tensor, wanted: torch.Tensor) -> Outcome:
    """Rows (of the first dim) that the reference leaves bit-identical must be so after the kernel too."""
    for row in range(before.shape[0]):
        if _same_bits(wanted[row], before[row]) and not _same_bits(got[row], before[row]):
            return Outcome(0.0, 0.0, f"wrote to row {row} of {name}, which the call does not touch")
    return Outcome(0.0, 0.0)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Flat, since a tensor without dims has no bytes to be viewed as; a copy, since one element may have any stride.
    flat = [torch.cat([x.flatten()]).view(torch.uint8) for x in (a, b)]
    return torch.equal(*flat)


def _copy(arguments: Arguments, device: torch.device | None = None, host: tuple[str, ...] = ()) -> dict[str, Any]:
    """Copies tensors, keeping strides, to `device` (those in `host` stay)."""
    copies: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            # A clone of a strided view would be compact: copy the whole storage to keep what the kernel will see.
            storage = value.untyped_storage()
            flat = torch.empty(0, dtype=value.dtype).set_(storage).clone()
            target = device if device is not None and name not in host else value.device
            copies[name] = flat.to(target).as_strided(value.shape, value.stride(), value.storage_offset())
        else:
            copies[name] = value
    return copies


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)
