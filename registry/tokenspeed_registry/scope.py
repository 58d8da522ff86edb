"""Choices and recordings that hold for a block of code, per thread and per async task.

with use("torch"): ...                    every op by this backend, or an error that says why it cannot
with use(mla_decode="cuda.mla_decode"): ...
with trace() as calls: ...                what really ran: [Call(op, kernel, seconds), ...]
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One dispatched call. `seconds` is None unless the trace is timed."""

    op: str
    kernel: str
    backend: str
    seconds: float | None = None


@dataclass(frozen=True)
class Scope:
    """`choices` maps op names, or "*", to an explicit backend or kernel name; `calls` collects where tracing is on."""

    choices: Mapping[str, str] = field(default_factory=dict)
    calls: list[Call] | None = None
    timed: bool = False

    def choice(self, op: str) -> str | None:
        return self.choices.get(op, self.choices.get("*"))


current_scope: ContextVar[Scope | None] = ContextVar("tokenspeed_scope", default=None)


@contextmanager
def use(backend: str | None = None, **ops: str) -> Iterator[None]:
    """Serve every op by `backend`, or single ops as the keywords say; strict: what cannot be so served raises."""
    outer = current_scope.get() or Scope()
    choices = {**outer.choices, **({"*": backend} if backend else {}), **ops}
    token = current_scope.set(Scope(choices, outer.calls, outer.timed))
    try:
        yield
    finally:
        current_scope.reset(token)


@contextmanager
def trace(timed: bool = False) -> Iterator[list[Call]]:
    """Records every call dispatched in the block. `timed` waits for the device after each: for looking only."""
    outer = current_scope.get() or Scope()
    calls: list[Call] = []
    token = current_scope.set(Scope(outer.choices, calls, timed))
    try:
        yield calls
    finally:
        current_scope.reset(token)


def recording(scope: Scope, op: str, kernel: str, backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, adding a `Call` to the scope's list each time it returns."""
    calls = scope.calls
    if calls is None:
        return function

    def record(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        seconds = None
        if scope.timed:
            _wait_for(args)
            seconds = time.perf_counter() - started
        calls.append(Call(op, kernel, backend, seconds))
        return result

    return record


def _wait_for(args: tuple[Any, ...]) -> None:
    import torch

    if args[0].device.type == "cuda":
        torch.cuda.synchronize(args[0].device)
