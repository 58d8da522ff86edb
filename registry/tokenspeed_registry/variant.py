"""What of a call stays fixed while dynamic dims change: static dims, dtypes, flags, and what lies in host memory.

A compiler specialises for it, so a self-check speaks of one variant, and times are compared within one.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tokenspeed_registry.contract import Contract
from tokenspeed_registry.signature import Flag, Signature
from tokenspeed_registry.validation import output_dtype

Value = bool | int | float | str | None
"""A flag as JSON can hold it: a dtype by its name."""


@dataclass(frozen=True)
class Variant:
    """Static dims, dtypes of the tensors present, flags of the dispatch key, and placeable tensors in host memory."""

    dims: Mapping[str, int]
    dtypes: Mapping[str, str]
    flags: Mapping[str, Value]
    host: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = {**self.dims, **self.dtypes, **self.flags}
        return ", ".join([*(f"{name}={value}" for name, value in parts.items()), *(f"{t} on host" for t in self.host)])


def variant_of(contract: Contract, signature: Signature) -> Variant:
    """The variant that a complete signature belongs to."""
    return Variant(
        {dim: signature.dims[dim] for dim in contract.static if dim in signature.dims},
        {t.name: _name(signature.dtypes[t.name]) for t in contract.tensors if t.name in signature.dtypes},
        {flag.name: _value(signature.flags[flag.name]) for flag in contract.flags},
        tuple(name for name, layout in signature.layouts.items() if layout.on_host and name in contract.placeable),
    )


def completed(contract: Contract, signature: Signature) -> Signature | None:
    """`signature` with what the contract adds to it, as a call that mentions no more would have it.

    Scalars take their defaults, optional tensors that are not mentioned are absent, outputs follow. None where the
    dtype of a required tensor is not known. The signature of a call is complete already.
    """
    needed = {tensor.name for tensor in contract.tensors if not tensor.optional} | signature.present
    if needed - signature.dtypes.keys():
        return None
    defaults = {s.name: None if s.default is inspect.Parameter.empty else s.default for s in contract.scalars}
    given = {s.name: signature.dims[s.name] for s in contract.scalars if s.name in signature.dims}
    flags: dict[str, Flag] = {**defaults, **given, **signature.flags}  # type: ignore[dict-item]
    numbers = {s.name: flags[s.name] for s in contract.scalars if s.type is int and flags[s.name] is not None}
    dtypes = dict(signature.dtypes)
    shapes: dict[str, Sequence[str]] = {t.name: t.dims for t in contract.tensors if t.name in dtypes}
    for output in contract.outputs:
        shapes[output.name] = output.dims
        dtypes[output.name] = output_dtype(output, signature.dtypes, flags)
    dims: dict[str, int] = {**numbers, **signature.dims}  # type: ignore[dict-item]
    return replace(signature, dims=dims, dtypes=dtypes, flags=flags, shapes=shapes)


def with_dims(signature: Signature, dims: Mapping[str, int]) -> Signature:
    """The same call at other sizes; integer scalars, which are flags too, follow. What was counted for it is gone."""
    flags = {name: dims.get(name, value) for name, value in signature.flags.items()}
    return replace(signature, dims=dims, flags=flags, counts={})


def _value(flag: Flag) -> Value:
    return _name(flag) if isinstance(flag, torch.dtype) else flag


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
