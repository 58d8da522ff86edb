"""What is reused, from where, and that it changes no token."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.engine.control.driver import GREEDY, Engine
from tests.engine.control.fake import VOCAB, expected_tokens
from tokenspeed_engine.control import ControlConfig, CopyPage, CopySlot, Fetch, Offload, Settle, StepPlan, Transfer
from tokenspeed_engine.control.lifecycle import Decoding, Prefilling
from tokenspeed_engine.control.scheduler import Scheduler

CONFIG = ControlConfig(
    page_size=16,
    num_pages=64,
    num_slots=2,
    max_batch=2,
    max_step_tokens=64,
    max_context=256,
    prefix_cache=True,
    state_interval=48,
    num_snapshots=8,
)
STATELESS = replace(CONFIG, has_state=False, state_interval=0)
SMALL = replace(CONFIG, page_size=4, state_interval=0, num_slots=1, max_batch=1, num_snapshots=1)
LONG = [(7 * i + i // 16) % VOCAB for i in range(200)]
BOUNDARIES = sorted({edge + off for edge in (16, 32, 48, 64, 96, 144) for off in (-1, 0, 1)} | {1, 2})


def transfers(plans: Sequence[StepPlan]) -> list[Transfer]:
    return [transfer for plan in plans for transfer in plan.transfers]


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_warm_equals_cold_around_every_page_and_checkpoint_boundary(num_drafts: int, overlap: bool) -> None:
    engine = Engine(replace(CONFIG, overlap=overlap), num_drafts, deferred=overlap)
    engine.ask("first", LONG)
    for length in BOUNDARIES:
        for ending in ([], [3], [3, 1, 4, 1, 5]):
            prompt = [*LONG[:length], *ending]
            name = f"{length}+{len(ending)}"
            assert engine.ask(name, prompt) == expected_tokens(prompt, GREEDY, 0, 6)
            # The last position before the end of the prompt with a snapshot that nobody evicted.
            assert engine.cached(name) <= len(prompt) - 1


@pytest.mark.parametrize("length", BOUNDARIES)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_prefill_leaves_snapshots_at_the_interval(length: int, num_drafts: int) -> None:
    engine = Engine(CONFIG, num_drafts)
    engine.ask("first", LONG)
    prompt = [*LONG[:length], (LONG[length] + 1) % VOCAB]
    assert engine.ask("second", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.cached("second") == length - length % 48


@pytest.mark.parametrize("length", BOUNDARIES)
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("config", [CONFIG, STATELESS], ids=["state", "no state"])
def test_the_next_turn_reuses_all_that_was_run(config: ControlConfig, num_drafts: int, length: int) -> None:
    engine = Engine(config, num_drafts)
    prompt = LONG[:length]
    known = 0
    for turn in range(4):
        answer = engine.ask(f"turn {turn}", prompt)
        assert answer == expected_tokens(prompt, GREEDY, 0, 6)
        assert engine.cached(f"turn {turn}") == known
        # The last token generated was not run.
        known = len(prompt) + len(answer) - 1
        prompt = [*prompt, *answer, 5, turn]


@pytest.mark.parametrize("length", BOUNDARIES)
def test_without_state_every_position_is_reused_but_the_last(length: int) -> None:
    engine = Engine(STATELESS)
    engine.ask("first", LONG)
    prompt = LONG[:length]
    assert engine.ask("same", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.cached("same") == length - 1
    new = next(token for token in range(VOCAB) if token not in (LONG[length], engine.tokens("same")[0]))
    prompt = [*LONG[:length], new, 1]
    assert engine.ask("other", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.cached("other") == length


def test_the_same_prompt_again_leaves_its_last_token_to_run() -> None:
    engine = Engine(replace(CONFIG, state_interval=16))
    prompt = LONG[:48]
    for name, cached in (("cold", 0), ("warm", 32)):
        assert engine.ask(name, prompt) == expected_tokens(prompt, GREEDY, 0, 6)
        assert engine.cached(name) == cached


def test_an_end_hands_its_slot_over_and_a_hit_copies() -> None:
    engine = Engine(SMALL)
    answer = engine.ask("first", LONG[:5])
    assert transfers(engine.plans) == []
    engine.ask("second", [*LONG[:5], *answer, 1])
    # 5 + 6 tokens, of which the last was not run: two pages and half of another one.
    assert transfers(engine.plans) == [Settle(slot=0, length=10), CopySlot(source=0, target=1), CopyPage(2, 3)]
    first = next(row for plan in engine.plans for row in plan.rows if row.request_id == "second")
    assert (first.start, first.fresh, first.slot, first.pages[:3]) == (10, False, 1, (0, 1, 3))


def test_a_slot_that_was_a_snapshot_is_reset_for_a_new_sequence() -> None:
    engine = Engine(SMALL)
    for i in range(4):
        prompt = [i, *LONG[:5]]
        assert engine.ask(f"r{i}", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
        assert engine.cached(f"r{i}") == 0
    assert {plan.rows[0].slot for plan in engine.plans if plan.rows[0].fresh} == {0, 1}


def test_cold_snapshots_move_to_the_host_and_come_back() -> None:
    engine = Engine(replace(SMALL, num_host_snapshots=2))
    answers = [engine.ask(f"r{i}", [i, *LONG[:5]]) for i in range(4)]
    assert [t for t in transfers(engine.plans) if isinstance(t, Offload)] == [Offload(0, 0), Offload(1, 1)]
    # On the device; in host memory; pushed out of there by one that was used later.
    for i, cached in ((2, 11), (1, 11), (0, 0)):
        prompt = [i, *LONG[:5], *answers[i], 1]
        assert engine.ask(f"again {i}", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
        assert engine.cached(f"again {i}") == cached
    assert [t for t in transfers(engine.plans) if isinstance(t, Fetch)] == [Fetch(1, 0)]
    counters = engine.core.counters
    assert (counters.cached_tokens_device, counters.cached_tokens_host) == (11, 11)
    assert counters.snapshots_offloaded == sum(isinstance(t, Offload) for t in transfers(engine.plans))


def test_room_on_the_device_is_not_made_at_the_expense_of_what_is_fetched() -> None:
    engine = Engine(replace(SMALL, num_host_snapshots=1, state_interval=4))
    # The state after four tokens, which nobody used yet, goes to the host; two ends, worth more, stay on the device.
    engine.ask("longer", [0, *LONG[:4]])
    engine.ask("shorter", [1, 2, 3])
    prompt = [0, *LONG[:3], VOCAB - 1, 1]
    assert engine.ask("again", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.core.counters.cached_tokens_host == engine.cached("again") == 4


def test_what_was_of_use_once_outlives_what_a_prefill_leaves_on_its_way() -> None:
    engine = Engine(replace(CONFIG, num_slots=1, max_batch=1, num_snapshots=5, state_interval=16))
    engine.ask("first", LONG[:40])
    for i in range(2):
        prompt = [*LONG[:16], VOCAB - 1, i]
        assert engine.ask(f"branch {i}", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
        assert engine.cached(f"branch {i}") == 16
        engine.ask(f"long {i}", [i, *LONG[50:180]])


def test_pages_that_a_request_holds_are_not_evicted_for_nothing() -> None:
    engine = Engine(replace(STATELESS, page_size=4, num_pages=10, state_interval=8))
    engine.add("runs", LONG[:8], replace(GREEDY, max_new_tokens=11))
    engine.step()
    short = replace(GREEDY, max_new_tokens=2)
    engine.ask_beside("idle", [9, *LONG[20:31]], short)
    engine.ask_beside("wants room", [8, *LONG[40:55]], short)
    assert not engine.is_over("runs")
    engine.add("shares", [*LONG[:8], (LONG[8] + 1) % VOCAB])
    engine.finish()
    assert engine.cached("shares") == 8


def test_the_ends_of_conversations_outlive_what_a_prefill_leaves_on_its_way() -> None:
    engine = Engine(replace(CONFIG, num_slots=1, max_batch=1, num_snapshots=3, state_interval=16))
    answer = engine.ask("agent", LONG[:5])
    engine.ask("long", LONG[:1] + LONG[50:200])
    prompt = [*LONG[:5], *answer, 1]
    assert engine.ask("next turn", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.cached("next turn") == 10


def test_room_for_a_snapshot_does_not_prune_the_place_it_is_for() -> None:
    engine = Engine(replace(SMALL, state_interval=4))
    answer = engine.ask("first", LONG[:2], replace(GREEDY, max_new_tokens=7))
    # The only other slot has the state of the one leaf below the place where the next snapshot belongs.
    prompt = [*LONG[:2], *answer[:2], VOCAB - 1, VOCAB - 1]
    assert engine.ask("second", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.cached("second") == 0
    assert engine.ask("third", prompt[:5]) == expected_tokens(prompt[:5], GREEDY, 0, 6)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("config", [CONFIG, STATELESS], ids=["state", "no state"])
def test_a_continuation_that_needs_the_whole_pool_finishes(config: ControlConfig, num_drafts: int) -> None:
    engine = Engine(replace(config, page_size=4, num_pages=6), num_drafts)
    answer = engine.ask("first", LONG[:5])
    # 24 places; ten of them are cached, two in a page that must be copied.
    prompt = [*LONG[:5], *answer, 1, 2]
    params = replace(GREEDY, max_new_tokens=12)
    assert engine.ask("whole", prompt, params) == expected_tokens(prompt, params, 0, 12)
    prompt = LONG[:24]
    params = replace(GREEDY, max_new_tokens=1)
    assert engine.ask("all others", prompt, params) == expected_tokens(prompt, params, 0, 1)


def test_the_page_to_copy_is_given_up_where_it_is_the_one_that_is_missing() -> None:
    engine = Engine(replace(STATELESS, page_size=4, num_pages=6))
    engine.ask("first", LONG[:5])
    prompt = [*LONG[:5], *engine.tokens("first"), *LONG[:13]]
    assert len(prompt) == 24
    params = replace(GREEDY, max_new_tokens=1)
    assert engine.ask("whole", prompt, params) == expected_tokens(prompt, params, 0, 1)
    assert engine.cached("whole") == 8


@pytest.mark.parametrize("config", [CONFIG, STATELESS], ids=["state", "no state"])
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
    engine = Engine(replace(CONFIG, page_size=2, num_pages=12, num_slots=3, max_batch=3))
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
    engine = Engine(replace(CONFIG, max_step_tokens=8, overlap=overlap), num_drafts=3, deferred=True)
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


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("owner", [Scheduler, Prefilling, Decoding])
def test_a_commit_that_breaks_off_leaves_nothing_uncertain(
    owner: type, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(replace(CONFIG, max_step_tokens=8, state_interval=0), num_drafts=3)
    engine.add("lost", LONG[:12])
    for _ in range(number):
        engine.step()
    with monkeypatch.context() as patch:
        for name in ("advance", "complete", "accept"):
            patch.setattr(owner, name, _raise, raising=False)
        with suppress(Planted):
            engine.step()
    assert engine.core.abort("lost")
    engine.finish()
    assert engine.ask("same", LONG[:20]) == expected_tokens(LONG[:20], GREEDY, 0, 6)


@pytest.mark.parametrize("first", range(12))
def test_what_is_cached_ends_with_the_answer_where_it_stops_inside_a_block(first: int) -> None:
    engine = Engine(CONFIG, num_drafts=3)
    params = replace(GREEDY, max_new_tokens=40, ignore_eos=False, stop_token_ids=(1, 2))
    answer = engine.ask("first", [first, 3], params)
    assert engine.last("first").finish_reason == "stop"
    prompt = [first, 3, *answer, VOCAB - 1]
    assert engine.ask("next", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.cached("next") == len(prompt) - 2


def test_what_failed_is_not_cached() -> None:
    engine = Engine(replace(CONFIG, state_interval=0))
    engine.add("bad", LONG[:40])
    engine.step()
    engine.executor.broken.add("bad")
    engine.finish()
    assert engine.last("bad").finish_reason == "error"
    assert engine.ask("same", LONG[:41]) == expected_tokens(LONG[:41], GREEDY, 0, 6)
    assert engine.cached("same") == 0


class Planted(Exception):
    pass


def test_a_step_that_fails_as_a_whole_takes_the_cache_along(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(CONFIG)
    answer = engine.ask("first", LONG[:60])
    engine.add("second", [*LONG[:60], *answer, 1])
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "execute", _raise)
        engine.step()
    assert (engine.last("second").finish_reason, engine.last("second").error) == ("error", "Planted: here")
    prompt = [*LONG[:60], *answer, 1]
    assert engine.ask("third", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.cached("third") == 0


def test_switched_off_nothing_is_kept() -> None:
    engine = Engine(replace(CONFIG, prefix_cache=False))
    for name in ("first", "second"):
        assert engine.ask(name, LONG[:60]) == expected_tokens(LONG[:60], GREEDY, 0, 6)
        assert engine.cached(name) == 0
    assert engine.core.scheduler.pages.num_unused == CONFIG.num_pages
    assert transfers(engine.plans) == []
    # Nor are chunks cut where a snapshot would be due.
    assert [len(row.tokens) for plan in engine.plans for row in plan.rows if row.start == 0] == [60, 60]


def _raise(*arguments: object) -> None:
    raise Planted("here")
