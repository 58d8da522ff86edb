"""Whether Triton kernels can run here. Imports no Triton: that takes longer than the rest of the toolkit."""

import importlib.util

import torch


def unusable() -> str | None:
    """Why not, in one line; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "no NVIDIA or AMD device that torch can use"
    return None
