"""What is kept of requests that do not end by themselves: what is certain, and nothing else."""

from dataclasses import replace

import pytest

from tests.engine.control.driver import CACHED, GREEDY, LONG, SMALL, STATELESS, Engine
from tests.engine.control.fake import VOCAB, expected_tokens
from tokenspeed_engine.control import ControlConfig
from tokenspeed_engine.control.lifecycle import Decoding, Prefilling
from tokenspeed_engine.control.scheduler import Scheduler


@pytest.mark.parametrize("config", [CACHED, STATELESS], ids=["state", "no state"])
def test_a_preempted_request_resumes_where_it_was(config: ControlConfig) -> None:
    engine = Engine(replace(config, page_size=2, num_pages=9, max_step_tokens=8))
    params = replace(GREEDY, max_new_tokens=8)
    engine.add("old", LONG[:4], params)
    engine.add("young", LONG[4:8], params)
    engine.finish()
    for name, prompt in (("old", LONG[:4]), ("young", LONG[4:8])):
        assert engine.tokens(name) == expected_tokens(prompt, params, 0, 8)
    assert engine.core.counters.preemptions > 0
    starts = [row.start for plan in engine.plans for row in plan.rows if row.request_id == "young"]
    # The old one's last pages cost the young one the end of what it had, without a state not the beginning.
    assert starts.count(0) == (2 if config.has_state else 1)


def test_a_preempted_request_loses_nothing_where_its_pages_are_not_needed() -> None:
    engine = Engine(replace(CACHED, page_size=2, num_pages=12, num_slots=3, max_batch=3))
    params = replace(GREEDY, max_new_tokens=8)
    engine.add("young", LONG[4:8], params)
    for _ in range(3):
        engine.step()
    engine.core.scheduler._preempt("young")
    engine.finish()
    assert engine.tokens("young") == expected_tokens(LONG[4:8], params, 0, 8)
    starts = [row.start for plan in engine.plans for row in plan.rows]
    assert starts == [0, 4, 5, 6, 7, 8, 9, 10]
    assert engine.last("young").usage.cached_tokens == 0


@pytest.mark.parametrize("steps", range(1, 7))
@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_leaves_what_is_certain(steps: int, overlap: bool) -> None:
    engine = Engine(replace(CACHED, max_step_tokens=8, overlap=overlap), num_drafts=3, deferred=True)
    engine.add("gone", LONG[:20])
    for _ in range(steps):
        engine.step()
    engine.core.abort("gone")
    engine.finish()
    prompt = [*LONG[:20], *engine.tokens("gone"), 9, 9]
    assert engine.ask("next", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.cached("next") >= min(20, 8 * steps)


def engine_with_one_that_has_a_hit_and_no_row() -> tuple[Engine, list[int]]:
    """`busy` decodes with a draft, `first in` takes the token that is left, and `no row` waits with what was copied."""
    engine = Engine(replace(SMALL, num_slots=3, max_batch=3, num_snapshots=2, max_step_tokens=3), num_drafts=3)
    prompt = [*LONG[:5], *engine.ask("first", LONG[:5])]
    engine.add("busy", [9], replace(GREEDY, max_new_tokens=30))
    engine.step()
    for name, token in (("first in", 1), ("no row", 2)):
        engine.add(name, [*prompt[:-1], token])
    return engine, [*prompt[:-1], 2]


def test_an_abort_of_one_that_has_a_hit_and_no_row() -> None:
    engine, prompt = engine_with_one_that_has_a_hit_and_no_row()
    engine.step()
    assert [(row.request_id, len(row.tokens)) for row in engine.plans[-1].rows] == [("busy", 2), ("first in", 1)]
    assert engine.core.scheduler.num_running == 3
    engine.core.abort("no row")
    engine.finish()
    assert engine.ask("again", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.cached("again") == 10


def test_copies_that_were_lost_with_a_step_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = engine_with_one_that_has_a_hit_and_no_row()
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "execute", _raise)
        engine.step()
    assert [engine.last(name).error for name in ("busy", "first in")] == ["Planted: here"] * 2
    engine.finish()
    assert engine.tokens("no row") == expected_tokens(prompt, GREEDY, 0, 6)


@pytest.mark.parametrize(
    ("owner", "number"),
    [(Scheduler, 0), (Scheduler, 1), (Scheduler, 2), (Prefilling, 0), (Prefilling, 1), (Decoding, 3)],
)
def test_a_commit_that_breaks_off_leaves_nothing_uncertain(
    owner: type, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(replace(CACHED, max_step_tokens=8, state_interval=0), num_drafts=3)
    engine.add("lost", LONG[:12])
    for _ in range(number):
        engine.step()
    with monkeypatch.context() as patch:
        for name in ("advance", "complete", "accept"):
            patch.setattr(owner, name, _raise, raising=False)
        with pytest.raises(Planted):
            engine.step()
    assert engine.core.abort("lost")
    engine.finish()
    assert engine.ask("same", LONG[:20]) == expected_tokens(LONG[:20], GREEDY, 0, 6)


@pytest.mark.parametrize("first", range(12))
def test_what_is_cached_ends_with_the_answer_where_it_stops_inside_a_block(first: int) -> None:
    engine = Engine(CACHED, num_drafts=3)
    params = replace(GREEDY, max_new_tokens=40, ignore_eos=False, stop_token_ids=(1, 2))
    answer = engine.ask("first", [first, 3], params)
    assert engine.last("first").finish_reason == "stop"
    prompt = [first, 3, *answer, VOCAB - 1]
    assert engine.ask("next", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.cached("next") == len(prompt) - 2


def test_what_failed_is_not_cached() -> None:
    engine = Engine(replace(CACHED, state_interval=0))
    engine.add("bad", LONG[:40])
    engine.step()
    engine.executor.broken.add("bad")
    engine.finish()
    assert engine.last("bad").finish_reason == "error"
    assert engine.ask("same", LONG[:41]) == expected_tokens(LONG[:41], GREEDY, 0, 6)
    assert engine.cached("same") == 0


@pytest.mark.parametrize("config", [CACHED, STATELESS], ids=["state", "no state"])
def test_what_a_failed_request_left_on_its_way_or_went_on_from_is_not_reused(config: ControlConfig) -> None:
    engine = Engine(replace(config, state_interval=24, max_step_tokens=24))
    other = [*LONG[:20], VOCAB - 1, 1]
    answer = engine.ask("other", other)
    for name in ("first", "again"):
        engine.add(name, LONG[:100])
        engine.step()
        engine.step()
        engine.executor.broken.add(name)
        engine.finish()
        assert engine.last(name).finish_reason == "error"
    engine.ask("same", LONG[:100])
    # Without state, what another sequence begins with too stays.
    assert engine.cached("same") == (0 if config.has_state else 20)
    engine.ask("next", [*other, *answer, 1])
    assert engine.cached("next") == len(other) + len(answer) - 1, "other ends stay"


class Planted(Exception):
    pass


def test_a_step_that_fails_as_a_whole_takes_the_cache_along(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(CACHED)
    answer = engine.ask("first", LONG[:60])
    engine.add("second", [*LONG[:60], *answer, 1])
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "execute", _raise)
        engine.step()
    assert (engine.last("second").finish_reason, engine.last("second").error) == ("error", "Planted: here")
    prompt = [*LONG[:60], *answer, 1]
    assert engine.ask("third", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.cached("third") == 0


def _raise(*arguments: object) -> None:
    raise Planted("here")
