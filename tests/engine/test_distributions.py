"""Sampled tokens follow the model's own probabilities, however they were drafted."""

import functools
import math
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from torch import Tensor

from tests.engine.test_sampling_rows import processed
from tests.engine.tiny import hf_logits
from tests.engine.whole import Guess, Whole, document
from tokenspeed_engine import EngineOptions, SamplingParams
from tokenspeed_engine.llm import EMBEDDED_MODEL

PROMPT = document(2, 17)
OPTIONS = EngineOptions(
    page_size=16, max_batch=32, max_step_tokens=128, max_context=64, prefix_cache=True, state_interval=16
)
TOKENS = 4
PARAMS = {
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=1.6, top_k=4),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "all": SamplingParams(temperature=1.5, top_k=3, top_p=0.9),
}
LEAST = 5
"""Expected answers of a class, so that Pearson's statistic is distributed as chi-square."""
QUANTILE = 3.72
"""Of the normal distribution, at one in ten thousand."""


def often_wrong(params: SamplingParams) -> Guess:
    """In each place one of three tokens that may well come there, if the most probable ones came before."""
    path: tuple[int, ...] = ()
    possible = []
    for _ in range(TOKENS):
        best = law(path, params).topk(3).indices.tolist()
        possible.append(best)
        path += (best[0],)
    return lambda name, generated: [
        each[(int(name[1:]) + place) % 3] for place, each in enumerate(possible) if place >= generated
    ]


@functools.cache
def law(known: tuple[int, ...], params: SamplingParams) -> Tensor:
    """The probabilities [vocab] of the token after the prompt and what is known of the answer."""
    return processed(hf_logits(EMBEDDED_MODEL, [*PROMPT, *known])[-1], params)


def draw(count: int, params: SamplingParams, num_drafts: int, guess: Guess | None = None) -> Whole:
    """An engine that has answered the prompt with `count` seeds."""
    whole = Whole(replace(OPTIONS, num_drafts=num_drafts), guess=guess)
    whole.ask(PROMPT, count=1)
    for seed in range(count):
        whole.add(PROMPT, replace(params, seed=seed, max_new_tokens=TOKENS, ignore_eos=True, logprobs=0))
    whole.finish()
    return whole


@pytest.mark.parametrize("name", ["temperature", "all"])
def test_a_token_is_distributed_as_the_model_says_whatever_was_drafted(name: str) -> None:
    """And is the same one, since it depends on its own random number alone."""
    check(150, PARAMS[name])


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_many_tokens_are_distributed_as_the_model_says(params: SamplingParams) -> None:
    check(1000, params)


def check(count: int, params: SamplingParams) -> None:
    plain = draw(count, params, 0)
    assert_distributed(plain, params)
    for guess in (None, often_wrong(params)):
        drafting = draw(count, params, 3, guess)
        assert_distributed(drafting, params)
        counters = drafting.core.counters
        assert 0.05 < counters.drafts_accepted / counters.drafts_proposed < 0.95
        for name in plain.asked:
            assert drafting.tokens(name) == plain.tokens(name)
            assert drafting.logprobs(name) == pytest.approx(plain.logprobs(name), abs=2e-4)


def assert_distributed(whole: Whole, params: SamplingParams) -> None:
    """A chi-square test of each of three tokens, given those before it."""
    answers = [tuple(whole.tokens(name)) for name in list(whole.asked)[1:]]
    for place in range(3):
        followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for answer in answers:
            followers[answer[:place]][answer[place]] += 1
        found = [deviation(seen, law(known, params)) for known, seen in followers.items() if seen.total() >= 2 * LEAST]
        freedom = sum(classes - 1 for _, classes in found)
        assert freedom > 0
        assert sum(statistic for statistic, _ in found) < most(freedom), f"token {place}"


def deviation(seen: Counter[int], law: Tensor) -> tuple[float, int]:
    """Pearson's statistic, and of how many classes: each usual token is one, and all others are."""
    assert all(law[token] > 0 for token in seen)
    wanted = law * seen.total()
    classes = [(float(wanted[token]), seen[token]) for token in (wanted >= LEAST).nonzero().flatten().tolist()]
    rest = seen.total() - sum(w for w, _ in classes), seen.total() - sum(n for _, n in classes)
    if rest[0] < LEAST and classes:
        last = classes.pop()
        rest = rest[0] + last[0], rest[1] + last[1]
    classes.append(rest)
    return sum((n - w) ** 2 / w for w, n in classes), len(classes)


def most(freedom: int) -> float:
    """The quantile of the chi-square distribution, by Wilson and Hilferty."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + QUANTILE * math.sqrt(part)) ** 3
