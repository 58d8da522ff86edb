"""`tokenspeed-kernels compile`: cross-compiles kernels for archs that need not be here, and says what they take."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenspeed_kernels.choose import Backend, Ops, chosen_kernels
from tokenspeed_kernels.facts import facts_now
from tokenspeed_kernels.parallel import each
from tokenspeed_kernels.printing import Json, print_rows
from tokenspeed_registry import Kernel, Platform, UnknownNameError, known_platform
from tokenspeed_registry.compiled import KernelCall, load_compile, planned_calls
from tokenspeed_registry.evidence import compiler_version, write_record
from tokenspeed_registry.record import Level, Record
from tokenspeed_registry.registry import default_registry

Evidence = Annotated[Path | None, typer.Option("--evidence", help="Record into this folder instead of the user's.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="So many processes.")]


@dataclass(frozen=True)
class Task:
    """A kernel by name, an arch, and where to record what comes of it, if at all (None: the user's evidence)."""

    kernel: str
    arch: str
    record: bool
    evidence: Path | None

    def __str__(self) -> str:
        return f"{self.kernel} for {self.arch}"


def compile_kernels(
    arch: Annotated[str, typer.Option(help="Archs of the table, separated by commas.")],
    op: Ops = None,
    backend: Backend = None,
    jobs: Jobs = 1,
    record: Annotated[bool, typer.Option("--record", help="Record the result as evidence.")] = False,
    evidence: Evidence = None,
    as_json: Json = False,
) -> None:
    """Compiles each kernel for ARCH at its op's model shapes; exit code 1 where one does not compile."""
    archs = [known_platform(name).arch for name in arch.split(",")]
    records = record or evidence is not None
    tasks = [
        Task(kernel.name, name, records, evidence)
        for kernel in chosen_kernels(op, backend)
        for name in archs
        if kernel.compiler is not None
        and _compiles(kernel.backend)
        and kernel.requires.explain(known_platform(name)) is None
    ]
    if not tasks:
        raise UnknownNameError("no kernel to compile: the filters leave none with a compiler for these archs")
    rows = [row for found in each(compile_one, tasks, "compile", jobs, _died) for row in found]
    print_rows(rows, "compiled", as_json)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def compile_one(task: Task) -> list[dict[str, Any]]:
    """Rows of one kernel for one arch, recorded at once: all of them together take long."""
    (kernel,) = (kernel for kernel in default_registry.kernels() if kernel.name == task.kernel)
    platform = known_platform(task.arch)
    calls = planned_calls(default_registry.contract(kernel.op), kernel, platform)
    if not calls:
        print(f"{kernel.name} for {platform.arch}: no case of its op that it would serve", file=sys.stderr)
    rows = compile_ahead(kernel, platform, calls)
    if task.record and rows and all(row["ok"] for row in rows):
        _record(kernel, task, rows)
    return rows


def compile_ahead(kernel: Kernel, platform: Platform, calls: Sequence[KernelCall]) -> list[dict[str, Any]]:
    """A row for each distinct launch of the calls; one that is not ok where they do not compile."""
    blank = failed(kernel.name, platform.arch)
    plugin = next(status.plugin for status in default_registry.plugins() if status.name == kernel.backend)
    assert plugin is not None, kernel.backend
    assert plugin.compile is not None, kernel.backend
    try:
        found = load_compile(plugin.compile)(kernel, platform, calls)
    except Exception as error:  # a compiler may fail in any way; the row says how
        print(f"{kernel.name} for {platform.arch}: {type(error).__name__}: {error}", file=sys.stderr)
        return [blank]
    return [{**blank, **launch.to_json(), "ok": True} for launch in found] or [blank]


def failed(kernel: str, arch: str) -> dict[str, Any]:
    """The row of a kernel that does not compile."""
    head = {"kernel": kernel, "config": "", "arch": arch, "ok": False}
    return {**head, "registers": None, "spills": None, "shared_bytes": None, "instructions": {}}


def _died(task: Task, how: str) -> list[dict[str, Any]]:
    return [failed(task.kernel, task.arch)]


def _compiles(backend: str) -> bool:
    """Whether the plugin of that name says how its kernels are compiled ahead."""
    return any(s.name == backend and s.plugin is not None and s.plugin.compile for s in default_registry.plugins())


def _record(kernel: Kernel, task: Task, rows: list[dict[str, Any]]) -> None:
    kept = ("config", "registers", "spills", "shared_bytes", "instructions")
    facts = {**facts_now(), "configs": [{key: row[key] for key in kept} for row in rows]}
    found = Record(kernel.name, kernel.source_hash, task.arch, compiler_version(kernel), {Level.COMPILED: facts})
    if task.evidence is None:
        default_registry.record(found)
    else:
        write_record(task.evidence, found)
