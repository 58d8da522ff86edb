"""The executor: a plan becomes a batch, the model's logits, and sampled tokens."""

from collections.abc import Iterator

import torch

from tokenspeed_engine.control import Accepted, RowResult, StepPlan, StepResult
from tokenspeed_engine.execution.batch import make_batch
from tokenspeed_engine.execution.sampling import sample_rows
from tokenspeed_engine.models.families import Caches, Model, ModelDescription


class ModelRunner:
    """Runs plans on one device. The caches are the pools whose pages and slots the plans name."""

    def __init__(
        self, description: ModelDescription, model: Model, caches: Caches, page_size: int, device: torch.device
    ) -> None:
        self._description = description
        self._model = model
        self._caches = caches
        self._page_size = page_size
        self._device = device

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs every row of a plan and samples after those that ask for it."""
        model = self._description
        batch = make_batch(plan, self._page_size, model.context_tokens, model.context_fill, self._device)
        with torch.inference_mode():
            logits = self._model.forward(batch, self._caches)
            sampled = iter(sample_rows(logits, [row.sample for row in plan.rows if row.sample is not None]))
        return StepResult(tuple(_results(plan, sampled)))


def _results(plan: StepPlan, sampled: Iterator[RowResult]) -> Iterator[RowResult]:
    for row in plan.rows:
        yield Accepted() if row.sample is None else next(sampled)
