"""However many ranks share a model, it generates what transformers does, and every rank knows every token."""

import dataclasses

import pytest

from tests.engine import test_deepseek_v3_llm, tiny_deepseek
from tests.engine.parallel.threads import ThreadedRanks, tokens_of
from tests.engine.quantised import Format, quantised_twins
from tests.engine.test_llm import SMALL, greedy, prompts, steady_prompts
from tests.engine.tiny import tiny_checkpoint
from tests.engine.tiny_draft import draft_checkpoint
from tokenspeed_engine import LLM, EngineOptions, SamplingParams
from tokenspeed_engine.models.families import Verify

COUNT = 12
ALL = dataclasses.replace(SMALL, num_drafts=3, prefix_cache=True, state_interval=16, num_host_snapshots=4)


def with_ranks(size: int, options: EngineOptions = SMALL, **changes: object) -> EngineOptions:
    return dataclasses.replace(options, ranks=size, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "variant"), [(2, "multimodal"), (2, "two_index_heads"), (4, "several_ngram_layers")])
def test_of_qwen4_exp(size: int, variant: str) -> None:
    """With four ranks there are fewer heads of keys than ranks, and two hold each."""
    folder = tiny_checkpoint(variant)
    asked, wanted = (part[::2] for part in steady_prompts(folder, COUNT))
    found = ThreadedRanks(folder, with_ranks(size)).generate(asked, greedy(COUNT))
    assert [tokens_of(outputs) for outputs in found] == wanted


@pytest.mark.parametrize(("size", "variant"), [(2, "default"), (4, "default"), (2, "all_dense"), (4, "tied")])
def test_of_deepseek_v3(size: int, variant: str) -> None:
    folder = tiny_deepseek.tiny_checkpoint(variant)
    asked, wanted = test_deepseek_v3_llm.steady_prompts(folder, COUNT)
    found = ThreadedRanks(folder, with_ranks(size)).generate(asked, greedy(COUNT))
    assert [tokens_of(outputs) for outputs in found] == wanted


@pytest.mark.parametrize(("size", "verify", "buckets"), [(2, "replay", True), (4, "states", False)])
def test_with_drafts_and_a_prefix_cache(size: int, verify: Verify, buckets: bool) -> None:
    """Two turns of each prompt: the second finds what the first computed, and its own drafts go on from there."""
    asked, wanted = (part[1::2] for part in steady_prompts(tiny_checkpoint(), COUNT + 8))
    options = with_ranks(size, ALL, verify=verify, buckets=buckets)
    ranks = ThreadedRanks(draft_checkpoint(), options)
    first = [tokens_of(outputs)[:COUNT] for outputs in ranks.generate(asked, greedy(COUNT))]
    assert first == [answer[:COUNT] for answer in wanted]
    longer = [[*prompt, *answer] for prompt, answer in zip(asked, first, strict=True)]
    second = ranks.generate(longer, greedy(8))
    assert [tokens_of(outputs) for outputs in second] == [answer[COUNT:] for answer in wanted]
    counters = ranks.core.counters
    assert counters.cached_tokens_device + counters.cached_tokens_host > sum(map(len, asked)) / 2
    assert counters.drafts_accepted > 0


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_of_quantised_experts(format: Format) -> None:
    folder, _ = quantised_twins(format)
    wanted = [generation.token_ids for generation in LLM(folder, SMALL).generate(prompts(), greedy(COUNT))]
    found = ThreadedRanks(folder, with_ranks(2)).generate(prompts(), greedy(COUNT))
    assert [tokens_of(outputs) for outputs in found] == wanted


def test_sampling_takes_the_same_tokens() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=5, max_new_tokens=COUNT, ignore_eos=True)
    wanted = [generation.token_ids for generation in LLM(tiny_checkpoint(), SMALL).generate(prompts(), params)]
    found = ThreadedRanks(tiny_checkpoint(), with_ranks(2)).generate(prompts(), params)
    assert [tokens_of(outputs) for outputs in found] == wanted
