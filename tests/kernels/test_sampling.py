"""Sampling: exact frequencies, degenerate rows, ties; log-probabilities."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed_kernels.cases import sampling as cases
from tokenspeed_kernels.sampling import logprobs, sample
from tokenspeed_registry import ContentError, ShapeError

NAN, INF = math.nan, math.inf
GRID = 4096
"""Evenly spaced uniform numbers: how many draw a token is its probability."""


def _sample(
    logits: list[list[float]] | Tensor,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    uniform: float | list[float] | Tensor = 0.5,
) -> list[int]:
    rows = torch.as_tensor(logits)

    def column(value: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(rows.shape[0]).contiguous()

    ids: list[int] = sample(
        rows.contiguous(),
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(uniform, torch.float32),
        backend="torch",
    ).tolist()
    return ids


def _counts(logits: list[float], **parameters: Any) -> list[int]:
    """How many of the grid's uniform numbers draw each token."""
    uniform = (torch.arange(GRID) + 0.5) / GRID
    ids = _sample(torch.tensor(logits).expand(GRID, -1), uniform=uniform, **parameters)
    return torch.tensor(ids).bincount(minlength=len(logits)).tolist()


_EIGHTHS = [math.log(p) for p in (1 / 8, 1 / 2, 1 / 8, 1 / 4)]


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        ({}, [512, 2048, 512, 1024]),
        ({"top_k": 9}, [512, 2048, 512, 1024]),
        ({"temperature": 0.0}, [0, 4096, 0, 0]),
        ({"top_k": 1}, [0, 4096, 0, 0]),
        ({"top_p": 0.0}, [0, 4096, 0, 0]),
        # The first of two equal tokens is kept: 4/7, 2/7 and 1/7 of the grid.
        ({"top_k": 3}, [585, 2341, 0, 1170]),
        ({"top_p": 0.7}, [0, 2731, 0, 1365]),
        ({"top_p": 0.8}, [585, 2341, 0, 1170]),
        # Of the two that top-k keeps the first has 2/3: enough for 0.6, though not of the whole.
        ({"top_k": 2, "top_p": 0.6}, [0, 4096, 0, 0]),
        # Squares: 1, 16, 1 and 4 of 22.
        ({"temperature": 0.5}, [186, 2979, 186, 745]),
    ],
)
def test_frequencies_are_the_processed_probabilities(parameters: dict[str, Any], wanted: list[int]) -> None:
    assert _counts(_EIGHTHS, **parameters) == wanted


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-24, 24).map(lambda n: n / 4) | st.sampled_from([NAN, -INF]), min_size=1, max_size=9),
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]),
)
def test_frequencies_follow_the_definition(logits: list[float], temperature: float, top_k: int, top_p: float) -> None:
    alive = [i for i, logit in enumerate(logits) if logit > -INF]
    assume(alive)
    ranked = sorted(alive, key=lambda i: (-logits[i], i))[: top_k or None]
    weights = [math.exp((logits[i] - logits[ranked[0]]) / temperature) for i in ranked]
    mass = [total / sum(weights) for total in itertools.accumulate(weights)]
    assume(all(abs(part - top_p) > 1e-5 for part in mass[:-1]))  # there float32 may keep a token more or less
    kept = 1 + sum(part < top_p for part in mass[:-1])
    wanted = [0.0] * len(logits)
    for i, weight in zip(ranked[:kept], weights[:kept], strict=True):
        wanted[i] = GRID * weight / sum(weights[:kept])
    counts = _counts(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    # An interval of the grid's length L holds L − 1 to L + 1 of its points.
    assert all(abs(count - size) <= 1.001 for count, size in zip(counts, wanted, strict=True)), (counts, wanted)
    assert all(count == 0 for count, size in zip(counts, wanted, strict=True) if size == 0)


def test_a_nan_row_leaves_its_neighbours_alone() -> None:
    make = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 11, generator=make)
    parameters: dict[str, Any] = {
        "temperature": [1.0, 0.0, 0.5, 1.0, 0.0, 2.0],
        "top_k": [0, 3, 400, 2, 0, 2000000000],
        "top_p": [1.0, 0.0, 0.9, 0.5, 1.0, 0.0],
        "uniform": [0.1, 0.99, 0.6, 0.7, 0.3, 0.8],
    }
    clean = _sample(logits, **parameters)
    for bad in range(6):
        spoiled = logits.clone()
        spoiled[bad] = NAN
        assert _sample(spoiled, **parameters) == [*clean[:bad], 0, *clean[bad + 1 :]]


@pytest.mark.parametrize("dead", [NAN, -INF])
def test_dead_tokens_are_never_drawn(dead: float) -> None:
    logits = [[dead, 1.0, dead, 0.0, dead]]
    assert {_sample(logits, uniform=u)[0] for u in (0.0, 0.5, 0.8, 1 - 2**-24)} == {1, 3}
    assert _sample(logits, temperature=0.0) == [1]
    assert _sample([[dead] * 5], uniform=1 - 2**-24) == [0]


@pytest.mark.parametrize("top_k", [5, 6, 2**31 - 1, 0, -1])
def test_top_k_of_the_vocabulary_or_more_keeps_all(top_k: int) -> None:
    logits = torch.randn(200, 5, generator=torch.Generator().manual_seed(5))
    uniform = torch.rand(200, generator=torch.Generator().manual_seed(6))
    assert _sample(logits, top_k=top_k, uniform=uniform) == _sample(logits, uniform=uniform)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_greedy_takes_the_first_of_equals_whatever_the_rest_says(uniform: float) -> None:
    logits = [[1.0, 7.0, 7.0, 7.0], [0.0, -0.0, 0.0, -1.0], [NAN, -1.0, -1.0, -2.0], [-3.0, INF, 5.0, INF]]
    assert _sample(logits, temperature=0.0, top_p=0.0, uniform=uniform) == [1, 0, 1, 1]
    assert _sample(logits, temperature=0.0, top_k=3, top_p=0.9, uniform=uniform) == [1, 0, 1, 1]


def test_the_ends_of_the_unit_interval() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -INF]])
    assert _sample(logits, uniform=0.0) == [1]
    assert _sample(logits, uniform=1 - 2**-24) == [0]
    # The cumulative probability must exceed the uniform number, not reach it.
    assert _sample([[0.0, 0.0]], uniform=0.5) == [1]
    # No rounding of a long sum may reach past the last token that has any probability.
    flat = torch.full((1, 4097), 3.0)
    flat[0, 4000:] = -INF
    assert _sample(flat, uniform=1 - 2**-24) == [3999]


def test_extreme_temperatures_are_the_limits() -> None:
    logits = [[3.0, 1.0, 3.0, -2.0]]
    assert {_sample(logits, temperature=1e-38, uniform=u)[0] for u in (0.0, 0.49, 0.51, 0.99)} == {0, 2}
    assert _counts(logits[0], temperature=3e38) == [1024] * 4
    assert {_sample([[0.0, INF, 9.0, INF]], uniform=u)[0] for u in (0.0, 0.49, 0.51, 0.99)} == {1, 3}


def test_the_comparison_accepts_the_interval_of_the_uniform_number_only() -> None:
    def distance(token: int, uniform: float, **other: Any) -> float:
        row = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "uniform": uniform} | other
        arguments = {"logits": torch.tensor([_EIGHTHS]), **{name: torch.tensor([row[name]]) for name in row}}
        assert cases.sample.compare is not None
        return cases.sample.compare(arguments, (torch.tensor([token]),), (torch.tensor([0]),))

    # In order of probability the intervals are 1: [0, 1/2], 3: [1/2, 3/4], 0: [3/4, 7/8], 2: [7/8, 1].
    assert distance(3, 0.6) == 0
    assert distance(1, 0.5 + 1e-6) == pytest.approx(1e-6, rel=0.1)
    assert distance(0, 0.6) == pytest.approx(0.15)
    assert distance(1, 0.1, temperature=0.0) == 0
    assert distance(3, 0.6, temperature=0.0) == INF
    assert distance(2, 0.999, top_k=3) == INF
    # Just above 3/4 a third token is needed, and float32 may miss it; well above it may not.
    assert distance(3, 0.99, top_p=0.75 + 1e-6) == pytest.approx(1e-6, rel=0.1)
    assert distance(3, 0.99, top_p=0.8) == pytest.approx(0.05)


def test_logprobs_by_hand() -> None:
    logits = torch.tensor([[math.log(1 / 8), math.log(1 / 2), math.log(1 / 8), math.log(1 / 4)]]) + 1000
    logprob, top_logprobs, top_ids = logprobs(logits, torch.tensor([2]), top=3, backend="torch")
    assert top_ids.tolist() == [[1, 3, 0]]
    torch.testing.assert_close(logprob, torch.tensor([-2.0794415]), atol=1e-4, rtol=0)
    torch.testing.assert_close(top_logprobs, torch.tensor([[-0.6931472, -1.3862944, -2.0794415]]), atol=1e-4, rtol=0)


def test_logprobs_of_equals_come_by_id() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0, 2.0, 2.0, -0.0], [-5.0, -3.0, -3.0, -5.0, -4.0, -3.0, -9.0]])
    _, _, top_ids = logprobs(logits, torch.tensor([0, 0]), top=7, backend="torch")
    assert top_ids.tolist() == [[4, 5, 0, 1, 3, 6, 2], [1, 2, 5, 4, 0, 3, 6]]


def test_logprobs_of_nan_rows_and_padding() -> None:
    logits = torch.tensor([[NAN, NAN], [0.0, NAN], [0.0, 0.0], [0.0, 0.0]])
    logprob, top_logprobs, top_ids = logprobs(logits, torch.tensor([1, 1, 0, -1]), top=1, backend="torch")
    assert logprob.tolist() == pytest.approx([-INF, -INF, -math.log(2), 0.0])
    assert top_logprobs.flatten().tolist() == pytest.approx([-INF, 0.0, -math.log(2), 0.0])
    assert top_ids.tolist() == [[0], [0], [0], [0]]


def test_logprobs_errors_name_what_is_wrong() -> None:
    with pytest.raises(ShapeError, match="0 <= top <= vocab"):
        logprobs(torch.zeros(1, 4), torch.tensor([0]), top=5)
    with pytest.raises(ContentError, match="ids"):
        logprobs(torch.zeros(1, 4), torch.tensor([4]), top=1)
