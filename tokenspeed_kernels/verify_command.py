"""`tokenspeed-kernels verify`: conformance of the kernels that run here, and the evidence of it."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tokenspeed_kernels.choose import Backend, Ops, chosen_kernels
from tokenspeed_kernels.compile_command import Evidence, Jobs
from tokenspeed_kernels.facts import facts_now
from tokenspeed_kernels.parallel import each
from tokenspeed_kernels.printing import Json, print_rows
from tokenspeed_kernels.triton.device import interpreted
from tokenspeed_kernels.triton.interpreter import interpretable, interpretable_cases
from tokenspeed_registry import Kernel, Platform, UnknownNameError, known_platform, present_platform
from tokenspeed_registry.conformance import Report, check_kernel
from tokenspeed_registry.evidence import compiler_version, write_record
from tokenspeed_registry.platform import PLATFORMS
from tokenspeed_registry.record import Level, Record
from tokenspeed_registry.registry import default_registry


@dataclass(frozen=True)
class _Task:
    """A kernel by name; `arch` is that of the device, or one that an interpreter stands for."""

    kernel: str
    arch: str
    limit: int | None
    record: bool
    evidence: Path | None

    def __str__(self) -> str:
        return self.kernel


def verify(
    op: Ops = None,
    backend: Backend = None,
    jobs: Jobs = 1,
    limit: Annotated[int | None, typer.Option(help="In an interpreter: so many cases an op at most.")] = None,
    record: Annotated[bool, typer.Option("--record", help="Record what passed as evidence.")] = False,
    evidence: Evidence = None,
    as_json: Json = False,
) -> None:
    """Runs conformance of the kernels that run on this machine; exit code 1 where one fails or was lost.

    Where TRITON_INTERPRET=1 is set, Triton kernels run in their interpreter, on small cases in float32 and float16.
    """
    found = ((kernel.name, _arch(kernel)) for kernel in chosen_kernels(op, backend))
    records = record or evidence is not None
    tasks = [_Task(name, arch, limit, records, evidence) for name, arch in found if arch is not None]
    if not tasks:
        raise UnknownNameError("no kernel to verify here: the filters leave none that this machine can run")
    reports = each(_check, tasks, "verify", jobs, _died)
    print_rows([_verdict(report) for report in reports], f"conformance on {_device()}", as_json)
    # A module that failed to import took its kernels along: their absence must not pass for success.
    broken = [status for status in default_registry.plugins() if status.usable and status.reason]
    for status in broken:
        print(f"plugin {status.name}: {status.reason}", file=sys.stderr)
    if broken or not all(report.ok for report in reports):
        raise typer.Exit(1)


def _arch(kernel: Kernel) -> str | None:
    """Where a kernel would be verified; None if it cannot run here. The reference has nothing to be held against."""
    if kernel.backend == "reference":
        return None
    if kernel.compiler == "triton" and interpreted():
        return next(platform.arch for platform in _served(kernel)) if interpretable(kernel) else None
    here = present_platform()
    fits = kernel.requires.explain(here) is None and kernel.name not in default_registry.unusable
    return here.arch if fits else None


def _served(kernel: Kernel) -> list[Platform]:
    """The known platforms that a kernel is for."""
    return [p for p in PLATFORMS.values() if p.vendor != "cpu" and kernel.requires.explain(p) is None]


def _check(task: _Task) -> Report:
    """Says and records at once what came of it: all of them together may take long."""
    (kernel,) = (kernel for kernel in default_registry.kernels() if kernel.name == task.kernel)
    contract = default_registry.contract(kernel.op)
    in_interpreter = kernel.compiler == "triton" and interpreted()
    cases = interpretable_cases(contract, task.limit) if in_interpreter else None
    platform = known_platform(task.arch) if in_interpreter else None
    started = time.monotonic()
    report = check_kernel(contract, kernel, _device(), cases, platform=platform)
    verdict = "ok" if report.ok else "FAILED"
    print(f"{kernel.name}: {report.cases} cases, {verdict}, {time.monotonic() - started:.0f} s", file=sys.stderr)
    for failure in report.failures:
        print(f"{kernel.name}: {failure}", file=sys.stderr)
    if report.ok and task.record:
        _record(task, kernel, report)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # other processes check kernels on this device too
    return report


def _died(task: _Task, how: str) -> Report:
    (kernel,) = (kernel for kernel in default_registry.kernels() if kernel.name == task.kernel)
    return Report(kernel.op, kernel.name, kernel.backend, failures=[how])


def _device() -> torch.device:
    """Where kernels are verified; where Triton interprets, everything is, so that results are of one kind."""
    return torch.device("cuda" if torch.cuda.is_available() and not interpreted() else "cpu")


def _record(task: _Task, kernel: Kernel, report: Report) -> None:
    if kernel.compiler is None:
        return  # runs wherever torch does, and needs no evidence of its own
    facts = {**facts_now(), "cases": report.cases, "refused": report.refused}
    facts |= {"worst_error": report.worst.error, "tolerance": report.worst.tolerance}
    in_interpreter = kernel.compiler == "triton" and interpreted()
    level = Level.INTERPRETED if in_interpreter else Level.VERIFIED
    archs = [platform.arch for platform in _served(kernel)] if in_interpreter else [task.arch]
    for arch in archs:
        found = Record(kernel.name, kernel.source_hash, arch, compiler_version(kernel), {level: facts})
        if task.evidence is None:
            default_registry.record(found)
        else:
            write_record(task.evidence, found)


def _verdict(report: Report) -> dict[str, Any]:
    return {
        "op": report.op,
        "kernel": report.kernel,
        "backend": report.backend,
        "cases": report.cases,
        "refused": report.refused,
        "unreached": report.unreached,
        "worst_error": report.worst.error,
        "tolerance": report.worst.tolerance,
        "ok": report.ok,
    }
