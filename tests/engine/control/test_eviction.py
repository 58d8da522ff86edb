"""What moves between slots, pages and host memory, and what goes where room is wanted."""

from dataclasses import replace

import pytest

from tests.engine.control.driver import CACHED, GREEDY, LONG, SMALL, STATELESS, Engine
from tests.engine.control.fake import VOCAB, expected_tokens
from tokenspeed_engine.control import ControlConfig, CopyPage, CopySlot, Fetch, Offload, Settle


def test_an_end_hands_its_slot_over_and_a_hit_copies() -> None:
    engine = Engine(SMALL)
    answer = engine.ask("first", LONG[:5])
    assert engine.transfers == []
    engine.ask("second", [*LONG[:5], *answer, 1])
    # 5 + 6 tokens, of which the last was not run: two pages and half of another one.
    assert engine.transfers == [Settle(slot=0, length=10), CopySlot(source=0, target=1), CopyPage(2, 3)]
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
    assert [t for t in engine.transfers if isinstance(t, Offload)] == [Offload(0, 0), Offload(1, 1)]
    # On the device; in host memory; pushed out of there by one that was used later.
    for i, cached in ((2, 11), (1, 11), (0, 0)):
        prompt = [i, *LONG[:5], *answers[i], 1]
        assert engine.ask(f"again {i}", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
        assert engine.cached(f"again {i}") == cached
    assert [t for t in engine.transfers if isinstance(t, Fetch)] == [Fetch(1, 0)]
    counters = engine.core.counters
    assert (counters.cached_tokens_device, counters.cached_tokens_host) == (11, 11)
    assert counters.snapshots_offloaded == sum(isinstance(t, Offload) for t in engine.transfers)


def test_room_on_the_device_is_not_made_at_the_expense_of_what_is_fetched() -> None:
    engine = Engine(replace(SMALL, num_host_snapshots=1, state_interval=4))
    # The state after four tokens, which nobody used yet, goes to the host; two ends, worth more, stay on the device.
    engine.ask("longer", [0, *LONG[:4]])
    engine.ask("shorter", [1, 2, 3])
    prompt = [0, *LONG[:3], VOCAB - 1, 1]
    assert engine.ask("again", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.core.counters.cached_tokens_host == engine.cached("again") == 4


def test_what_was_of_use_once_outlives_what_a_prefill_leaves_on_its_way() -> None:
    engine = Engine(replace(CACHED, num_slots=1, max_batch=1, num_snapshots=5, state_interval=16))
    engine.ask("first", LONG[:40])
    for i in range(2):
        prompt = [*LONG[:16], VOCAB - 1, i]
        assert engine.ask(f"branch {i}", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
        assert engine.cached(f"branch {i}") == 16
        engine.ask(f"long {i}", [i, *LONG[50:180]])


def test_the_ends_of_conversations_outlive_what_a_prefill_leaves_on_its_way() -> None:
    engine = Engine(replace(CACHED, num_slots=1, max_batch=1, num_snapshots=3, state_interval=16))
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


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("config", [CACHED, STATELESS], ids=["state", "no state"])
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
