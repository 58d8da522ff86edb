"""Drives an executor by hand, without a scheduler: texts that grow row by row, over caches that start full of NaN."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.engine.forward import CPU, weights_of
from tokenspeed_engine.control import (
    Accepted,
    Failed,
    Row,
    Sample,
    SamplingParams,
    StepPlan,
    TokenLogprobs,
)
from tokenspeed_engine.control.plan import Transfer
from tokenspeed_engine.execution.runner import ModelRunner
from tokenspeed_engine.models.families import CacheSizes, ModelDescription, Verify, read_model

GREEDY = SamplingParams(temperature=0.0, logprobs=0)


@dataclass
class Growing:
    """A request. `computed` tokens have been run; `drafts` are those the executor made of what follows."""

    tokens: list[int]
    prompt: int
    pages: tuple[int, ...]
    slot: int
    params: SamplingParams = GREEDY
    seed: int = 0
    computed: int = 0
    drafts: tuple[int, ...] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt :]

    @property
    def decodes(self) -> bool:
        return self.computed >= self.prompt


class Driver:
    """An executor and free pages and slots, which are handed out in shuffled order and never cleared."""

    def __init__(
        self,
        folder: Path,
        *,
        num_drafts: int = 0,
        verify: Verify = "replay",
        buckets: bool = False,
        draft_head: bool = False,
        page_size: int = 8,
        num_rows: int = 4,
        num_slots: int = 6,
        num_host: int = 0,
        seed: int = 0,
        device: torch.device = CPU,
        host_tables: bool = False,
        max_length: int = 160,
    ) -> None:
        self.description: ModelDescription = read_model(folder)
        self.page_size = page_size
        num_pages = 3 * max_length // page_size
        self.sizes = CacheSizes(page_size, num_pages, num_slots, num_rows, num_drafts, verify, draft_head)
        self.caches = self.description.allocate_caches(self.sizes, torch.float32, device)
        for pool in self.caches.tensors():
            pool.fill_(torch.nan)
        tables = self.description.table_names if host_tables else ()
        self.model = self.description.build(weights_of(folder, draft_head=draft_head, device=device, host=tables))
        self.runner = ModelRunner(
            self.description,
            self.model,
            self.caches,
            self.sizes,
            device,
            num_host_snapshots=num_host,
            max_length=max_length,
            buckets=buckets,
        )
        self.random = random.Random(seed)
        self.free_pages = self.random.sample(range(num_pages), num_pages)
        self.free_slots = self.random.sample(range(num_slots), num_slots)

    def start(self, prompt: Sequence[int], room: int, params: SamplingParams = GREEDY, seed: int = 0) -> Growing:
        """A request with pages for `room` tokens more than its prompt."""
        pages = [self.free_pages.pop() for _ in range(-(-(len(prompt) + room) // self.page_size))]
        return Growing(list(prompt), len(prompt), tuple(pages), self.free_slots.pop(), params, seed)

    def finish(self, text: Growing) -> None:
        self.free_pages += text.pages
        self.free_slots.append(text.slot)
        self.random.shuffle(self.free_pages)
        self.random.shuffle(self.free_slots)

    def step(
        self,
        decodes: Sequence[tuple[Growing, Sequence[int]]] = (),
        prefills: Sequence[tuple[Growing, int]] = (),
        transfers: Sequence[Transfer] = (),
    ) -> list[Accepted | Failed]:
        """One step of decodes with their drafts and of chunks of prompts; the texts grow by what it yields."""
        rows = [self._row(text, [text.tokens[-1], *drafts], decode=True) for text, drafts in decodes]
        for text, count in prefills:
            rows.append(self._row(text, text.tokens[text.computed : text.computed + count], decode=False))
        results = self.runner.submit(StepPlan(tuple(rows), len(decodes), tuple(transfers))).result().rows
        texts = [text for text, _ in (*decodes, *prefills)]
        for text, row, result in zip(texts, rows, results, strict=True):
            if isinstance(result, Accepted):
                text.computed += len(result.tokens) if row.decode else len(row.tokens)
                text.tokens += result.tokens
                text.logprobs += result.logprobs
                text.drafts = result.drafts
        return list(results)

    def _row(self, text: Growing, tokens: Sequence[int], decode: bool) -> Row:
        start, end = text.computed, text.computed + len(tokens)
        more = not decode and end < len(text.tokens)
        pages = text.pages[: -(-end // self.page_size)]
        assert len(pages) * self.page_size >= end
        return Row(
            request_id="",
            tokens=tuple(tokens),
            start=start,
            pages=pages,
            slot=text.slot,
            fresh=start == 0,
            context=tuple(text.tokens[max(0, start - self.description.context_tokens) : start]),
            sample=None if more else Sample(text.params, text.seed, len(text.tokens) - text.prompt),
            decode=decode,
            following=text.tokens[end] if more else None,
        )


DraftSource = Callable[[Growing], Sequence[int]]


def oracle(driver: Driver, answers: Mapping[int, Sequence[int]], right: float, vocab: int) -> DraftSource:
    """Drafts, of any number, that are right with a chosen probability each. `answers`: by identity of the text."""

    def drafts(text: Growing) -> Sequence[int]:
        known = list(answers[id(text)])[len(text.generated) :]
        count = driver.random.randint(0, driver.sizes.num_drafts)
        room = len(text.pages) * driver.page_size - len(text.tokens)
        guesses = [*known, *[0] * count][: min(count, room)]
        return [guess if driver.random.random() < right else (guess + 1) % vocab for guess in guesses]

    return drafts


def own_drafts(text: Growing) -> Sequence[int]:
    """Those that the executor made."""
    return text.drafts


def serve(
    driver: Driver, prompts: Sequence[Sequence[int]], count: int, source: Callable[[Driver, list[Growing]], DraftSource]
) -> list[Growing]:
    """Generates at least `count` tokens for every prompt, in steps that mix rows at random; takes slots over."""
    chance = driver.random
    waiting = list(prompts)
    running: list[Growing] = []
    done: list[Growing] = []
    everyone: list[Growing] = []
    while waiting or running:
        while waiting and len(running) < driver.sizes.num_rows:
            running.append(driver.start(waiting.pop(0), count + driver.sizes.num_drafts + 1))
            everyone.append(running[-1])
        drafts = source(driver, everyone)
        awake = [text for text in running if chance.random() < 0.8] or running
        if chance.random() < 0.5:  # often decodes alone, which may have buckets
            awake = [text for text in awake if text.decodes] or awake
        decodes = [(text, drafts(text)) for text in awake if text.decodes]
        prefills = [
            (text, min(chance.randint(1, 17), text.prompt - text.computed)) for text in awake if not text.decodes
        ]
        for result in driver.step(decodes, prefills):
            assert isinstance(result, Accepted), result
        for text in [text for text in running if len(text.generated) >= count]:
            running.remove(text)
            done.append(text)
            driver.finish(text)
    return everyone


def lengths() -> Iterator[int]:
    """Prompts around 1 + drafts, and others over pages, blocks and the sparse budget."""
    yield from (1, 2, 3, 4, 5, 6, 7)
    yield from (16, 23, 37)
