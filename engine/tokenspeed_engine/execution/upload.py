"""Index tensors of a step on their way to the device: all in one copy."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = Mapping[str, NDArray[Any]]
Tensors = Mapping[str, Tensor]

_ALIGNMENT = 16
"""Bytes, as vector loads of kernels want it."""


class Arena:
    """Device tensors of fixed shapes at fixed addresses, filled from host arrays of those shapes.

    On a device the arrays are gathered in pinned memory and go over in one asynchronous copy; `fill` must not be called
    again before that was done, which the result of a step tells.
    """

    def __init__(self, arrays: Arrays, device: torch.device) -> None:
        self._host: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        size = sum(_aligned(array.nbytes) for array in arrays.values())
        self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._buffer = self._staging if device.type == "cpu" else torch.empty(size, dtype=torch.uint8, device=device)
        start = 0
        for name, array in arrays.items():
            dtype, end = torch.from_numpy(array[:0]).dtype, start + array.nbytes
            self._host[name] = self._staging[start:end].view(dtype).view(array.shape)
            self.tensors[name] = self._buffer[start:end].view(dtype).view(array.shape)
            start += _aligned(array.nbytes)

    def fill(self, arrays: Arrays) -> Tensors:
        """The tensors, which from now on hold these arrays."""
        for name, array in arrays.items():
            self._host[name].numpy()[...] = array
        if self._buffer is not self._staging:
            self._buffer.copy_(self._staging, non_blocking=True)
        return self.tensors


def upload(arrays: Arrays, device: torch.device) -> Tensors:
    """The arrays as new tensors on a device."""
    return Arena(arrays, device).fill(arrays)


def int32(values: Any) -> NDArray[np.int32]:
    return np.asarray(values, dtype=np.int32)


def int64(values: Any) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
