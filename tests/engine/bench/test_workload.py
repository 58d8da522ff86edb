"""The agent's workload: reproducible, of the asked sizes, without shared prefixes."""

import pytest

from tokenspeed_engine.bench.workload import Workload


def test_sessions_are_the_same_at_every_call_and_differ_from_each_other() -> None:
    workload = Workload(sessions=20)
    openings = [workload.session(number).message(0, 0.01) for number in range(20)]
    assert openings == [workload.session(number).message(0, 0.01) for number in range(20)]
    beginnings = {" ".join(opening.split()[:4]) for opening in openings}
    assert len(beginnings) == 20
    assert openings != [Workload(sessions=20, seed=1).session(number).message(0, 0.01) for number in range(20)]


def test_turns_and_words_follow_the_sizes() -> None:
    workload = Workload(sessions=200, least_turns=10, most_turns=15, first_tokens=500, turn_tokens=80)
    turns = [workload.session(number).turns for number in range(200)]
    assert (min(turns), max(turns)) == (10, 15)
    session = workload.session(0)
    assert [len(session.message(turn, 0.5).split()) for turn in range(3)] == [250, 40, 40]


def test_scaling_divides_all_token_counts() -> None:
    scaled = Workload(users=2, sessions=3, seed=5).scaled(50)
    assert (scaled.first_tokens, scaled.turn_tokens, scaled.output_tokens) == (1000, 16, 10)
    assert (scaled.users, scaled.sessions, scaled.least_turns, scaled.most_turns, scaled.seed) == (2, 3, 10, 15, 5)
    assert Workload().scaled(10**6).output_tokens == 1


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="users: expected at least 1, got 0"):
        Workload(users=0)
    with pytest.raises(ValueError, match=r"least_turns: expected at most most_turns \(3\), got 4"):
        Workload(least_turns=4, most_turns=3)
