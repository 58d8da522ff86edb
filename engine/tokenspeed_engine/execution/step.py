"""A step's work on the device, from its index tensors to the tokens it yields: no host decision in between."""

from dataclasses import dataclass

import torch

from tokenspeed_engine.control import StepPlan
from tokenspeed_engine.execution.batch import Batch
from tokenspeed_engine.execution.drafting import Drafting, as_drafting, draft, lay_out_drafting
from tokenspeed_engine.execution.layout import Shape, Undone, as_batch, lay_out
from tokenspeed_engine.execution.sampling import Outcome
from tokenspeed_engine.execution.upload import Arrays, Tensors
from tokenspeed_engine.execution.verify import Sampling, as_sampling, lay_out_sampling, verify
from tokenspeed_engine.models.families import Caches, CacheSizes, Model, ModelDescription


@dataclass(frozen=True)
class Inputs:
    """All tensors of a step."""

    batch: Batch
    sampling: Sampling
    drafting: Drafting | None


class StepFunction:
    """Lays plans out and runs them: one model, its caches, and the sizes that both were made for."""

    def __init__(self, description: ModelDescription, model: Model, caches: Caches, sizes: CacheSizes) -> None:
        self._description = description
        self._model = model
        self._caches = caches
        self._sizes = sizes
        self._head = model.draft_head if sizes.draft_head else None

    def lay_out(self, plan: StepPlan, shape: Shape, undone: list[Undone] | None) -> Arrays:
        """The host arrays of a plan; `undone` as for `layout.lay_out`."""
        model, sizes = self._description, self._sizes
        arrays = lay_out(plan, shape, undone, sizes.page_size, model.context_tokens, model.context_fill)
        arrays |= lay_out_sampling(plan, shape, model.config.vocab_size)
        if self._head is not None:
            arrays |= lay_out_drafting(plan, shape, sizes.num_drafts, sizes.page_size, sizes.num_pages)
        return arrays

    def inputs(self, plan: StepPlan, shape: Shape, tensors: Tensors) -> Inputs:
        """The step whose arrays became `tensors`."""
        drafting = None if self._head is None else as_drafting(tensors)
        return Inputs(as_batch(plan, shape, tensors), as_sampling(tensors), drafting)

    def run(self, inputs: Inputs) -> Outcome:
        """Advances the caches; the outcome's tensors are new ones."""
        with torch.inference_mode():
            batch = inputs.batch
            out = self._model.forward(batch, self._caches)
            verified = verify(out.logits, inputs.sampling, batch)
            drafts = None
            if self._head is not None and inputs.drafting is not None and out.hidden is not None:
                sizes = self._sizes
                drafts = draft(
                    self._head,
                    out.hidden,
                    batch,
                    verified,
                    inputs.drafting,
                    sizes.num_drafts,
                    sizes.page_size,
                    self._caches,
                )
            return Outcome(out.logits, verified, drafts)
