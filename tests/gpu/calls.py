"""Calls of kernels on a device, from the op's own cases."""

from typing import Any

import torch

from tokenspeed_registry import Contract, Kernel
from tokenspeed_registry.cases import case_set

CUDA = torch.device("cuda")
Arguments = dict[str, Any]


def model_arguments(contract: Contract, small: dict[str, Any] | None = None) -> Arguments:
    """Those of the first model's static dims at small sizes, on the device."""
    source = case_set(contract)
    name, smalls = next(iter(source.statics.items()))
    params = smalls[0] if smalls else source.models[name]
    return source.arguments(contract, source.case({**params, **(small or {})}), CUDA)


def copied(arguments: Arguments) -> Arguments:
    """With tensors of their own, strides kept."""
    return {name: _copy(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def run(contract: Contract, kernel: Kernel, arguments: Arguments) -> tuple[torch.Tensor, ...]:
    """The outputs, and then what the op mutates."""
    args = [arguments[p.name] for p in contract.parameters if not p.keyword]
    outputs = kernel.function(*args, **{p.name: arguments[p.name] for p in contract.parameters if p.keyword})
    found = () if outputs is None else outputs if isinstance(outputs, tuple) else (outputs,)
    return (*found, *(arguments[name] for name in contract.mutates if arguments[name] is not None))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage()).clone()
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
