"""How a tensor lies in memory, for kernels that need more than their op's contract promises."""

from dataclasses import dataclass

import torch

WIDEST = 256
"""No access is wider, in bytes, so no alignment above it is told apart."""


@dataclass(frozen=True)
class Layout:
    """`alignment`: the power of two, in bytes and up to 256, that divides the start of every row of the last dim."""

    on_host: bool
    contiguous: bool
    alignment: int


def layout_of(tensor: torch.Tensor, device: torch.device) -> Layout:
    """The layout of an argument of a call that runs on `device`."""
    return Layout(is_on_host(tensor, device), tensor.is_contiguous(), alignment(tensor))


def is_on_host(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a call on an accelerator has this tensor in host memory."""
    return tensor.is_cpu and device.type != "cpu"


def alignment(tensor: torch.Tensor) -> int:
    """See `Layout`. Dims of one element have no say: nothing steps along them."""
    bits = WIDEST | (0 if tensor.device.type == "meta" else tensor.data_ptr())
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size > 1:
            bits |= stride * tensor.itemsize
    return bits & -bits
