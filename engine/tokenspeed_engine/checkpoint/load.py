"""Fills the engine's tensors from a checkpoint, or with random numbers."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.checkpoint.match import match
from tokenspeed_engine.checkpoint.plan import NOTHING, Layout, Target, WeightPlan
from tokenspeed_engine.checkpoint.reader import Checkpoint
from tokenspeed_engine.checkpoint.stream import Read, stream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """Loaded tensors by target name, and the name of the layout each parameter came in.

    `quantise`: whether the model is to keep its projections in block-scaled FP8 where they came in a wider dtype.
    """

    tensors: Mapping[str, torch.Tensor]
    layouts: Mapping[str, str]
    quantise: bool = False

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors


def load_weights(
    checkpoint: Checkpoint,
    plan: WeightPlan,
    device: torch.device,
    dtype: torch.dtype,
    host: Collection[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Weights:
    """Reads every parameter of `plan` onto `device`, in `dtype` where a target is in the model's.

    `host`: names of targets that stay in host memory, page-locked where the device is an accelerator.

    Several files are read at once, each in small parts straight into their places, so host memory beyond the result
    stays far below one file. `progress` is told bytes read and bytes in all.

    Raises CheckpointError with every problem found: see `match`, and constants that differ from the computed ones.
    """
    found = match(plan, checkpoint.tensors, str(checkpoint.folder))
    wrong = [
        f"{constant.name}: {stored}, expected {list(constant.values)}"
        for constant in found.constants
        if (stored := checkpoint.read(constant.name).tolist()) != list(constant.values)
    ]
    if wrong:
        raise CheckpointError(str(checkpoint.folder), wrong)
    for skipped in found.skipped:
        logger.info("skipped %s: %d tensors, %d bytes", skipped.group, skipped.count, skipped.nbytes)

    tensors = allocate(found.layouts, device, dtype, host)
    reads = [
        Read(
            checkpoint.tensors[piece.name],
            tensors[target.name].view(-1)[piece.offset : piece.offset + piece.numel],
            piece.part,
        )
        for layout in found.layouts.values()
        for target in layout.targets
        for piece in target.pieces
        if piece.part != NOTHING
    ]
    stream(reads, progress)
    return Weights(tensors, {parameter: layout.name for parameter, layout in found.layouts.items()})


def allocate(
    layouts: Mapping[str, Layout], device: torch.device, dtype: torch.dtype, host: Collection[str]
) -> dict[str, torch.Tensor]:
    """A tensor of any content for every target, placed as `load_weights` says."""

    def tensor(target: Target) -> torch.Tensor:
        of = dtype if target.dtype == "model" else getattr(torch, target.dtype)
        if target.name in host:
            return torch.empty(target.shape, dtype=of, pin_memory=device.type == "cuda")
        return torch.empty(target.shape, dtype=of, device=device)

    return {target.name: tensor(target) for layout in layouts.values() for target in layout.targets}
