"""Kernels run on their tensors' device: compilers launch on the current one, which need not be that."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_registry.kernel import Kernel


def launcher(kernel: Kernel, first: int) -> Callable[..., Any]:
    """The kernel's function; with several devices in the process, one that makes the tensors' device current.

    `first`: the position of the argument whose device counts. Kernels that only call torch need no help.
    """
    if kernel.compiler is None or torch.cuda.device_count() < 2:
        return kernel.function
    function = kernel.function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = args[first].device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(*args, **kwargs)
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return run
