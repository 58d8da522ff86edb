"""The whole engine with drafts, buckets and a prefix cache in every combination: the oracle's tokens."""

import pytest

from tests.engine.test_llm import LENGTHS, prompts, steady_prompts
from tests.engine.tiny import tiny_checkpoint
from tests.engine.tiny_draft import draft_checkpoint
from tokenspeed_engine import LLM, EngineOptions, SamplingParams
from tokenspeed_engine.models.families import Verify


def options(**changes: object) -> EngineOptions:
    return EngineOptions(page_size=8, max_batch=5, max_step_tokens=16, max_context=128, **changes)  # type: ignore[arg-type]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize(("num_drafts", "verify"), [(0, "replay"), (1, "states"), (3, "replay"), (4, "states")])
def test_greedy_tokens_equal_the_oracles(num_drafts: int, verify: Verify, buckets: bool, prefix_cache: bool) -> None:
    """Twice, so that the second time begins with what the first one left."""
    asked, wanted = steady_prompts(tiny_checkpoint(), 12)
    llm = LLM(
        draft_checkpoint(),
        options(
            num_drafts=num_drafts,
            verify=verify,
            buckets=buckets,
            prefix_cache=prefix_cache,
            state_interval=16,
            num_host_snapshots=4,
            overlap=buckets,
        ),
    )
    for _ in range(2):
        assert [generation.token_ids for generation in llm.generate(asked, greedy(12))] == wanted


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_prompts_and_answers_of_all_short_lengths(num_drafts: int) -> None:
    """Around one token and the drafts after it, also where a request ends before its drafts would."""
    plain, drafting = LLM(draft_checkpoint(), options()), LLM(draft_checkpoint(), options(num_drafts=num_drafts))
    asked = [[(5 * i + length) % 90 + 4 for i in range(length)] for length in range(1, num_drafts + 4)]
    for count in range(1, num_drafts + 4):
        wanted = [generation.token_ids for generation in plain.generate(asked, greedy(count))]
        assert [generation.token_ids for generation in drafting.generate(asked, greedy(count))] == wanted


def test_a_seed_gives_the_same_tokens_with_drafts_and_without() -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=10, ignore_eos=True) for seed in range(5)]
    plain = LLM(draft_checkpoint(), options()).generate(prompts(), params)
    drafting = LLM(draft_checkpoint(), options(num_drafts=3, buckets=True)).generate(prompts(), params)
    assert [one.token_ids for one in plain] == [one.token_ids for one in drafting]
    assert len({one.token_ids for one in plain}) == len(LENGTHS)


def test_host_tables_change_nothing() -> None:
    wanted = [generation.token_ids for generation in LLM(tiny_checkpoint(), options()).generate(prompts(), greedy(8))]
    beside = LLM(tiny_checkpoint(), options(host_tables=True)).generate(prompts(), greedy(8))
    assert [generation.token_ids for generation in beside] == wanted


def test_what_cannot_be_served_is_refused_with_its_arithmetic() -> None:
    for changes, message in (
        ({"num_drafts": 5}, "num_drafts: expected at most 4, got 5"),
        ({"num_drafts": -1}, "num_drafts: expected at least 0, got -1"),
        ({"num_drafts": 2}, "num_drafts: this qwen4_exp has no draft head to guess 2 with"),
        ({"verify": "hope"}, 'verify: expected "replay" or "states", got \'hope\''),
        ({"num_snapshots": -1}, "num_snapshots: expected at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(tiny_checkpoint(), options(**changes))
    with pytest.raises(
        ValueError, match=r"cache_bytes: .*15 slots of \d+ bytes \(5 of requests, 10 of snapshots\) and"
    ):
        LLM(draft_checkpoint(), options(num_drafts=3, verify="states", prefix_cache=True, cache_bytes=1000))
