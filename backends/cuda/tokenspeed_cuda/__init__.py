"""NVIDIA backend: kernels for Hopper and Blackwell in CUDA C++, `backend="cuda"`. Portable ones serve what it leaves.

One folder a family: each technique is a source `x.cu` and its launcher `x.py`. What they share:

`code`: compiles a source by NVRTC, kept on disk. `launch`: launches what came of it.
`declare`: how a kernel of this backend is declared. `ahead`: compiles for an arch that is not here.
`tensor_map`, `counters`: arguments that need the driver. `csrc/`: device code in words.
"""

import importlib.util
from pathlib import Path

import torch

from tokenspeed_registry import Plugin, present_platform

_KERNELS = (
    "gdn.prefill",
    "gdn.recurrent",
    "gdn.replay",
    "linear.few",
    "mla.decode_few",
    "mla.decode_many",
    "mla.prefill",
    "moe.few",
    "moe_prefill.experts",
    "ngram.embed",
    "residual.few",
    "residual.many",
)


def probe() -> str | None:
    """Why the backend is not usable here; None where an NVIDIA device of a known arch is present."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "no NVIDIA device that torch can use"
    platform = present_platform()
    if not platform.features:
        return f"device {platform.device} has an arch this backend does not know: {platform.arch}"
    return None if _installed("cuda.core") else "cuda-python is not installed: pip install 'tokenspeed-kernels[cuda]'"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that should hold it
        return False


plugin = Plugin(
    "cuda",
    modules=tuple(f"tokenspeed_cuda.{name}" for name in _KERNELS),
    probe=probe,
    evidence=Path(__file__).parent / "evidence",
    compile="tokenspeed_cuda.ahead:compile_calls",
)
