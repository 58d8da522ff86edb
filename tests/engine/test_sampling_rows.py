"""From logits to results: every row of a step by its own parameters, whatever the rows beside it are."""

import math

import pytest
import torch

from tokenspeed_engine.control import Accepted, Failed, Sample, SamplingParams
from tokenspeed_engine.execution.sampling import sample_rows, uniform

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0])


def wanted(params: SamplingParams, seed: int = 0) -> Sample:
    return Sample(params, seed, 0)


GREEDY = wanted(SamplingParams(temperature=0.0, logprobs=1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = bad
    first, failed, last = sample_rows(logits, [GREEDY] * 3)
    assert isinstance(failed, Failed)
    assert first == last == sample_rows(LOGITS[None], [GREEDY])[0]


@pytest.mark.parametrize("top_k", [4, 5, 2**31, 2**70])
def test_a_top_k_of_the_vocabulary_or_more_keeps_all_and_harms_no_other_row(top_k: int) -> None:
    drawn = {
        result.tokens[0]
        for seed in range(200)
        for result in sample_rows(LOGITS[None], [wanted(SamplingParams(temperature=5.0, top_k=top_k), seed)])
        if isinstance(result, Accepted)
    }
    assert drawn == {0, 1, 2, 3}
    beside = sample_rows(LOGITS.repeat(2, 1), [wanted(SamplingParams(top_k=top_k)), GREEDY])[1]
    assert beside == sample_rows(LOGITS[None], [GREEDY])[0]


def test_each_row_lists_as_many_alternatives_as_it_asks_for() -> None:
    samples = [wanted(SamplingParams(temperature=0.0, logprobs=count)) for count in (None, 0, 3, 20)]
    results = sample_rows(LOGITS.repeat(4, 1), samples)
    assert all(isinstance(result, Accepted) and result.tokens == (1,) for result in results)
    listed = [result.logprobs for result in results if isinstance(result, Accepted)]
    assert listed[0] == ()
    assert [[token for token, _ in entry.top] for (entry,) in listed[1:]] == [[], [1, 3, 2], [1, 3, 2, 0]]
    expected = float(LOGITS.log_softmax(0)[1])
    assert all(entry.logprob == pytest.approx(expected, abs=1e-6) for (entry,) in listed[1:])


def test_random_numbers_depend_on_seed_and_index_alone_and_stay_below_one() -> None:
    numbers = [uniform(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(1000)]
    assert len(set(numbers)) > 2990  # of 2^24 values: a handful may coincide
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert float(torch.tensor(max(numbers), dtype=torch.float32)) == max(numbers)
    assert uniform(1, 7) == uniform(1, 7)
