"""`tokenspeed-kernels warmup`: compiles ahead all that a model will need, so that no request waits for a compiler."""

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenspeed_kernels.compile_command import Jobs, compile_ahead, failed
from tokenspeed_kernels.parallel import each
from tokenspeed_kernels.printing import Json, print_rows
from tokenspeed_registry import Call, Kernel, Platform, TokenspeedError, known_platform, present_platform
from tokenspeed_registry.compiled import on_meta
from tokenspeed_registry.registry import default_registry
from tokenspeed_registry.scope import outlined

REHEARSALS = "tokenspeed_kernels.rehearsals"
"""Entry points of those who run models: `rehearse(folder, max_batch, max_step_tokens, page_size) -> list[Call]`."""


@dataclass(frozen=True)
class Task:
    """A kernel by name, an arch, and the arguments of calls, tensors as outlines."""

    kernel: str
    arch: str
    calls: Sequence[Mapping[str, Any]]

    def __str__(self) -> str:
        return f"{self.kernel} for {self.arch}"


def warmup(
    model: Annotated[Path, typer.Option(help="A model folder; its config.json is all that is read.")],
    arch: Annotated[str | None, typer.Option(help="An arch of the table; this machine's unless given.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 32,
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one step.")] = 8192,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a page of the caches.")] = 64,
    jobs: Jobs = 1,
    as_json: Json = False,
) -> None:
    """Compiles every kernel that MODEL's steps call, at each bucket of sizes; exit code 1 where one fails.

    What is compiled lands in the compiler's cache of this user, where the model's own calls find it.
    """
    platform = present_platform() if arch is None else known_platform(arch)
    calls = _unique(_rehearsal()(model, max_batch, max_step_tokens, page_size))
    tasks = _tasks(calls, platform)
    if not tasks:
        raise TokenspeedError(f"nothing to compile for {platform.arch}: plain torch serves all of it")
    rows = [row for found in each(_compile, tasks, "warm up", jobs, _died) for row in found]
    print_rows(rows, f"{len(calls)} different calls on {platform.arch}", as_json)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def _rehearsal() -> Any:
    found = list(importlib.metadata.entry_points(group=REHEARSALS))
    if not found:
        raise TokenspeedError("nothing that runs models is installed: no entry point in " + REHEARSALS)
    return found[0].load()


def _unique(calls: Iterable[Call]) -> list[Call]:
    """One of each: layers repeat one another."""
    return list({str((call.op, sorted(call.arguments.items()))): call for call in calls}.values())


def _tasks(calls: list[Call], platform: Platform) -> list[Task]:
    """The calls of each kernel that has something to compile, the kernel being that which selection would take."""
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for call in calls:
        kernel = chosen(call, platform)
        if kernel is not None and kernel.compiler is not None:
            grouped.setdefault(kernel.name, []).append(call.arguments)
    return [Task(name, platform.arch, arguments) for name, arguments in grouped.items()]


def chosen(call: Call, platform: Platform) -> Kernel | None:
    """The kernel that selection would take."""
    candidates = default_registry.explain(call.op, platform, call.signature)
    return next((candidate.kernel for candidate in candidates if candidate.accepted), None)


def _died(task: Task, how: str) -> list[dict[str, Any]]:
    return [failed(task.kernel, task.arch)]


def _compile(task: Task) -> list[dict[str, Any]]:
    (kernel,) = (kernel for kernel in default_registry.kernels() if kernel.name == task.kernel)
    contract = default_registry.contract(kernel.op)
    prepared = [on_meta(contract, outlined(contract, arguments)) for arguments in task.calls]
    return compile_ahead(kernel, known_platform(task.arch), prepared)
