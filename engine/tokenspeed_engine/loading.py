"""From a model folder to the weights that its model is built of."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tokenspeed_engine.checkpoint.dummy import dummy_weights
from tokenspeed_engine.checkpoint.load import Weights, load_weights
from tokenspeed_engine.checkpoint.reader import Checkpoint
from tokenspeed_engine.models.families import ModelDescription
from tokenspeed_engine.options import EngineOptions


def load_model(
    folder: Path, description: ModelDescription, options: EngineOptions, device: torch.device, dtype: torch.dtype
) -> Weights:
    """The weights of a folder, or random ones of the same sizes, as the options say.

    The first rank's progress is shown where standard error is a terminal. Raises `CheckpointError` for a folder whose
    weights are not those of its model.
    """
    host = description.table_names if options.host_tables else ()
    draft_head = options.num_drafts > 0
    if options.load_format == "dummy":
        plan = description.weight_plan((), draft_head)
        weights = dummy_weights(plan, device, dtype, options.dummy_format, host, options.seed)
    else:
        with Checkpoint.open(folder) as checkpoint, _progress(description.ranks.rank) as progress:
            plan = description.weight_plan(checkpoint.tensors, draft_head)
            weights = load_weights(checkpoint, plan, device, dtype, host, progress)
    return dataclasses.replace(weights, quantise=options.quantise == "fp8")


@contextmanager
def _progress(rank: int) -> Iterator[Callable[[int, int], None]]:
    columns = TextColumn("weights"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    hidden = rank > 0 or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task("weights", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
