"""Which calls of ops a model makes, found by running it without data: on the meta device, where tensors have no memory.

What serves a model can so be compiled ahead, on any machine, however large the model is.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tokenspeed_engine.checkpoint.errors import ConfigError
from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.execution.batch import Batch
from tokenspeed_engine.models.families import ModelDescription, read_model
from tokenspeed_kernels.sampling import logprobs, sample
from tokenspeed_registry import Call, TokenspeedError, dry_run, use

META = torch.device("meta")
PAGES, SLOTS = 4096, 64
"""Of the caches. No compiled code depends on them."""


def rehearse(folder: Path, max_batch: int = 32, max_step_tokens: int = 8192, page_size: int = 64) -> list[Call]:
    """The calls of a model folder's steps: decodes of 1 to `max_batch` sequences, prefills up to `max_step_tokens`.

    Both sizes go in powers of two, as do the buckets that kernels compile for. The dtype is the checkpoint's. Raises
    `TokenspeedError` for a folder that cannot be served.
    """
    try:
        description = read_model(folder)
    except ConfigError as error:
        raise TokenspeedError(str(error)) from error
    dtype = getattr(torch, description.config.dtype or "bfloat16")
    model = description.build(_weights(description, dtype))
    caches = description.allocate_caches(PAGES, page_size, SLOTS, dtype, META)
    with torch.inference_mode(), use("torch"), dry_run() as calls:
        for decodes, prefills in _steps(max_batch, max_step_tokens):
            for longest in (1, description.config.max_position_embeddings):  # models take short contexts another way
                model.forward(_batch(description, decodes, prefills, longest, page_size), caches)
        for rows in _powers(max_batch):
            _sampled(description.config.vocab_size, rows)
    return calls


def _weights(description: ModelDescription, dtype: torch.dtype) -> Weights:
    plan = description.weight_plan(())
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


def _steps(max_batch: int, max_step_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """Decoding sequences and the lengths of prefills, of steps."""
    yield from ((decodes, []) for decodes in _powers(max_batch))
    yield from ((0, [tokens]) for tokens in _powers(max_step_tokens))
    if max_step_tokens > max_batch:
        yield max_batch, [max_step_tokens - max_batch]


def _batch(description: ModelDescription, decodes: int, prefills: Sequence[int], longest: int, page_size: int) -> Batch:
    """A step whose longest sequence has `longest` tokens, or as many as are new."""
    lengths = [1] * decodes + list(prefills)
    rows, tokens = len(lengths), sum(lengths)
    longest = max(longest, *lengths)

    def indices(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    return Batch(
        ids=indices(tokens, dtype=torch.int64),
        positions=indices(tokens, dtype=torch.int64),
        slot_mapping=indices(tokens, dtype=torch.int64),
        cu_seqlens=indices(rows + 1),
        seq_lens=indices(rows),
        page_table=indices(rows, -(-longest // page_size)),
        slots=indices(rows),
        fresh=indices(rows, dtype=torch.bool),
        context=indices(rows, description.context_tokens, dtype=torch.int64),
        sampled=indices(rows, dtype=torch.int64),
        num_decodes=decodes,
        max_q_len=max(lengths),
        max_seq_len=longest,
        prefix_lens=tuple(0 for _ in prefills),
    )


def _sampled(vocab: int, rows: int) -> None:
    logits = torch.empty(rows, vocab, device=META)
    number, count = torch.empty(rows, device=META), torch.empty(rows, dtype=torch.int32, device=META)
    ids = sample(logits, number, count, number, number)
    logprobs(logits, ids, top=1)
