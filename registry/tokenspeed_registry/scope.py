"""Choices and recordings that hold for a block of code, per thread and per async task.

with use("torch"): ...                    every op by this backend, or an error that says why it cannot
with use(mla_decode="cuda.mla_decode"): ...
with trace() as calls: ...                what really ran: [Call(op, kernel, backend, ...), ...]
with dry_run() as calls: ...              what would have run: ops return tensors without computing them
with override_platform(platform): ...     select as if every device were of this platform
"""

import difflib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tokenspeed_registry.contract import Contract
from tokenspeed_registry.errors import UnknownNameError
from tokenspeed_registry.kernel import Kernel
from tokenspeed_registry.library import without_data
from tokenspeed_registry.platform import Platform
from tokenspeed_registry.signature import Signature
from tokenspeed_registry.validation import signature_of


@dataclass(frozen=True)
class Outline:
    """What a trace keeps of a tensor: enough for a signature, and no memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_cpu: bool

    def like(self, device: str) -> torch.Tensor:
        """A tensor of this outline, its contents arbitrary."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Call:
    """One dispatched call. `seconds` is None unless the trace is timed.

    Two calls are equal if the same kernel served the same op in the same time, whatever their arguments.
    """

    op: str
    kernel: str
    backend: str
    seconds: float | None = None
    contract: Contract | None = field(default=None, compare=False, repr=False)
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def signature(self) -> Signature:
        """Dims, dtypes, flags and layouts of the call, for warm-up, tuning and reports.

        Made when asked for, so that tracing is cheap. Where tensors start is not kept: alignments are those of strides.
        """
        assert self.contract is not None, "only a traced call has a signature"
        signature = signature_of(self.contract, outlined(self.contract, self.arguments))
        accelerated = not self.arguments[self.contract.tensors[0].name].is_cpu
        layouts = {
            name: replace(layout, on_host=accelerated and self.arguments[name].is_cpu)
            for name, layout in signature.layouts.items()
        }
        return replace(signature, layouts=layouts)


def outlined(contract: Contract, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors instead of outlines, on the meta device, or on the CPU where the contract wants them there."""
    return {
        name: value.like("cpu" if name in contract.host else "meta") if isinstance(value, Outline) else value
        for name, value in arguments.items()
    }


@dataclass(frozen=True)
class Scope:
    """`choices` maps op names, or "*", to an explicit backend or kernel name; `calls` collects where tracing is on.

    `dry`: calls are collected, and kernels do not run.
    """

    choices: Mapping[str, str] = field(default_factory=dict)
    calls: list[Call] | None = None
    timed: bool = False
    dry: bool = False
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
def dry_run() -> Iterator[list[Call]]:
    """As `trace`, but no kernel runs: outputs have the promised shapes and any content, mutated tensors stay.

    On the meta device a model of any size so shows which calls it makes.
    """
    calls: list[Call] = []
    with _within(calls=calls, dry=True):
        yield calls


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


def recording(scope: Scope, contract: Contract, kernel: Kernel, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which runs the kernel, adding a `Call` to the scope's list each time it returns in the scope."""
    calls = scope.calls
    function = without_data(contract) if scope.dry else function
    if calls is None:
        return function
    names = [parameter.name for parameter in contract.parameters]

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
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        arguments = {name: _outline(given[name]) for name in names}
        calls.append(Call(contract.name, kernel.name, kernel.backend, seconds, contract, arguments))
        return result

    return record


def _outline(value: Any) -> Any:
    return Outline(value.shape, value.stride(), value.dtype, value.is_cpu) if isinstance(value, torch.Tensor) else value


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
