"""Whole checkpoints in, tokens out, against the oracle: alone, in batches, and short of pages."""

from pathlib import Path

import pytest

from tests.engine.steady import without_near_ties
from tests.engine.tiny_deepseek import VARIANTS, hf_greedy, hf_logits, tiny_checkpoint
from tokenspeed_engine import LLM, EngineOptions, SamplingParams

LENGTHS = (1, 7, 23, 41, 70)
SMALL = EngineOptions(page_size=8, max_batch=5, max_step_tokens=16, max_context=128)


def prompts(seed: int = 0) -> list[list[int]]:
    """Prompts that cross chunks of 16 and pages of 8."""
    return [[(7 * i * i + 3 * i + length + seed) % 97 for i in range(length)] for length in LENGTHS]


def steady_prompts(folder: Path, count: int) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    return without_near_ties(prompts, lambda prompt, length: hf_greedy(folder, prompt, length), count)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_the_oracles_alone_and_in_a_batch(variant: str) -> None:
    folder = tiny_checkpoint(variant)
    llm = LLM(folder, SMALL)
    asked, wanted = steady_prompts(folder, 12)
    together = [generation.token_ids for generation in llm.generate(asked, greedy(12))]
    alone = [llm.generate(prompt, greedy(12))[0].token_ids for prompt in asked]
    assert together == wanted
    assert alone == wanted
    assert llm.num_free == (llm.num_pages, llm.num_slots)


def test_preemption_in_a_tiny_pool_changes_nothing() -> None:
    folder = tiny_checkpoint()
    tight = EngineOptions(page_size=8, max_batch=5, max_step_tokens=16, max_context=128, num_pages=14)
    asked, wanted = steady_prompts(folder, 20)
    assert [generation.token_ids for generation in LLM(folder, tight).generate(asked, greedy(20))] == wanted


def test_logprobs_are_the_models() -> None:
    folder = tiny_checkpoint()
    prompt = prompts()[2]
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True, logprobs=3)
    (generation,) = LLM(folder, SMALL).generate(prompt, params)
    wanted = hf_logits(folder, [*prompt, *generation.token_ids]).log_softmax(-1)
    for i, entry in enumerate(generation.logprobs):
        row = wanted[len(prompt) - 1 + i]
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=2e-4)
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()
