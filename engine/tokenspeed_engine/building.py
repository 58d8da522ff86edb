"""From a model folder to what runs it: a rank's weights, its caches, and a runner of plans over both."""

from pathlib import Path

import torch

from tokenspeed_engine.execution.runner import ModelRunner
from tokenspeed_engine.loading import load_model
from tokenspeed_engine.models.families import ModelDescription
from tokenspeed_engine.options import EngineOptions, Sizes, plan_sizes


def choose_device(options: EngineOptions) -> torch.device:
    """The device of the first rank."""
    return torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def build_runner(
    folder: Path, description: ModelDescription, options: EngineOptions, device: torch.device
) -> tuple[ModelRunner, Sizes]:
    """The runner of a rank, that of `description`, and the sizes it was made for, which are the same on all ranks.

    Raises `CheckpointError` for weights that are not those of the model, and ValueError for sizes that cannot work.
    """
    dtype = _dtype(options.dtype, description, device)
    sizes = plan_sizes(options, description, dtype, device)
    # The weights are dropped once the model is built: what it has put together anew is free before the caches come.
    model = description.build(load_model(folder, description, options, device, dtype))
    runner = ModelRunner(
        description,
        model,
        description.allocate_caches(sizes.caches, dtype, device),
        sizes.caches,
        device,
        num_host_snapshots=sizes.control.num_host_snapshots,
        max_length=sizes.control.max_context,
        buckets=device.type != "cpu" if options.buckets is None else options.buckets,
    )
    return runner, sizes


def _dtype(name: str | None, description: ModelDescription, device: torch.device) -> torch.dtype:
    chosen = name or ("float32" if device.type == "cpu" else description.config.dtype or "bfloat16")
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if chosen not in known:
        raise ValueError(f"dtype: expected {' or '.join(known)}, got {chosen!r}")
    return known[chosen]
