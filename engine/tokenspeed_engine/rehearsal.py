"""Which calls of ops a model makes, found by running it without data: on the meta device, where tensors have no memory.

What serves a model can so be compiled ahead, on any machine, however large the model is.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tokenspeed_engine.checkpoint.errors import ConfigError
from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.control import Row, Sample, SamplingParams, StepPlan
from tokenspeed_engine.execution.batch import Settling
from tokenspeed_engine.execution.layout import Shape, Undone
from tokenspeed_engine.execution.step import StepFunction
from tokenspeed_engine.execution.upload import upload
from tokenspeed_engine.models.families import CacheSizes, ModelDescription, read_model
from tokenspeed_kernels.sampling import logprobs
from tokenspeed_registry import Call, TokenspeedError, dry_run, use

META = torch.device("meta")
PAGES, SLOTS = 4096, 64
"""Of the caches. No compiled code depends on them."""


def rehearse(
    folder: Path, max_batch: int = 32, max_step_tokens: int = 8192, page_size: int = 64, num_drafts: int = 0
) -> list[Call]:
    """The calls of a model folder's steps: decodes of 1 to `max_batch` sequences, prefills up to `max_step_tokens`.

    Both sizes go in powers of two, as do the buckets that kernels compile for. With drafts, decodes have 1 to
    `num_drafts` of them, which the model's draft head guesses. The dtype is the checkpoint's. Raises `TokenspeedError`
    for a folder that cannot be served.
    """
    try:
        description = read_model(folder)
    except ConfigError as error:
        raise TokenspeedError(str(error)) from error
    if num_drafts and not description.has_draft_head:
        raise TokenspeedError(f"{folder}: no draft head to guess {num_drafts} tokens with")
    dtype = getattr(torch, description.config.dtype or "bfloat16")
    model = description.build(_weights(description, dtype, num_drafts > 0))
    sizes = CacheSizes(page_size, PAGES, SLOTS, max_batch, num_drafts, draft_head=num_drafts > 0)
    caches = description.allocate_caches(sizes, dtype, META)
    function = StepFunction(description, model, caches, sizes)
    with torch.inference_mode(), use("torch"), dry_run() as calls:
        for decodes, q_len, prefills in _steps(max_batch, max_step_tokens, num_drafts):
            for longest in (1, description.config.max_position_embeddings):  # models take short contexts another way
                plan, shape = _plan(decodes, q_len, prefills, longest, page_size)
                undone = [Undone(0, 0, row.slot, (row.slot,) * q_len) for row in plan.rows] if num_drafts else None
                function.run(function.inputs(plan, shape, upload(function.lay_out(plan, shape, undone), META)))
        for rows in _powers(max_batch):
            _logprobs(description.config.vocab_size, rows * (1 + num_drafts))
            if num_drafts:
                one = torch.empty(rows, dtype=torch.int32, device=META)
                model.settle(Settling(one, one, one, one), caches)
    return calls


def _weights(description: ModelDescription, dtype: torch.dtype, draft_head: bool) -> Weights:
    plan = description.weight_plan((), draft_head)
    layouts = {parameter.name: parameter.layouts[0] for parameter in plan.parameters}
    tensors = {
        target.name: torch.empty(target.shape, dtype=torch.float32 if target.dtype == "float32" else dtype, device=META)
        for layout in layouts.values()
        for target in layout.targets
    }
    return Weights(tensors, {name: layout.name for name, layout in layouts.items()})


def _powers(largest: int) -> Iterator[int]:
    """1, 2, 4 and so on, and `largest` itself."""
    size = 1
    while size < largest:
        yield size
        size *= 2
    yield largest


def _steps(max_batch: int, max_step_tokens: int, num_drafts: int) -> Iterator[tuple[int, int, list[int]]]:
    """Decoding sequences with the tokens of each, and the lengths of prefills, of steps."""
    for q_len in range(1, 2 + num_drafts):
        yield from ((decodes, q_len, []) for decodes in _powers(max_batch))
    yield from ((0, 1, [tokens]) for tokens in _powers(max_step_tokens))
    if max_step_tokens > max_batch:
        yield max_batch, 1, [max_step_tokens - max_batch]


def _plan(decodes: int, q_len: int, prefills: Sequence[int], longest: int, page_size: int) -> tuple[StepPlan, Shape]:
    """A step whose longest sequence has `longest` tokens, or a page more than are new, which is one to go on from."""
    lengths = [q_len] * decodes + list(prefills)
    longest = max(longest, page_size + max(lengths))
    pages = tuple(page % PAGES for page in range(-(-longest // page_size)))
    sample = Sample(SamplingParams(), 0, 0)
    rows = tuple(
        Row("", (0,) * length, page_size, pages, i % SLOTS, False, (), sample, decode=i < decodes)
        for i, length in enumerate(lengths)
    )
    return StepPlan(rows, decodes), Shape(decodes, q_len, False, longest)


def _logprobs(vocab: int, rows: int) -> None:
    logits = torch.empty(rows, vocab, device=META)
    logprobs(logits, torch.empty(rows, dtype=torch.int64, device=META), top=1)
