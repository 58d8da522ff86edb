"""What is done about a kernel that fails while it is timed: its error in a line, its memory back, or the end."""

import torch


class DeviceLostError(RuntimeError):
    """The device answers no more: what this process would time now means nothing."""


def survive(device: torch.device, error: Exception) -> None:
    """Frees what failed. Raises `DeviceLostError` where the device is lost."""
    if device.type != "cuda":
        return
    error.__traceback__ = None  # its frames hold tensors
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        raise DeviceLostError(line_of(error)) from None


def line_of(error: Exception) -> str:
    """An error for a table."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
