"""Drives a whole engine request by request, and holds what it said against transformers' uncached pass over the text.

Its caches start full of NaN. A token must be the most probable one up to a near-tie, which another order of summing may
swap; its log-probability shows what is off by less than changes a token.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.control.owners import check_owners
from tests.engine.tiny import hf_logits
from tokenspeed_engine import LLM, EngineOptions, SamplingParams
from tokenspeed_engine.control import Accepted, Executor, PendingStep, RequestOutput, RowResult, StepPlan, StepResult
from tokenspeed_engine.llm import EMBEDDED_MODEL

Logits = Callable[[Path, Sequence[int]], Tensor]
Asked = tuple[list[int], SamplingParams]
Guess = Callable[[str, int], Sequence[int]]
"""Drafts for a request, by its id, that has generated so many tokens."""

NEAR_TIE = 1e-3

TEXT = '''
class Queue:
    """A queue of items in the order in which they came."""

    def __init__(self, limit=None):
        self.items = []
        self.limit = limit

    def push(self, item):
        if self.limit is not None and len(self.items) >= self.limit:
            raise ValueError("the queue is full")
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the queue is empty")
        return self.items.pop(0)

    def __len__(self):
        return len(self.items)


def read_lines(path, encoding="utf-8"):
    with open(path, encoding=encoding) as file:
        for line in file:
            yield line.rstrip()


def test_push_and_pop():
    queue = Queue(limit=2)
    queue.push(1)
    queue.push(2)
    assert queue.pop() == 1
    assert len(queue) == 1
'''


@functools.cache
def text_tokens() -> tuple[int, ...]:
    """The embedded model's tokens of a text, of which it can guess the next ones."""
    tokenizer = LLM(EMBEDDED_MODEL, EngineOptions(max_context=16)).tokenizer
    assert tokenizer is not None
    return tuple(tokenizer.encode(TEXT))


def document(number: int, length: int) -> list[int]:
    """The first `length` tokens of one of several texts that have no beginning in common."""
    tokens = text_tokens()
    start = 37 * number % len(tokens)
    return [*tokens[start:], *tokens, *tokens][:length]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True, logprobs=0)


class Whole:
    """An engine, what it was asked and what it said. Requests are called r0, r1 and so on.

    `guess`: drafts to be verified instead of those of the draft head. `same`: a folder with the same model for
    transformers, without a draft head.
    """

    def __init__(
        self,
        options: EngineOptions,
        folder: Path = EMBEDDED_MODEL,
        logits: Logits = hf_logits,
        guess: Guess | None = None,
        same: Path | None = None,
    ) -> None:
        self.llm = LLM(folder, options)
        self.core = self.llm.core
        self.asked: dict[str, Asked] = {}
        self._folder, self._logits = same or folder, logits
        self._outputs: dict[str, list[RequestOutput]] = {}
        for pool in self.core._executor._function._caches.tensors():  # type: ignore[attr-defined]
            pool.fill_(torch.nan)
        if guess is not None:
            self.core._executor = _Guessing(self.core._executor, guess, options.num_drafts)

    def add(self, prompt: Sequence[int], params: SamplingParams) -> str:
        name = f"r{len(self.asked)}"
        self.core.add(name, prompt, params)
        self.asked[name] = list(prompt), params
        self._outputs[name] = []
        return name

    def step(self) -> None:
        for output in self.core.step():
            self._outputs[output.request_id].append(output)
        check_owners(self.core.scheduler)

    def finish(self, most_steps: int = 2000) -> None:
        """Run until nothing is left, and see that everything is free then."""
        for _ in range(most_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        assert self.llm.num_free == (self.llm.num_pages, self.llm.num_slots)

    def ask(self, *prompts: Sequence[int], count: int) -> list[str]:
        names = [self.add(prompt, greedy(count)) for prompt in prompts]
        self.finish()
        return names

    def tokens(self, name: str) -> list[int]:
        return [token for output in self._outputs[name] for token in output.token_ids]

    def logprobs(self, name: str) -> list[float]:
        return [entry.logprob for output in self._outputs[name] for entry in output.logprobs]

    def text(self, name: str) -> str:
        return "".join(output.text for output in self._outputs[name])

    def whole_text(self, name: str) -> list[int]:
        """Prompt and answer so far."""
        return [*self.asked[name][0], *self.tokens(name)]

    def cached(self, name: str) -> int:
        return self._outputs[name][-1].usage.cached_tokens

    def check(self) -> None:
        """Everything that was said, also by requests that were left early."""
        for name, (prompt, params) in self.asked.items():
            last = self._outputs[name][-1]
            assert last.finish_reason in ("length", "abort", *["stop"] * bool(params.stop)), (name, last)
            tokens = self.tokens(name)
            assert len(tokens) == params.max_new_tokens or last.finish_reason != "length"
            assert last.usage.completion_tokens == len(tokens)
            if tokens:
                self._compare(name, prompt, tokens, params)

    def _compare(self, name: str, prompt: list[int], tokens: list[int], params: SamplingParams) -> None:
        wanted = _log_probabilities(self._logits, self._folder, (*prompt, *tokens[:-1]))[len(prompt) - 1 :]
        entries = [entry for output in self._outputs[name] for entry in output.logprobs]
        assert [entry.token for entry in entries] == tokens
        for place, (row, entry) in enumerate(zip(wanted, entries, strict=True)):
            said = float(row[entry.token])
            assert entry.logprob == pytest.approx(said, abs=2e-4), f"{name}, token {place}"
            assert params.temperature > 0 or said > float(row.max()) - NEAR_TIE, f"{name}, token {place}"


class _Guessing:
    """An executor whose drafts come from elsewhere."""

    def __init__(self, executor: Executor, guess: Guess, num_drafts: int) -> None:
        self._executor, self._guess, self._num_drafts = executor, guess, num_drafts

    def submit(self, plan: StepPlan) -> PendingStep:
        return _Guessed(self._executor.submit(plan), lambda result: self._replace(plan, result))

    def _replace(self, plan: StepPlan, result: StepResult) -> StepResult:
        rows: list[RowResult] = []
        for row, one in zip(plan.rows, result.rows, strict=True):
            if isinstance(one, Accepted) and row.sample is not None:
                drafts = self._guess(row.request_id, row.sample.index + len(one.tokens))
                one = replace(one, drafts=tuple(drafts)[: self._num_drafts])
            rows.append(one)
        return StepResult(tuple(rows))


class _Guessed:
    def __init__(self, step: PendingStep, change: Callable[[StepResult], StepResult]) -> None:
        self._step, self._change = step, change

    def result(self) -> StepResult:
        return self._change(self._step.result())


@functools.lru_cache(512)
def _log_probabilities(logits: Logits, folder: Path, ids: tuple[int, ...]) -> Tensor:
    return logits(folder, ids).log_softmax(-1)
