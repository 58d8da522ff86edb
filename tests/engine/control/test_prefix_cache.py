"""What is reused, and that it changes no token."""

from dataclasses import replace

import pytest

from tests.engine.control.driver import CACHED, GREEDY, LONG, STATELESS, Engine
from tests.engine.control.fake import VOCAB, expected_tokens
from tokenspeed_engine.control import ControlConfig

BOUNDARIES = sorted({edge + off for edge in (16, 32, 48, 64, 96, 144) for off in (-1, 0, 1)} | {1, 2})


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_warm_equals_cold_around_every_page_and_checkpoint_boundary(num_drafts: int, overlap: bool) -> None:
    engine = Engine(replace(CACHED, overlap=overlap), num_drafts, deferred=overlap)
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
    engine = Engine(CACHED, num_drafts)
    engine.ask("first", LONG)
    prompt = [*LONG[:length], (LONG[length] + 1) % VOCAB]
    assert engine.ask("second", prompt) == expected_tokens(prompt, GREEDY, 0, 6)
    assert engine.cached("second") == length - length % 48


@pytest.mark.parametrize("length", BOUNDARIES)
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("config", [CACHED, STATELESS], ids=["state", "no state"])
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
    engine = Engine(replace(CACHED, state_interval=16))
    prompt = LONG[:48]
    for name, cached in (("cold", 0), ("warm", 32)):
        assert engine.ask(name, prompt) == expected_tokens(prompt, GREEDY, 0, 6)
        assert engine.cached(name) == cached


def test_switched_off_nothing_is_kept() -> None:
    engine = Engine(replace(CACHED, prefix_cache=False))
    for name in ("first", "second"):
        assert engine.ask(name, LONG[:60]) == expected_tokens(LONG[:60], GREEDY, 0, 6)
        assert engine.cached(name) == 0
    assert engine.core.scheduler.pages.num_unused == CACHED.num_pages
    assert engine.transfers == []
    # Nor are chunks cut where a snapshot would be due.
    assert [len(row.tokens) for plan in engine.plans for row in plan.rows if row.start == 0] == [60, 60]


def test_an_end_counts_as_one_also_where_its_prefill_left_a_snapshot() -> None:
    engine = Engine(replace(CACHED, state_interval=16))
    engine.ask("at once", LONG[:32], replace(GREEDY, max_new_tokens=1))
    (node,) = engine.core.scheduler.cache._tree.leaves
    assert (node.length, node.snapshot is not None and node.snapshot.is_proven) == (32, True)
