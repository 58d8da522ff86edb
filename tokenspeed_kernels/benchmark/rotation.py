"""Copies of a call's arguments and outputs, so that every call finds cold data and fresh state.

Timed calls go round the copies. What the op mutates is restored from the pristine arguments before every batch, in
place: the addresses that a graph captured stay valid.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_registry import Contract, Signature
from tokenspeed_registry.signature import evaluate

LEAST_BYTES = 250_000_000
LEAST_CACHES = 3
"""All copies together hold as many bytes, and as many times the last-level cache."""
MOST = 64
FEWEST = 4
"""Fewer only where memory is short: what a replay costs beside its launches is shared by all calls of it."""
SHARE = 0.7
"""Of the free memory; the rest is for workspaces and the check."""
CHECKING = 4
"""Copies of the arguments that the check of a call may need at once."""


class Rotation:
    """`copies` copies of a call's arguments, with outputs for each.

    `arguments` are the pristine ones and are never handed to a kernel. `on_host`: placeable tensors that go to pinned
    host memory, one copy for all, since no cache of the device holds it.
    """

    def __init__(
        self,
        contract: Contract,
        signature: Signature,
        arguments: Mapping[str, Any],
        copies: int,
        on_host: Iterable[str] = (),
    ) -> None:
        self.arguments = arguments
        device = device_of(contract, arguments)
        pinned = {name: _pinned(arguments[name]) for name in on_host if arguments[name] is not None}
        own = {name: value for name, value in arguments.items() if name not in pinned}
        self.copies = [{**{name: _clone(value) for name, value in own.items()}, **pinned} for _ in range(copies)]
        self.outs = [_outputs(contract, signature, device) for _ in range(copies)]
        self._mutated = [name for name in contract.mutates if arguments[name] is not None]
        self._contract = contract

    def restore(self) -> None:
        """Every mutated tensor as it was, padding between rows included."""
        for name in self._mutated:
            pristine = _storage(self.arguments[name])
            for copy in self.copies:
                _storage(copy[name]).copy_(pristine)

    def poison(self) -> None:
        """Fills outputs with what no kernel may leave there."""
        for out in self.outs:
            for tensor in out:
                tensor.fill_(_poison(tensor.dtype))

    def calls(self, function: Callable[..., Any]) -> list[Callable[[], Any]]:
        """A call of `function`, which has the op's own signature, on each of the copies."""
        return [self._call(function, copy, out) for copy, out in zip(self.copies, self.outs, strict=True)]

    def _call(self, function: Callable[..., Any], copy: Mapping[str, Any], out: Sequence[Tensor]) -> Callable[[], Any]:
        positional = [copy[p.name] for p in self._contract.parameters if not p.keyword]
        keywords = {p.name: copy[p.name] for p in self._contract.parameters if p.keyword}
        if out:
            keywords["out"] = tuple(out) if len(out) > 1 else out[0]
        return lambda: function(*positional, **keywords)


def copies_needed(moved: float, footprint: float, cache: int, free: float) -> int:
    """How many copies rotate: enough for cold data, at most what fits.

    `moved`: bytes that a call moves. `footprint`: bytes of its arguments and outputs. `cache`: of the device's last
    level. `free`: memory.
    """
    touched = max(min(moved, footprint), 1)
    wanted = math.ceil(max(LEAST_CACHES * cache, LEAST_BYTES) / touched)
    fitting = int(SHARE * free / max(footprint, 1)) - CHECKING
    return max(1, min(MOST, max(wanted, FEWEST), fitting))


def footprint(contract: Contract, signature: Signature, arguments: Mapping[str, Any]) -> int:
    """Bytes of the arguments, with what lies between their rows, and of the outputs."""
    tensors = (arguments[tensor.name] for tensor in contract.tensors)
    inputs: int = sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)
    return inputs + signature.nbytes(*(output.name for output in contract.outputs))


def device_of(contract: Contract, arguments: Mapping[str, Any]) -> torch.device:
    """The first tensor says which device runs."""
    first = arguments[contract.tensors[0].name]
    assert isinstance(first, Tensor)
    return first.device


def _outputs(contract: Contract, signature: Signature, device: torch.device) -> tuple[Tensor, ...]:
    shapes = {o.name: [evaluate(expr, signature.dims) for expr in signature.shapes[o.name]] for o in contract.outputs}
    return tuple(torch.empty(shape, dtype=signature.dtype(name), device=device) for name, shape in shapes.items())


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).min


def _clone(value: Any) -> Any:
    """A copy with the same strides: a kernel sees the layout that the case has."""
    if not isinstance(value, Tensor):
        return value
    return _storage(value).clone().as_strided(value.shape, value.stride(), value.storage_offset())


def _pinned(tensor: Tensor) -> Tensor:
    host = tensor.cpu()
    return host.pin_memory() if tensor.device.type == "cuda" else host


def _storage(tensor: Tensor) -> Tensor:
    """All that a tensor's storage holds, flat."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
