"""The figures of a run of agents, on turns with known times."""

import pytest

from tokenspeed_engine.bench.agents import Run, Turn
from tokenspeed_engine.bench.client import Answer
from tokenspeed_engine.bench.page import lines, pictures
from tokenspeed_engine.bench.served import Speculation
from tokenspeed_engine.bench.summary import percentile, summarise
from tokenspeed_engine.bench.workload import Workload

FIRST = Answer("a", "", 10.0, (10.5, 10.7, 11.0), prompt_tokens=1000, cached_tokens=0, output_tokens=11)
SECOND = Answer("b", "", 20.0, (20.1, 20.2, 20.3), prompt_tokens=1100, cached_tokens=990, output_tokens=5)
FAILED = Answer(started=30.0, error="HTTP 500")
RUN = Run(
    Workload(),
    "m",
    (Turn(0, 0, FIRST), Turn(0, 1, SECOND), Turn(0, 2, FAILED)),
    30.0,
    Speculation(steps=10, accepted=6),
)


def test_figures() -> None:
    found = summarise(RUN, gpus=2)
    assert (found["turns"], found["failed_turns"]) == (2, 1)
    assert found["user_tokens_per_second"] == pytest.approx(20.0)  # 10 in 0.5 s, 4 in 0.2 s
    assert found["user_tokens_per_second_with_ttft"] == pytest.approx(11.0)  # 11 in 1 s, 5 in 0.3 s: nearest rank
    assert found["output_tokens_per_minute_per_gpu"] == pytest.approx(16)
    assert found["total_tokens_per_minute_per_gpu"] == pytest.approx(16 + 2100)
    assert found["ttft_first_turn"]["p50"] == pytest.approx(0.5)
    assert found["ttft_later_turns"]["max"] == pytest.approx(0.1)
    assert found["gap"]["max"] == pytest.approx(0.3)
    assert found["cache_hit"] == pytest.approx(0.9)
    assert found["tokens_per_verify_step"] == pytest.approx(1.6)


def test_what_the_server_does_not_say_is_not_known() -> None:
    silent = Answer("b", "", 20.0, (20.1,), prompt_tokens=10, cached_tokens=None, output_tokens=1)
    found = summarise(Run(Workload(), "m", (Turn(0, 1, silent),), 1.0, None), gpus=1)
    assert found["cache_hit"] is None
    assert found["tokens_per_verify_step"] is None
    assert found["user_tokens_per_second"] is None, "one piece has no rate"
    assert ("cache hit", "not known") in lines(found)


@pytest.mark.parametrize(("percent", "wanted"), [(50, 2), (99, 4), (100, 4), (1, 1)])
def test_percentiles_are_values_that_were_measured(percent: float, wanted: float) -> None:
    assert percentile([4, 1, 3, 2], percent) == wanted
    assert percentile([], percent) is None


def test_pictures_are_drawn_of_a_run_and_of_an_empty_one() -> None:
    assert pictures(RUN).count("<svg") == 1
    assert pictures(Run(Workload(), "m", (Turn(0, 0, FAILED),), 1.0, None)).count("<svg") == 1
