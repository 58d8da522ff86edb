"""Weights of random numbers in the formats of real checkpoints: any size of model, without a file."""

import zlib
from collections.abc import Collection
from typing import Literal, get_args

import torch

from tokenspeed_engine.checkpoint.load import Weights, allocate
from tokenspeed_engine.checkpoint.plan import Layout, Parameter, WeightPlan

Format = Literal["model", "fp8", "nvfp4"]
"""What experts and tables come in: the model's dtype, or what the layouts of that name hold, where there are any."""

DEVIATION = 0.02
_RMS_OF_CODES = 2.93
"""Root mean square of the E2M1 codes, each as often as any."""
_PART = 1 << 26
"""Elements drawn at a time, so that what is drawn in float32 stays small beside its target."""


def dummy_weights(
    plan: WeightPlan,
    device: torch.device,
    dtype: torch.dtype,
    format: Format,
    host: Collection[str] = (),
    seed: int = 0,
) -> Weights:
    """Every parameter of `plan`, placed as `load_weights` does; the same for the same seed on the same kind of device.

    A parameter comes in its first layout whose name begins with `format`, one without an NVFP4 layout in an FP8 one,
    and one without either in the model's dtype. Values have mean 0 and deviation 0.02. Raises ValueError for an unknown
    format, and for one that the plan refuses.
    """
    if format not in get_args(Format):
        raise ValueError(f"dummy_format: expected one of {', '.join(get_args(Format))}, got {format!r}")
    layouts = {parameter.name: _choose(parameter, format) for parameter in plan.parameters}
    for name, layout in layouts.items():
        if layout.refused is not None:
            raise ValueError(f"{name}: {layout.refused}")
    tensors = allocate(layouts, device, dtype, host)
    for name, tensor in tensors.items():
        # By name, since ranks that share a model hold different shapes of some, and the same of others.
        generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode(), seed))
        _fill(name, tensor, generator)
    return Weights(tensors, {name: layout.name for name, layout in layouts.items()})


def _choose(parameter: Parameter, format: Format) -> Layout:
    for prefix in {"model": (), "fp8": ("fp8",), "nvfp4": ("nvfp4", "fp8")}[format]:
        for layout in parameter.layouts:
            if layout.name.startswith(prefix):
                return layout
    return parameter.layouts[0]


def _fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Draws elements, or sets a scale such that scale times element has the deviation."""
    if name.endswith(".global_scale"):
        tensor.fill_(DEVIATION / _RMS_OF_CODES)
    elif name.endswith(".scale"):
        tensor.fill_(DEVIATION if tensor.dtype == torch.float32 else 1.0)
    elif tensor.dtype == torch.uint8:
        tensor.random_(0, 256, generator=generator)
    else:
        deviation = 1.0 if tensor.dtype == torch.float8_e4m3fn else DEVIATION
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), _PART):
            part = flat[start : start + _PART]
            drawn = torch.randn(part.shape, dtype=torch.float32, device=part.device, generator=generator)
            part.copy_(drawn.mul_(deviation))
