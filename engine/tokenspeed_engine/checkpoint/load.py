"""Fills the engine's tensors from a checkpoint."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.checkpoint.match import match
from tokenspeed_engine.checkpoint.plan import Target, WeightPlan
from tokenspeed_engine.checkpoint.reader import Checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """Loaded tensors by target name, and the name of the layout each parameter came in."""

    tensors: Mapping[str, torch.Tensor]
    layouts: Mapping[str, str]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def load_weights(checkpoint: Checkpoint, plan: WeightPlan, device: torch.device, dtype: torch.dtype) -> Weights:
    """Reads every parameter of `plan` onto `device`, in `dtype` but for those that stay float32.

    One tensor is read at a time, straight into its place, so host memory beyond the result stays at one tensor.
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

    tensors: dict[str, torch.Tensor] = {}
    for layout in found.layouts.values():
        for target in layout.targets:
            tensors[target.name] = _fill(target, checkpoint, device, dtype)
    return Weights(tensors, {parameter: layout.name for parameter, layout in found.layouts.items()})


def _fill(target: Target, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    stored_as = torch.float32 if target.dtype == "float32" else dtype
    filled = torch.empty(target.shape, dtype=stored_as, device=device)
    flat = filled.view(-1)
    for piece in target.pieces:
        flat[piece.offset : piece.offset + piece.numel].copy_(checkpoint.read(piece.name).view(-1))
    return filled
