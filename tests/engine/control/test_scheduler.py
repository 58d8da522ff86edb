"""What a step runs, and who gives way where pages run out."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.engine.control.fake import VOCAB, FakeExecutor, expected_tokens
from tokenspeed_engine.control import ControlConfig, EngineCore, RequestRefusedError, Row, SamplingParams, StepPlan

ROOMY = ControlConfig(page_size=4, num_pages=64, num_slots=8, max_batch=8, max_step_tokens=8, max_context=64)
GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)


class Engine:
    """A core over the fake model, with the tokens each request got."""

    def __init__(self, config: ControlConfig, num_drafts: int = 0) -> None:
        self.config = config
        self.executor = FakeExecutor(config, num_drafts)
        self.core = EngineCore(config, self.executor, vocab_size=VOCAB)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def add(self, name: str, prompt: Iterable[int], params: SamplingParams = GREEDY) -> None:
        self.core.add(name, list(prompt), params)
        self.tokens[name] = []

    def step(self) -> StepPlan:
        done = len(self.executor.plans)
        self._take_step()
        (plan,) = self.executor.plans[done:]
        return plan

    def _take_step(self) -> None:
        for output in self.core.step():
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason

    def finish(self, most_steps: int) -> None:
        for _ in range(most_steps):
            if not self.core.has_work:
                break
            self._take_step()
        assert not self.core.has_work
        assert self.core.scheduler.pages.num_free == self.config.num_pages
        assert self.core.scheduler.slots.num_free == self.config.num_slots


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(row.request_id, row.start, len(row.tokens)) for row in plan.rows]


def test_chunks_fill_the_budget_after_the_decodes_in_order_of_arrival() -> None:
    engine = Engine(ROOMY)
    engine.add("a", [1] * 3)
    engine.add("b", [2] * 10)
    engine.add("c", [3] * 6)
    plans = [engine.step() for _ in range(4)]
    assert [shape(plan) for plan in plans] == [
        [("a", 0, 3), ("b", 0, 5)],
        [("a", 3, 1), ("b", 5, 5), ("c", 0, 2)],
        [("a", 4, 1), ("b", 10, 1), ("c", 2, 4)],
        [("a", 5, 1), ("b", 11, 1), ("c", 6, 1)],
    ]
    assert [plan.num_decodes for plan in plans] == [0, 1, 2, 3]
    assert [[row.sample is not None for row in plan.rows] for plan in plans[:3]] == [
        [True, False],
        [True, True, False],
        [True, True, True],
    ]


def test_a_row_says_where_it_starts_what_came_before_and_how_to_draw() -> None:
    engine = Engine(replace(ROOMY, context_tokens=2))
    params = replace(GREEDY, temperature=1.0, seed=-1)
    engine.add("a", range(10), params)
    rows = [engine.step().rows[0] for _ in range(3)]
    assert [row.fresh for row in rows] == [True, False, False]
    assert [row.context for row in rows] == [(), (6, 7), (8, 9)]
    samples = [row.sample for row in rows[1:]]
    assert [(sample.params, sample.seed, sample.index) for sample in samples if sample] == [
        (params, 2**64 - 1, 0),
        (params, 2**64 - 1, 1),
    ]


def test_unseeded_requests_differ_and_repeat_from_run_to_run() -> None:
    def seeds(seed: int) -> list[int]:
        engine = Engine(replace(ROOMY, seed=seed))
        engine.add("a", [1])
        engine.add("b", [1])
        return [row.sample.seed for row in engine.step().rows if row.sample]

    first = seeds(0)
    assert first == seeds(0)
    assert len({*first, *seeds(1)}) == 4


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_request_of_exactly_the_whole_pool_finishes(num_drafts: int) -> None:
    config = replace(ROOMY, num_pages=3)
    engine = Engine(config, num_drafts)
    # 7 + 6 tokens, the last of which is never run: 12 places, 3 pages.
    engine.add("whole", [1] * 7)
    engine.finish(most_steps=7)
    assert engine.tokens["whole"] == expected_tokens([1] * 7, GREEDY, 0, 6)


def test_a_request_of_more_than_the_pool_is_refused_with_the_sizes() -> None:
    engine = Engine(replace(ROOMY, num_pages=3))
    with pytest.raises(RequestRefusedError, match=r"^max_new_tokens: .* for 13 tokens, .* room for 12$"):
        engine.add("more", [1] * 8)
    with pytest.raises(RequestRefusedError, match="for 13 tokens"):
        engine.core.add("prompt alone", [1] * 13, replace(GREEDY, max_new_tokens=1))
    assert not engine.core.has_work


def test_the_context_bounds_what_the_pool_must_hold() -> None:
    engine = Engine(replace(ROOMY, num_pages=3, max_context=13))
    engine.add("cut", [1] * 8, replace(GREEDY, max_new_tokens=1000))
    engine.finish(most_steps=20)
    assert engine.tokens["cut"] == expected_tokens([1] * 8, GREEDY, 0, 5)
    assert engine.reasons == {"cut": "length"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_youngest_gives_way_and_resumes_with_the_same_tokens(temperature: float) -> None:
    engine = Engine(replace(ROOMY, num_pages=5, page_size=2))
    params = replace(GREEDY, temperature=temperature, seed=5, max_new_tokens=6)
    engine.add("old", [1, 2], params)
    engine.add("young", [3, 4], params)
    plans = []
    while engine.core.has_work:
        plans.append(engine.step())
    starts = [row.start for plan in plans for row in plan.rows if row.request_id == "young"]
    assert starts.count(0) == 2
    again = next(row for plan in plans[1:] for row in plan.rows if row.request_id == "young" and row.start == 0)
    assert again.fresh
    assert again.sample is not None
    assert again.tokens == (3, 4, *engine.tokens["young"][: again.sample.index])
    assert [row.start for plan in plans for row in plan.rows if row.request_id == "old"] == [0, 2, 3, 4, 5, 6]
    assert engine.tokens == {
        "old": expected_tokens([1, 2], params, 5, 6),
        "young": expected_tokens([3, 4], params, 5, 6),
    }


def test_what_was_preempted_comes_back_before_what_waits() -> None:
    engine = Engine(replace(ROOMY, num_pages=5, page_size=2, max_batch=2))
    engine.add("old", [1, 2])
    engine.add("young", [3, 4])
    engine.add("later", [5, 6], replace(GREEDY, max_new_tokens=1))
    plans = []
    while engine.core.has_work:
        plans.append(engine.step())
    assert [row.request_id for plan in plans for row in plan.rows if row.fresh] == ["old", "young", "young", "later"]


def test_nothing_is_admitted_into_the_last_pages_that_others_will_need() -> None:
    engine = Engine(replace(ROOMY, num_pages=4, page_size=2))
    engine.add("old", [1, 2], replace(GREEDY, max_new_tokens=4))
    engine.step()
    engine.add("young", [3] * 4, replace(GREEDY, max_new_tokens=4))
    plans = [engine.step() for _ in range(8) if engine.core.has_work]
    assert [row.request_id for plan in plans for row in plan.rows if row.fresh] == ["young"]
    assert set(engine.reasons) == {"old", "young"}


@pytest.mark.parametrize(("max_new_tokens", "together"), [(1, True), (2, False)])
def test_a_page_is_kept_only_for_one_that_will_grow(max_new_tokens: int, together: bool) -> None:
    engine = Engine(replace(ROOMY, num_pages=4, page_size=2))
    engine.add("first", [1, 2], replace(GREEDY, max_new_tokens=max_new_tokens))
    engine.add("second", [3] * 6, replace(GREEDY, max_new_tokens=1))
    assert [row.request_id for row in engine.step().rows] == ["first", "second"][: 2 if together else 1]
    engine.finish(most_steps=4)


def test_a_prompt_takes_pages_only_when_a_step_has_tokens_for_it() -> None:
    engine = Engine(ROOMY)
    for i in range(3):
        engine.add(f"r{i}", [i] * 10)
    engine.step()
    assert (engine.core.scheduler.num_running, engine.core.scheduler.num_waiting) == (1, 2)
    engine.step()
    assert (engine.core.scheduler.num_running, engine.core.scheduler.num_waiting) == (2, 1)


def test_whole_pool_requests_one_after_the_other_never_starve() -> None:
    engine = Engine(replace(ROOMY, num_pages=3, max_batch=4))
    for i in range(5):
        engine.add(f"r{i}", [i] * 7)
    ended: list[str] = []
    for _ in range(60):
        if engine.core.has_work:
            engine.step()
            ended += [name for name in engine.reasons if name not in ended]
    assert ended == ["r0", "r1", "r2", "r3", "r4"]


def test_a_short_request_does_not_overtake_one_that_waits_for_pages() -> None:
    engine = Engine(replace(ROOMY, num_pages=4, max_step_tokens=32))
    engine.add("first", [1] * 7)
    engine.add("large", [2] * 10, replace(GREEDY, max_new_tokens=1))
    engine.add("small", [3], replace(GREEDY, max_new_tokens=1))
    order = [row.request_id for _ in range(8) if engine.core.has_work for row in engine.step().rows if row.start == 0]
    assert order == ["first", "large", "small"]


def test_one_that_waits_for_pages_is_looked_up_again_only_when_that_can_help(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(replace(ROOMY, num_pages=4, max_step_tokens=32))
    engine.add("first", [1] * 7)
    engine.add("large", [2] * 10, replace(GREEDY, max_new_tokens=1))
    cache = engine.core.scheduler.cache
    spy = Mock(wraps=cache.find)
    monkeypatch.setattr(cache, "find", spy)
    engine.finish(most_steps=8)
    # Once each when they are let in, and once when the pages were too few.
    assert spy.call_count == 3


@pytest.mark.parametrize(
    ("limit", "most"),
    [({"max_batch": 2}, 2), ({"num_slots": 3}, 3), ({"num_pages": 1}, 1), ({}, 5)],
)
def test_what_bounds_the_batch(limit: dict[str, Any], most: int) -> None:
    engine = Engine(replace(ROOMY, **limit))
    for i in range(5):
        engine.add(f"r{i}", [i], replace(GREEDY, max_new_tokens=4))
    assert max(len(engine.step().rows) for _ in range(3)) == most
    engine.finish(most_steps=40)
    assert len(engine.reasons) == 5


def draft_rows(engine: Engine, wanted: Callable[[Row], bool]) -> list[int]:
    sizes = []
    while engine.core.has_work:
        sizes += [len(row.tokens) for row in engine.step().rows if wanted(row)]
    return sizes


def test_drafts_save_steps_and_change_no_token() -> None:
    prompt = [1, 2, 3]
    params = replace(GREEDY, max_new_tokens=40)
    engine = Engine(ROOMY, num_drafts=3)
    engine.add("a", prompt, params)
    sizes = draft_rows(engine, lambda row: row.decode)
    assert engine.tokens["a"] == expected_tokens(prompt, params, 0, 40)
    assert len(sizes) < 30
    assert max(sizes) == 4


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_about_as_long_as_the_drafts(num_drafts: int, overlap: bool) -> None:
    for length in range(1, num_drafts + 4):
        for first in range(8):
            engine = Engine(replace(ROOMY, overlap=overlap), num_drafts)
            prompt = [first, *range(1, length)]
            engine.add("a", prompt)
            engine.finish(most_steps=12)
            assert engine.tokens["a"] == expected_tokens(prompt, GREEDY, 0, 6)


def test_drafts_do_not_reach_beyond_the_length() -> None:
    engine = Engine(ROOMY, num_drafts=3)
    engine.add("a", [1], replace(GREEDY, max_new_tokens=2))
    assert draft_rows(engine, lambda row: row.decode) == [1]


def test_drafts_leave_a_token_of_the_budget_to_a_prefill() -> None:
    engine = Engine(replace(ROOMY, max_batch=2, max_step_tokens=2), num_drafts=3)
    engine.add("a", [1], replace(GREEDY, max_new_tokens=20))
    engine.step()
    engine.add("b", [1] * 4)
    assert [shape(engine.step())[-1] for _ in range(4)] == [("b", i, 1) for i in range(4)]


def test_drafts_take_no_page_from_another() -> None:
    engine = Engine(replace(ROOMY, num_pages=4, page_size=1, max_batch=2), num_drafts=3)
    engine.add("a", [1], replace(GREEDY, max_new_tokens=4))
    engine.add("b", [2], replace(GREEDY, max_new_tokens=2))
    assert shape(engine.step()) == [("a", 0, 1), ("b", 0, 1)]
    assert [size for _, _, size in shape(engine.step())] == [1, 1]
