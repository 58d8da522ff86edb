"""Calls of kernels on a device, from the op's own cases."""

from typing import Any

import torch

from tokenspeed_registry import Contract, Kernel, platform_of
from tokenspeed_registry.cases import case_set

CUDA = torch.device("cuda")
Arguments = dict[str, Any]


def model_arguments(contract: Contract, kernel: Kernel) -> Arguments:
    """On the device: those of the first case that the kernel takes, best of a model's static dims at small sizes."""
    source = case_set(contract)
    smalls = [source.case(small) for smalls in source.statics.values() for small in smalls]
    for case in [*smalls, *source.cases(), *source.swept().values()]:
        signature = source.signature(contract, case).placed(kernel.on_host)
        if kernel.refusals(platform_of(CUDA), signature)[0]:
            return source.arguments(contract, case, CUDA)
    raise LookupError(f"{contract.name} has no case that {kernel.name} takes")


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
