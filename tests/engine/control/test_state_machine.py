"""Random arrivals, continuations, lengths, stops, aborts and failures over tiny pools.

Whatever is on (prefix cache with or without state, host snapshots, drafts, overlap), whoever is preempted or evicted,
every answer equals the sequential one.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.control.fake import EOS, VOCAB, FakeExecutor, FakeTokenizer, describe, expected_answer
from tests.engine.control.owners import check_owners
from tokenspeed_engine.control import ControlConfig, EngineCore, RequestOutput, RequestRefusedError, SamplingParams

TOKENS = st.integers(0, VOCAB - 1)
# Few beginnings, so that requests share them.
PROMPTS = st.builds(
    lambda common, rest: [5, 6, 7, 8, 9, 10, 11, 12][:common] + rest,
    st.integers(0, 8),
    st.lists(TOKENS, min_size=1, max_size=4),
)
STOPS = st.lists(st.sampled_from(["a", "ab", "bab", "abab", "😀", "é", " ca", "\ufffda"]), max_size=2, unique=True)


@st.composite
def configs(draw: st.DrawFn) -> ControlConfig:
    max_batch = draw(st.sampled_from([4, 3, 2, 1]))
    return ControlConfig(
        page_size=draw(st.integers(1, 4)),
        num_pages=draw(st.integers(6, 16)),
        num_slots=draw(st.sampled_from([4, 3, 2, 1])),
        max_batch=max_batch,
        max_step_tokens=max_batch + draw(st.sampled_from([8, 4, 2, 1, 0])),
        max_context=draw(st.integers(8, 32)),
        context_tokens=draw(st.integers(0, 3)),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
        state_interval=draw(st.sampled_from([0, 1, 2, 3, 6])),
        num_snapshots=draw(st.integers(1, 4)),
        num_host_snapshots=draw(st.integers(0, 3)),
        has_state=draw(st.sampled_from([True, True, False])),
        overlap=draw(st.booleans()),
    )


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 2)),
        max_new_tokens=draw(st.sampled_from([10, 14, 6, 2, 1])),
        stop=tuple(draw(st.just([]) | STOPS)),
        stop_token_ids=draw(st.sampled_from([(), (), (5,), (8, 13)])),
        ignore_eos=draw(st.sampled_from([True, True, False])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
    )


class Serving(RuleBasedStateMachine):
    @initialize(config=configs(), num_drafts=st.integers(0, 3), deferred=st.booleans())
    def start(self, config: ControlConfig, num_drafts: int, deferred: bool) -> None:
        self.config = config
        self.executor = FakeExecutor(config, num_drafts, deferred=deferred)
        self.core = EngineCore(config, self.executor, vocab_size=VOCAB, eos_token_ids={EOS}, tokenizer=FakeTokenizer())
        self.asked: dict[str, tuple[Sequence[int], SamplingParams]] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.ended_early: set[str] = set()

    @rule(burst=st.lists(st.tuples(PROMPTS, sampling_params()), min_size=1, max_size=4))
    def add(self, burst: list[tuple[list[int], SamplingParams]]) -> None:
        for prompt, params in burst:
            self.ask(prompt, params)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), more=st.lists(TOKENS, min_size=1, max_size=4), params=sampling_params())
    def take_the_next_turn(self, data: st.DataObject, more: list[int], params: SamplingParams) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        answer = [token for output in self.outputs[name] for token in output.token_ids]
        self.ask([*self.asked[name][0], *answer, *more], params)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.core.step():
                self.outputs[output.request_id].append(output)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        live = name in self.core._streams
        assert self.core.abort(name) == live
        if live:
            self.ended_early.add(name)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def break_one(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        if name in self.core._streams:
            self.executor.broken.add(name)
            self.ended_early.add(name)

    @rule()
    def drop_what_is_cached(self) -> None:
        if not self.core._in_flight and not self.core.scheduler.num_running:
            self.core.scheduler.cache.clear()

    @rule()
    def drain(self) -> None:
        self.core.drain()

    @invariant()
    def everything_has_its_owners(self) -> None:
        if hasattr(self, "core"):
            check_owners(self.core.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        tokens = sum(len(prompt) + params.max_new_tokens for prompt, params in self.asked.values())
        # A recomputed request repeats at most what it had, once for each older request's token.
        for _ in range(1 + tokens * tokens):
            if not self.core.has_work:
                break
            self.step(1)
        assert not self.core.has_work
        scheduler = self.core.scheduler
        assert (scheduler.pages.num_free, scheduler.slots.num_free) == (self.config.num_pages, self.config.pool_slots)
        check_owners(scheduler)
        scheduler.cache.clear()
        assert (scheduler.pages.num_unused, scheduler.slots.num_unused) == (
            self.config.num_pages,
            self.config.pool_slots,
        )
        for name, (prompt, params) in self.asked.items():
            self.compare(name, prompt, params)

    def ask(self, prompt: list[int], params: SamplingParams) -> None:
        config = self.config
        name = f"r{len(self.asked)}"
        most_run = max(len(prompt), min(len(prompt) + params.max_new_tokens, config.max_context) - 1)
        servable = len(prompt) <= config.max_context and most_run <= config.num_pages * config.page_size
        with nullcontext() if servable else pytest.raises(RequestRefusedError):
            self.core.add(name, prompt, params)
            self.asked[name] = prompt, params
            self.outputs[name] = []

    def compare(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        outputs = self.outputs[name]
        assert [output.finish_reason is None for output in outputs] == [True] * (len(outputs) - 1) + [False]
        ids = [token for output in outputs for token in output.token_ids]
        text = "".join(output.text for output in outputs)
        logprobs = [entry for output in outputs for entry in output.logprobs]
        last = outputs[-1]
        assert last.usage.prompt_tokens == len(prompt)
        assert last.usage.completion_tokens == len(ids)
        assert 0 <= last.usage.cached_tokens < len(prompt)
        assert logprobs == ([] if params.logprobs is None else [describe(token, params) for token in ids])
        answer = expected_answer(prompt, params, params.seed or 0, self.config.max_context)
        if last.finish_reason in ("abort", "error"):
            assert name in self.ended_early
            assert last.error in (None, "logits are not finite")
            assert ids == answer.token_ids[: len(ids)]
            assert text == FakeTokenizer().decode(ids)
        else:
            assert (ids, text, last.finish_reason) == (answer.token_ids, answer.text, answer.finish_reason)


Serving.TestCase.settings = settings(max_examples=250, stateful_step_count=30, deadline=None)
TestServing = Serving.TestCase
