"""Sizes of an engine, and how memory is divided among what they ask for."""

import logging
from dataclasses import dataclass
from typing import Literal

import torch

from tokenspeed_engine.checkpoint.dummy import Format
from tokenspeed_engine.control import ControlConfig
from tokenspeed_engine.models.families import CacheBytes, CacheSizes, ModelDescription, Verify

DEFAULT_CACHE_BYTES = 2 * 1024**3
"""What pages and slots may take together where the caller says nothing."""

MOST_DRAFTS = 4
LoadFormat = Literal["auto", "dummy"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine; None takes what follows from the model and from `cache_bytes`.

    Args:
        dtype: "float32" or "bfloat16"; the default is the checkpoint's on an accelerator and float32 on a CPU, which is
            slow in bfloat16.
        device: such as "cuda:0" or "cpu"; the default is an accelerator where there is one.
        page_size: tokens a page of the cache holds.
        max_batch: requests that run at once.
        max_step_tokens: tokens one step runs; a longer prompt runs in chunks.
        max_context: tokens a request may have.
        num_pages: pages of the cache.
        cache_bytes: what pages and slots may take together.
        num_drafts: tokens guessed ahead by the model's draft head, 0 to 4.
        verify: how rejected guesses are taken back: "replay" keeps the inputs of accepted ones, "states" a recurrent
            state for each, which takes more memory.
        prefix_cache: keep what requests computed for those that begin alike.
        state_interval: tokens between snapshots of the recurrent state in a prompt; 0 takes them only where requests
            end.
        num_snapshots: snapshots beside the slots of running requests.
        num_host_snapshots: further ones in host memory, which is not part of `cache_bytes`.
        host_tables: keep n-gram tables in host memory, and fetch what a step needs while its first layers run.
        overlap: begin a step before the text of the one before is made; the default is on an accelerator.
        buckets: run decodes in fixed shapes, as CUDA graphs; the default is on an accelerator.
        load_format: "auto" reads the checkpoint; "dummy" makes weights of random numbers, from config.json alone.
        dummy_format: what dummy experts and tables are kept in: "model" (the dtype), "fp8" or "nvfp4".
        quantise: "fp8" keeps projections that come in a wider dtype in block-scaled FP8; None as they come. Routers,
            norms and the embedding stay as they are.
        seed: where the seeds of requests that name none come from.
        ranks: processes that share the model, each on a device of its own; all sizes are those of each.
    """

    dtype: str | None = None
    device: str | None = None
    page_size: int = 16
    max_batch: int = 8
    max_step_tokens: int = 512
    max_context: int | None = None
    num_pages: int | None = None
    cache_bytes: int = DEFAULT_CACHE_BYTES
    num_drafts: int = 0
    verify: Verify = "replay"
    prefix_cache: bool = False
    state_interval: int = 0
    num_snapshots: int | None = None
    num_host_snapshots: int = 0
    host_tables: bool = False
    overlap: bool | None = None
    buckets: bool | None = None
    load_format: LoadFormat = "auto"
    dummy_format: Format = "model"
    quantise: Literal["fp8"] | None = None
    seed: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Sizes:
    """What control plane and caches are made for."""

    control: ControlConfig
    caches: CacheSizes


def plan_sizes(
    options: EngineOptions, description: ModelDescription, dtype: torch.dtype, device: torch.device
) -> Sizes:
    """Pages for a full batch of whole contexts, or as many as fit into `cache_bytes` beside the slots.

    With a prefix cache twice as many, for what finished requests leave. Raises ValueError, with its arithmetic, for
    sizes that cannot work.
    """
    _check(options, description)
    limit = description.config.max_position_embeddings
    context = options.max_context or limit
    if context > limit:
        raise ValueError(f"max_context: the model's context is {limit} tokens, got {context}")
    snapshots = options.num_snapshots
    if snapshots is None:
        snapshots = 2 * options.max_batch if options.prefix_cache and description.has_state else 0
    caches = CacheSizes(
        page_size=options.page_size,
        num_pages=0,
        num_slots=options.max_batch + snapshots,
        num_rows=options.max_batch,
        num_drafts=options.num_drafts,
        verify=options.verify,
        draft_head=options.num_drafts > 0,
    )
    pages = _num_pages(options, caches, description.cache_bytes(caches, dtype), context)
    control = ControlConfig(
        page_size=options.page_size,
        num_pages=pages,
        num_slots=options.max_batch,
        max_batch=options.max_batch,
        max_step_tokens=options.max_step_tokens,
        max_context=context,
        context_tokens=description.context_tokens,
        seed=options.seed,
        num_drafts=options.num_drafts,
        prefix_cache=options.prefix_cache,
        state_interval=options.state_interval if description.has_state else 0,
        num_snapshots=snapshots,
        num_host_snapshots=options.num_host_snapshots if description.has_state else 0,
        has_state=description.has_state,
        overlap=device.type != "cpu" if options.overlap is None else options.overlap,
    )
    return Sizes(control, CacheSizes(**{**vars(caches), "num_pages": pages}))


def _check(options: EngineOptions, description: ModelDescription) -> None:
    lowest = dict.fromkeys(("page_size", "max_batch", "max_context", "num_pages", "ranks"), 1)
    lowest |= dict.fromkeys(("num_drafts", "state_interval", "num_snapshots", "num_host_snapshots"), 0)
    for name, low in lowest.items():
        size = getattr(options, name)
        if size is not None and size < low:
            raise ValueError(f"{name}: expected at least {low}, got {size}")
    if options.verify not in ("replay", "states"):
        raise ValueError(f'verify: expected "replay" or "states", got {options.verify!r}')
    if options.load_format not in ("auto", "dummy"):
        raise ValueError(f'load_format: expected "auto" or "dummy", got {options.load_format!r}')
    if options.quantise not in (None, "fp8"):
        raise ValueError(f'quantise: expected "fp8", got {options.quantise!r}')
    if options.num_drafts > MOST_DRAFTS:
        raise ValueError(f"num_drafts: expected at most {MOST_DRAFTS}, got {options.num_drafts}")
    if options.num_drafts and not description.has_draft_head:
        raise ValueError(f"num_drafts: this {description.family} has no draft head to guess {options.num_drafts} with")


def _num_pages(options: EngineOptions, caches: CacheSizes, each: CacheBytes, context: int) -> int:
    per_context = -(-context // options.page_size)
    slots = caches.num_slots * each.per_slot + caches.num_rows * each.per_row
    room = (options.cache_bytes - slots) // each.per_page
    pages = options.num_pages or min(options.max_batch * per_context * (2 if options.prefix_cache else 1), room)
    parts = f"{caches.num_slots} slots of {each.per_slot} bytes"
    if caches.num_slots > caches.num_rows:
        parts += f" ({caches.num_rows} of requests, {caches.num_slots - caches.num_rows} of snapshots)"
    if each.per_row:
        parts += f" and {caches.num_rows} times {each.per_row} bytes for drafts"
    if pages < per_context and options.num_pages is None:
        raise ValueError(
            f"cache_bytes: one context of {context} tokens takes {per_context} pages of {each.per_page} bytes, beside "
            f"{parts}; {options.cache_bytes} bytes hold {max(room, 0)} pages"
        )
    logger.info("caches: %d pages of %d bytes, %s", pages, each.per_page, parts)
    if options.num_host_snapshots:
        host = options.num_host_snapshots
        logger.info("host memory: %d snapshots of %d bytes", host, each.per_snapshot)
    return pages
