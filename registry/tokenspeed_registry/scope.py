"""Choices and recordings that hold for a block of code, per thread and per async task.

with use("torch"): ...                    every op by this backend, or an error that says why it cannot
with use(mla_decode="cuda.mla_decode"): ...
with trace() as calls: ...                what really ran: [Call(op, kernel, backend, seconds), ...]
with override_platform(platform): ...     select as if every device were of this platform
"""

import difflib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tokenspeed_registry.errors import UnknownNameError
from tokenspeed_registry.platform import Platform


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
    platform: Platform | None = None

    def choice(self, op: str) -> str | None:
        return self.choices.get(op, self.choices.get("*"))


declared_ops: set[str] = set()
"""Names of all ops of all registries, so that a choice for a misspelt one does not go unnoticed."""

current_scope: ContextVar[Scope | None] = ContextVar("tokenspeed_scope", default=None)


@contextmanager
def use(backend: str | None = None, **ops: str) -> Iterator[None]:
    """Serve every op by `backend`, or single ops as the keywords say; strict: what cannot be so served raises.

    Raises `UnknownNameError` for a keyword that is no op.
    """
    for name in ops:
        check_op_name(name)
    choices = {**_current().choices, **({"*": backend} if backend else {}), **ops}
    with _within(choices=choices):
        yield


@contextmanager
def trace(timed: bool = False) -> Iterator[list[Call]]:
    """Records every call dispatched in the block. `timed` waits for the device after each: for looking only."""
    calls: list[Call] = []
    outer = _current()
    try:
        with _within(calls=calls, timed=timed or outer.timed):
            yield calls
    finally:
        if outer.calls is not None:
            outer.calls.extend(calls)


@contextmanager
def override_platform(platform: Platform) -> Iterator[None]:
    """Selects kernels as if every device were `platform`: for tests and planning."""
    with _within(platform=platform):
        yield


def check_op_name(name: str) -> None:
    """Raises `UnknownNameError` that suggests near names."""
    if name not in declared_ops:
        near = difflib.get_close_matches(name, declared_ops, 3) or sorted(declared_ops)
        raise UnknownNameError(f"unknown op {name!r}; did you mean {', '.join(near)}?")


def recording(scope: Scope, op: str, kernel: str, backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, adding a `Call` to the scope's list each time it returns while that list is being recorded."""
    calls = scope.calls
    if calls is None:
        return function

    def record(*args: Any, **kwargs: Any) -> Any:
        current = current_scope.get()
        if current is None or current.calls is not calls:  # a bound handle may outlive the trace it was made under
            return function(*args, **kwargs)
        started = time.perf_counter()
        result = function(*args, **kwargs)
        seconds = None
        if scope.timed:
            _wait_for((*args, *kwargs.values()))
            seconds = time.perf_counter() - started
        calls.append(Call(op, kernel, backend, seconds))
        return result

    return record


def _current() -> Scope:
    return current_scope.get() or Scope()


@contextmanager
def _within(**changes: Any) -> Iterator[None]:
    token = current_scope.set(replace(_current(), **changes))
    try:
        yield
    finally:
        current_scope.reset(token)


def _wait_for(arguments: tuple[Any, ...]) -> None:
    for device in {argument.device for argument in arguments if isinstance(argument, torch.Tensor)}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
