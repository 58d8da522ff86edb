"""From logits to results: every row of a step by its own parameters, whatever the rows beside it are."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.engine.forward import CPU
from tokenspeed_engine.control import Accepted, Failed, Row, RowResult, Sample, SamplingParams, StepPlan
from tokenspeed_engine.execution.layout import as_batch, lay_out, shape_of
from tokenspeed_engine.execution.sampling import Download, Outcome
from tokenspeed_engine.execution.upload import upload
from tokenspeed_engine.execution.verify import as_sampling, lay_out_sampling, uniform, verify

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0])


def wanted(params: SamplingParams, seed: int = 0, index: int = 0) -> Sample:
    return Sample(params, seed, index)


GREEDY = wanted(SamplingParams(temperature=0.0, logprobs=1))


def results(
    logits: Tensor, samples: Sequence[Sample], drafts: Sequence[Sequence[int]] | None = None
) -> list[RowResult]:
    """Those of decode rows with drafts. logits: [rows · q_len, vocab], q_len places a row."""
    rows = []
    for i, sample in enumerate(samples):
        tokens = (0, *(drafts[i] if drafts else ()))
        rows.append(Row("", tokens, 0, (0, 1), i, False, (), sample, decode=True))
    plan = StepPlan(tuple(rows), len(rows))
    shape = shape_of(plan)
    arrays = lay_out(plan, shape, None, 8, 0, 0) | lay_out_sampling(plan, shape, logits.shape[1])
    tensors = upload(arrays, CPU)
    verified = verify(logits, as_sampling(tensors), as_batch(plan, shape, tensors))
    return list(Download(plan, Outcome(logits, verified, None)).result().rows)


def accepted(result: RowResult) -> Accepted:
    assert isinstance(result, Accepted)
    return result


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = bad
    first, failed, last = results(logits, [GREEDY] * 3)
    assert isinstance(failed, Failed)
    assert first == last == results(LOGITS[None], [GREEDY])[0]


def test_only_logits_that_a_token_comes_from_must_be_finite() -> None:
    """After a rejected draft they need not be; after an accepted one they must."""
    logits = LOGITS.repeat(6, 1)
    logits[2] = logits[5] = math.nan
    rejected, failed = results(logits, [GREEDY] * 2, [[1, 2], [1, 1]])
    assert accepted(rejected).tokens == (1, 1)
    assert isinstance(failed, Failed)


@pytest.mark.parametrize("top_k", [4, 5, 2**31, 2**70])
def test_a_top_k_of_the_vocabulary_or_more_keeps_all_and_harms_no_other_row(top_k: int) -> None:
    params = SamplingParams(temperature=5.0, top_k=top_k)
    drawn = results(LOGITS.repeat(200, 1), [wanted(params, seed) for seed in range(200)])
    assert {accepted(result).tokens[0] for result in drawn} == {0, 1, 2, 3}
    beside = results(LOGITS.repeat(2, 1), [wanted(SamplingParams(top_k=top_k)), GREEDY])[1]
    assert beside == results(LOGITS[None], [GREEDY])[0]


def test_temperature_zero_beside_a_top_p_of_zero() -> None:
    """Both take the most probable token."""
    samples = [wanted(SamplingParams(temperature=0.0, top_p=0.0)), wanted(SamplingParams(top_p=0.0)), GREEDY]
    assert [accepted(result).tokens for result in results(LOGITS.repeat(3, 1), samples)] == [(1,)] * 3


def test_each_row_lists_as_many_alternatives_as_it_asks_for() -> None:
    samples = [wanted(SamplingParams(temperature=0.0, logprobs=count)) for count in (None, 0, 3, 20)]
    listed = [accepted(result) for result in results(LOGITS.repeat(4, 1), samples)]
    assert all(result.tokens == (1,) for result in listed)
    assert listed[0].logprobs == ()
    entries = [result.logprobs[0] for result in listed[1:]]
    assert [[token for token, _ in entry.top] for entry in entries] == [[], [1, 3, 2], [1, 3, 2, 0]]
    expected = float(LOGITS.log_softmax(0)[1])
    assert all(entry.logprob == pytest.approx(expected, abs=1e-6) for entry in entries)


def test_logprobs_of_drafts_are_the_models() -> None:
    """At each token its own, whatever the temperature."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 1.0, 5.0, 2.0], [9.0, 1.0, 5.0, 2.0]])
    params = SamplingParams(temperature=0.5, top_k=1, logprobs=1)
    result = accepted(results(logits, [wanted(params)], [[1, 3]])[0])
    assert result.tokens == (1, 2)
    for row, (entry, token) in enumerate(zip(result.logprobs, result.tokens, strict=True)):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(logits[row].log_softmax(0)[token]), abs=1e-6)
        assert entry.top == ((token, entry.logprob),)


@pytest.mark.parametrize("draft", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.7, top_k=3), SamplingParams(temperature=2.0, top_p=0.8)]
)
def test_tokens_are_distributed_as_the_target_whatever_is_drafted(params: SamplingParams, draft: int) -> None:
    """The first token as p of the first logits, and where the draft was accepted, the second as p of the second."""
    trials = 20_000
    logits = torch.stack([LOGITS, LOGITS.flip(0)]).repeat(trials, 1)
    drawn = [
        accepted(result).tokens
        for result in results(logits, [wanted(params, seed) for seed in range(trials)], [[draft]] * trials)
    ]
    target = processed(LOGITS, params)
    assert_distributed([tokens[0] for tokens in drawn], target)
    assert all((len(tokens) == 2) == (tokens[0] == draft) for tokens in drawn)
    if target[draft] > 0.05:
        assert_distributed([tokens[1] for tokens in drawn if len(tokens) == 2], target.flip(0))


def processed(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities after temperature, top-k and top-p, in plain torch."""
    p = (logits / params.temperature).softmax(0)
    order = p.argsort(descending=True)
    if params.top_k:
        p[order[params.top_k :]] = 0
        p = p / p.sum()
    before = p[order].cumsum(0) - p[order]
    p[order[before >= params.top_p]] = 0
    return p / p.sum()


def assert_distributed(tokens: Sequence[int], target: Tensor) -> None:
    """Every frequency within five standard deviations."""
    counts = Counter(tokens)
    for token, p in enumerate(target.tolist()):
        assert abs(counts[token] - p * len(tokens)) <= 5 * math.sqrt(len(tokens) * p * (1 - p)) + 1e-9


def test_a_token_depends_on_its_own_random_number_alone() -> None:
    """The second token of a row is what the first of a later step would be."""
    params = SamplingParams(temperature=3.0)
    for seed in range(50):
        first = accepted(results(LOGITS[None], [wanted(params, seed, 5)])[0]).tokens
        second = accepted(results(LOGITS[None], [wanted(params, seed, 6)])[0]).tokens
        both = accepted(results(LOGITS.repeat(2, 1), [wanted(params, seed, 5)], [first])[0]).tokens
        assert both == first + second


def test_random_numbers_depend_on_seed_and_index_alone_and_stay_below_one() -> None:
    numbers = [uniform(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(1000)]
    assert len(set(numbers)) > 2990  # of 2^24 values: a handful may coincide
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert float(torch.tensor(max(numbers), dtype=torch.float32)) == max(numbers)
    assert uniform(1, 7) == uniform(1, 7)
