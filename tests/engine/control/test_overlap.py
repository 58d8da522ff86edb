"""A step begins before the text of the one before is made, and nobody outside can tell but by the time."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.engine.control.driver import GREEDY, Engine
from tests.engine.control.fake import EOS, PIECES, VOCAB, FakeExecutor, FakeTokenizer, expected_tokens
from tokenspeed_engine.control import (
    Accepted,
    ControlConfig,
    EngineCore,
    PendingStep,
    RequestOutput,
    RequestRefusedError,
    SamplingParams,
    StepPlan,
    StepResult,
)

CONFIG = ControlConfig(
    page_size=2, num_pages=24, num_slots=3, max_batch=3, max_step_tokens=6, max_context=40, overlap=True
)
A, B, C = PIECES.index(b"a"), PIECES.index(b"b"), PIECES.index(b" c")
PARAMS = SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True)


class Watched:
    """Notes what the core does, in order; yields given ids, one block a step, whatever the plan."""

    def __init__(self, *blocks: tuple[int, ...]) -> None:
        self.blocks = list(blocks)
        self.events: list[str] = []
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> "Watched":
        self.events.append("submit")
        self.plans.append(plan)
        return self

    def result(self) -> StepResult:
        self.events.append("result")
        return StepResult((Accepted(self.blocks.pop(0), drafts=(A, A, A)),))

    def decode(self, ids: Sequence[int]) -> str:
        if self.events[-1] != "text":
            self.events.append("text")
        return FakeTokenizer().decode(ids)


def core_over(executor: Watched | FakeExecutor, config: ControlConfig = CONFIG) -> EngineCore:
    tokenizer = executor if isinstance(executor, Watched) else FakeTokenizer()
    return EngineCore(config, executor, vocab_size=VOCAB, eos_token_ids={EOS}, tokenizer=tokenizer)


def is_free(core: EngineCore, config: ControlConfig = CONFIG) -> bool:
    scheduler = core.scheduler
    return (scheduler.pages.num_free, scheduler.slots.num_free) == (config.num_pages, config.pool_slots)


@pytest.mark.parametrize(
    ("overlap", "events"),
    [
        (True, ["submit", "result", "submit", "text", "result", "submit", "text", "result", "text"]),
        (False, ["submit", "result", "text"] * 3),
    ],
)
def test_text_is_made_while_the_next_step_runs(overlap: bool, events: list[str]) -> None:
    watched = Watched((A,), (B,), (C,))
    core = core_over(watched, replace(CONFIG, overlap=overlap))
    core.add("a", [5], replace(PARAMS, max_new_tokens=3))
    texts = ["".join(output.text for output in core.step()) for _ in range(3)]
    assert texts == ["a", "b", " c"]
    assert watched.events == events
    assert not core.has_work


def test_a_stop_string_dooms_the_row_that_runs_already() -> None:
    watched = Watched((A,), (B,), (C,))
    core = core_over(watched)
    core.add("a", [5], replace(PARAMS, stop=("ab",)))
    assert [output.finish_reason for output in core.step()] == [None]
    (last,) = core.step()
    assert (last.token_ids, last.text, last.finish_reason, last.usage.completion_tokens) == ((B,), "", "stop", 2)
    assert len(watched.plans) == 3
    assert not is_free(core)
    assert core.has_work
    assert not core.abort("a")
    with pytest.raises(RequestRefusedError, match="in use"):
        core.add("a", [5], PARAMS)
    assert core.step() == []
    assert is_free(core)
    assert not core.has_work
    assert len(watched.plans) == 3


def test_a_stop_string_before_an_end_in_the_same_block_counts() -> None:
    watched = Watched((C,), (A, B, A, EOS))
    core = core_over(watched)
    core.add("a", [5], replace(PARAMS, stop=("ab",), ignore_eos=False))
    outputs = core.step() + core.step()
    assert [output.token_ids for output in outputs] == [(C,), (A, B)]
    assert [output.finish_reason for output in outputs] == [None, "stop"]
    # The end was known without the text, so that no third step ran.
    assert len(watched.plans) == 2
    assert is_free(core)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("position", range(1, 6))
def test_a_stop_string_in_each_position_is_as_without_overlap(position: int, num_drafts: int) -> None:
    answers = []
    for overlap in (False, True):
        engine = Engine(replace(CONFIG, overlap=overlap), num_drafts, deferred=overlap)
        prompts = [[i, 1, 2] for i in range(12)]
        for i, prompt in enumerate(prompts):
            text = FakeTokenizer().decode(expected_tokens(prompt, GREEDY, 0, 12))
            engine.add(
                f"r{i}", prompt, replace(PARAMS, max_new_tokens=14, stop=(text[position : position + 2],), logprobs=1)
            )
        engine.finish()
        answers.append([whole(outputs) for outputs in engine.outputs.values()])
    assert answers[0] == answers[1]
    assert "stop" in {answer[-1] for answer in answers[0]}


def whole(outputs: Sequence[RequestOutput]) -> tuple[object, ...]:
    """What a request's outputs add up to."""
    return (
        [token for output in outputs for token in output.token_ids],
        "".join(output.text for output in outputs),
        [entry for output in outputs for entry in output.logprobs],
        outputs[-1].usage,
        outputs[-1].finish_reason,
    )


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("cached", [False, True])
def test_on_and_off_give_the_same_plans_where_no_stop_string_comes_late(cached: bool, num_drafts: int) -> None:
    plans = []
    for overlap in (False, True):
        config = replace(CONFIG, overlap=overlap, prefix_cache=cached, num_snapshots=2, state_interval=4)
        engine = Engine(config, num_drafts, deferred=overlap)
        for i in range(8):
            engine.add(f"r{i}", [1, 2, 3, 4, 5, i], replace(PARAMS, temperature=1.0, seed=i, ignore_eos=i % 2 == 0))
        engine.finish()
        plans.append(engine.plans)
    assert plans[0] == plans[1]


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_frees_within_a_step(steps: int) -> None:
    core = core_over(FakeExecutor(CONFIG, num_drafts=2, deferred=True))
    core.add("a", [1] * 8, PARAMS)
    got = [token for _ in range(steps) for output in core.step() for token in output.token_ids]
    if not core.has_work:
        return
    assert core.abort("a")
    assert core.abort("a") == (steps > 0)
    (last,) = core.step()
    assert is_free(core)
    assert not core.has_work
    assert (last.finish_reason, last.token_ids, last.usage.completion_tokens) == ("abort", (), len(got))
    assert got == expected_tokens([1] * 8, PARAMS, 0, len(got))


class Interfering(FakeExecutor):
    """Calls back while a step is handed in, before it is."""

    def __init__(self, during: Callable[[int], None]) -> None:
        super().__init__(CONFIG, deferred=True)
        self.during = during
        self.number = -1

    def submit(self, plan: StepPlan) -> PendingStep:
        self.number += 1
        self.during(self.number)
        return super().submit(plan)


@pytest.mark.parametrize("number", range(6))
def test_an_abort_from_inside_a_step_loses_no_token_that_was_committed(number: int) -> None:
    def during(now: int) -> None:
        if now == number:
            core.abort("a")
            core.abort("b")

    core = core_over(Interfering(during))
    prompts = {"a": [1] * 6, "b": [2]}
    # `b` ends by its length at the commit before the third submit.
    core.add("a", prompts["a"], PARAMS)
    core.add("b", prompts["b"], replace(PARAMS, max_new_tokens=2))
    outputs: dict[str, list[RequestOutput]] = {"a": [], "b": []}
    for _ in range(20):
        for output in core.step() if core.has_work else []:
            outputs[output.request_id].append(output)
    assert is_free(core)
    assert not core.has_work
    for name, parts in outputs.items():
        ids = [token for output in parts for token in output.token_ids]
        assert ids == expected_tokens(prompts[name], PARAMS, 0, len(ids))
        assert [output.finish_reason is None for output in parts] == [True] * (len(parts) - 1) + [False]


def test_an_interruption_loses_no_text_of_the_step_before() -> None:
    def during(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    core = core_over(Interfering(during))
    core.add("a", [1], PARAMS)
    (first,) = core.step()
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert is_free(core)
    tokens, last = core.step()
    assert (*first.token_ids, *tokens.token_ids) == tuple(expected_tokens([1], PARAMS, 0, 2))
    assert (last.finish_reason, last.error) == ("error", "the step was interrupted")
    assert not core.has_work


@pytest.mark.parametrize("when", ["submit", "result"])
def test_a_step_that_fails_ends_its_requests_and_no_others(when: str) -> None:
    engine = Engine(replace(CONFIG, max_batch=1, num_slots=1), deferred=True)
    engine.add("a", [1])
    engine.add("b", [2])
    engine.step()
    fail = engine.executor.submit if when == "submit" else engine.executor.execute

    def failing(plan: StepPlan) -> StepResult:
        setattr(engine.executor, fail.__name__, fail)
        raise MemoryError("out of memory")

    setattr(engine.executor, fail.__name__, failing)
    engine.finish()
    assert (engine.last("a").finish_reason, engine.last("a").error) == ("error", "MemoryError: out of memory")
    assert engine.tokens("b") == expected_tokens([2], GREEDY, 0, 6)


def test_what_is_asked_while_a_step_runs_holds_for_the_next() -> None:
    engine = Engine(CONFIG, deferred=True)
    engine.add("a", [1])
    engine.add("b", [2] * 5)

    def meanwhile() -> None:
        assert engine.core.abort("a")
        engine.add("c", [3])

    for output in engine.core.step(meanwhile):
        engine.outputs[output.request_id].append(output)
    engine.finish()
    assert [[row.request_id for row in plan.rows] for plan in engine.plans[:2]] == [["a", "b"], ["b", "c"]]
    assert engine.tokens("a") == expected_tokens([1], GREEDY, 0, 1)
    assert engine.last("a").finish_reason == "abort"


def test_drain_waits_and_begins_nothing() -> None:
    engine = Engine(CONFIG, deferred=True)
    engine.add("a", [1])
    engine.step()
    engine.core.drain()
    assert engine.executor.running is None
    assert len(engine.plans) == 2
    engine.core.drain()
    engine.core.abort("a")
    engine.check_free()
    engine.finish()
    # What the drained step yielded was not lost.
    assert engine.tokens("a") == expected_tokens([1], GREEDY, 0, 2)


def test_counters_count() -> None:
    engine = Engine(replace(CONFIG, prefix_cache=True, num_snapshots=2), num_drafts=3, deferred=True)
    engine.add("a", [1, 2, 3], replace(PARAMS, max_new_tokens=20))
    engine.finish()
    answer = engine.tokens("a")
    engine.ask("b", [1, 2, 3, *answer, 4], replace(PARAMS, max_new_tokens=4))
    rows = [row for plan in engine.plans for row in plan.rows]
    counters = engine.core.counters
    assert counters.steps == len(engine.plans)
    assert counters.prompt_tokens == 3 + 24
    assert (counters.cached_tokens_device, counters.cached_tokens_host) == (22, 0)
    assert counters.generated_tokens == 24
    assert counters.drafts_proposed == sum(len(row.tokens) - 1 for row in rows if row.decode)
    # Every token but a request's first comes with a decode, which yields one and the drafts that were right.
    assert counters.drafts_accepted == 24 - 2 - sum(row.decode for row in rows)
    assert 0 < counters.drafts_accepted < counters.drafts_proposed
    assert (counters.preemptions, counters.snapshots_saved, counters.snapshots_offloaded) == (0, 2, 0)
