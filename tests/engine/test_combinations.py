"""The small model that ships with the engine, with its features in every combination and under any schedule."""

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.engine.whole import Whole, document, greedy
from tokenspeed_engine import EngineOptions

PAGE, INTERVAL, CONTEXT = 16, 48, 192
PLAIN = EngineOptions(
    page_size=PAGE, max_batch=3, max_step_tokens=40, max_context=CONTEXT, buckets=False, overlap=False, dtype="float32"
)
CACHED = replace(PLAIN, prefix_cache=True, state_interval=INTERVAL, num_snapshots=3)
TIGHT = CONTEXT // PAGE
"""Pages that hold one whole context and no more."""

OPTIONS = {
    "cache, overlap, tight, host": replace(CACHED, overlap=True, num_pages=TIGHT, num_host_snapshots=3),
    "buckets, overlap, tight": replace(PLAIN, buckets=True, overlap=True, num_pages=TIGHT),
    "drafts, buckets": replace(PLAIN, num_drafts=3, buckets=True),
    "drafts, cache, buckets, overlap, host": replace(
        CACHED, num_drafts=3, buckets=True, overlap=True, num_host_snapshots=3
    ),
    "drafts, cache, tight": replace(CACHED, num_drafts=3, num_pages=TIGHT),
    "states, cache, buckets, tight, host": replace(
        CACHED, num_drafts=3, verify="states", buckets=True, num_pages=TIGHT, num_host_snapshots=3
    ),
    "states, overlap, tight": replace(PLAIN, num_drafts=3, verify="states", overlap=True, num_pages=TIGHT),
    "one draft, states, cache, overlap, host": replace(
        CACHED, num_drafts=1, verify="states", overlap=True, num_host_snapshots=3
    ),
}


def every_combination() -> Iterator[Any]:
    """Of prefix cache, drafts, verify, buckets, overlap, tight pools and host snapshots."""
    drafts: tuple[tuple[str, dict[str, Any]], ...] = (
        ("none", {}),
        ("replay", {"num_drafts": 3}),
        ("states", {"num_drafts": 3, "verify": "states"}),
    )
    caches = (("no cache", PLAIN), ("cache", CACHED), ("host", replace(CACHED, num_host_snapshots=3)))
    switches = itertools.product((False, True), repeat=3)
    for (name, cache), (way, speculation), on in itertools.product(caches, drafts, switches):
        buckets, overlap, tight = on
        changes: dict[str, Any] = {"buckets": buckets, "overlap": overlap, "num_pages": TIGHT if tight else None}
        yield pytest.param(replace(cache, **changes, **speculation), id=f"{name}-{way}-{buckets}-{overlap}-{tight}")


NUMBERS = st.integers(0, 5)
EVENTS = st.one_of(
    st.tuples(st.just("ask"), NUMBERS, st.integers(1, 110), st.integers(1, 14)),
    st.tuples(st.just("go on"), NUMBERS, st.integers(1, 9), st.integers(1, 10)),
    st.tuples(st.just("part"), NUMBERS, st.integers(0, 40), st.integers(1, 6)),
    st.tuples(st.just("abort"), NUMBERS, st.just(0), st.just(0)),
    st.tuples(st.just("step"), st.just(0), st.integers(1, 8), st.just(0)),
)
SCHEDULES = st.tuples(
    st.lists(EVENTS.filter(lambda event: event[0] == "ask"), min_size=2, max_size=3),
    st.lists(EVENTS, min_size=3, max_size=7),
)
Event = tuple[str, int, int, int]
# An example takes a second and more, so that shrinking one would take minutes.
FEW = settings(
    max_examples=2,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


def play(options: EngineOptions, events: list[Event]) -> Whole:
    """Requests that begin, go on from what another said or leave it in the middle, and are left, between steps."""
    whole = Whole(options)
    for kind, which, size, count in events:
        names = sorted(whole.asked)
        text = whole.whole_text(names[which % len(names)]) if names else []
        if kind == "ask":
            whole.add(document(which, size), greedy(count))
        elif kind == "step":
            for _ in range(size):
                whole.step()
        elif kind == "abort":
            whole.core.abort(names[which % len(names)])
        else:
            more = text + document(which + 1, size) if kind == "go on" else [*text[: -size or None], 7, 8]
            whole.add(more[: CONTEXT - 20], greedy(count))
    whole.finish()
    whole.check()
    whole.core.scheduler.cache.clear()
    assert whole.core.scheduler.pages.num_unused == whole.llm.num_pages
    assert whole.core.scheduler.slots.num_unused == whole.llm.num_slots
    return whole


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@FEW
@given(schedule=SCHEDULES)
def test_any_schedule(options: EngineOptions, schedule: tuple[list[Event], list[Event]]) -> None:
    play(options, [*schedule[0], *schedule[1]])


@pytest.mark.slow
@pytest.mark.parametrize("options", list(every_combination()))
@settings(FEW, max_examples=4)
@given(schedule=SCHEDULES)
def test_any_schedule_in_every_combination(options: EngineOptions, schedule: tuple[list[Event], list[Event]]) -> None:
    play(options, [*schedule[0], *schedule[1]])


@pytest.mark.parametrize("verify", ["replay", "states"])
def test_agents_in_a_tight_pool(verify: Any) -> None:
    """Everything at once, and each of it happened."""
    options = replace(CACHED, num_drafts=3, verify=verify, buckets=True, overlap=True, num_pages=20, num_snapshots=1)
    whole = Whole(replace(options, num_host_snapshots=2))
    texts = [document(agent, 30 + 9 * agent) for agent in range(3)]
    for turn in range(3):
        names = [whole.add(text, greedy(20)) for text in texts]
        whole.finish()
        texts = [whole.whole_text(name) + document(5 + turn, 4) for name in names]
    whole.check()
    counters = whole.core.counters
    assert counters.preemptions > 0
    assert 0 < counters.drafts_accepted < counters.drafts_proposed
    assert counters.cached_tokens_device > 0
    assert counters.cached_tokens_host > 0


POSITIONS = sorted({edge + around for edge in (16, 32, 48, 64, 96) for around in (-1, 0, 1)})
"""Around pages and snapshots; a page ends at each snapshot, a snapshot at every third page."""


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_warm_equals_cold_around_every_page_and_snapshot(num_drafts: int) -> None:
    """Prompts of each length; then each one's next turn; then texts that part from a long one at each position."""
    whole = Whole(
        replace(CACHED, num_drafts=num_drafts, max_batch=8, max_step_tokens=128, num_pages=400, num_snapshots=64)
    )
    cold = whole.ask(*(document(number, length) for number, length in enumerate(POSITIONS)), count=3)
    assert [whole.cached(name) for name in cold] == [0] * len(cold)
    turns = whole.ask(*([*whole.whole_text(name), 7, 8] for name in cold), count=2)
    assert [whole.cached(name) for name in turns] == [length + 2 for length in POSITIONS]
    (long,) = whole.ask(document(99, 112), count=1)
    text = whole.whole_text(long)
    parted = whole.ask(*([*text[:position], 7, 8] for position in POSITIONS), count=2)
    assert [whole.cached(name) for name in parted] == [position // INTERVAL * INTERVAL for position in POSITIONS]
    whole.check()


@pytest.mark.parametrize(("num_drafts", "buckets"), [(1, True), (3, False), (4, True)])
def test_prompts_about_as_long_as_the_drafts(num_drafts: int, buckets: bool) -> None:
    whole = Whole(replace(CACHED, num_drafts=num_drafts, buckets=buckets, max_batch=8))
    for count in (num_drafts, num_drafts + 2):
        whole.ask(*(document(length, length) for length in range(1, num_drafts + 4)), count=count)
    whole.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_strings_that_complete_at_every_token_of_a_block_of_drafts(overlap: bool) -> None:
    """Text and ids are as without drafts, and the next turn goes on from there."""
    prompt, count = document(0, 49), 12
    plain = Whole(replace(PLAIN, max_batch=8))
    (name,) = plain.ask(prompt, count=count)
    answer = plain.text(name)
    tokenizer = plain.llm.tokenizer
    assert tokenizer is not None
    ends = [len(tokenizer.decode(plain.tokens(name)[: length + 1])) for length in range(count)]
    candidates = {answer[at : at + 3] for at in range(len(answer) - 2)}
    # One for each token that a stop string can complete in.
    stops = list({bisect_left(ends, answer.find(stop) + 3): stop for stop in sorted(candidates)}.values())
    assert len(stops) > count // 2
    whole = Whole(replace(CACHED, num_drafts=3, overlap=overlap, max_batch=8, num_pages=200, num_snapshots=50))
    for engine in (plain, whole):
        for stop in stops:
            engine.add(prompt, replace(greedy(count), stop=(stop,)))
        engine.finish()
    names = list(whole.asked)
    for name, stop in zip(names, stops, strict=True):
        assert whole.text(name) == answer[: answer.find(stop)]
        assert whole.tokens(name) == plain.tokens(f"r{int(name[1:]) + 1}")
    turns = whole.ask(*([*whole.whole_text(name), 7, 8] for name in names), count=1)
    assert all(whole.cached(turn) for turn in turns)
    whole.check()
