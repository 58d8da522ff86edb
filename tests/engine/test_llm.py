"""The engine in one object, against the oracle: whole checkpoints in, tokens out."""

import shutil
from pathlib import Path

import pytest

from tests.engine.steady import without_near_ties
from tests.engine.tiny import EOS, hf_greedy, hf_logits, tiny_checkpoint
from tokenspeed_engine import LLM, EngineOptions, SamplingParams
from tokenspeed_engine.checkpoint.errors import CheckpointError, ConfigError
from tokenspeed_engine.control import RequestRefusedError

VARIANTS = (
    "default",
    "multimodal",
    "two_streams",
    "bigrams",
    "several_ngram_layers",
    "no_ngrams",
    "compress_ratio_2",
    "silu_gate",
    "two_index_heads",
)
LENGTHS = (1, 7, 23, 41, 70)
SMALL = EngineOptions(page_size=8, max_batch=5, max_step_tokens=16, max_context=128)


def prompts(seed: int = 0) -> list[list[int]]:
    """Prompts that cross chunks of 16, pages of 8 and the sparse budget, with end-of-sequence tokens inside."""
    return [
        [(7 * i * i + 3 * i + length + seed) % 90 + 4 if i % 11 else EOS for i in range(length)] for length in LENGTHS
    ]


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


def test_preemption_in_a_tiny_pool_changes_nothing() -> None:
    folder = tiny_checkpoint("default")
    tight = EngineOptions(page_size=8, max_batch=5, max_step_tokens=16, max_context=128, num_pages=14)
    wanted = [generation.token_ids for generation in LLM(folder, SMALL).generate(prompts(), greedy(20))]
    assert [generation.token_ids for generation in LLM(folder, tight).generate(prompts(), greedy(20))] == wanted


def test_logprobs_are_the_models() -> None:
    folder = tiny_checkpoint("default")
    prompt = prompts()[2]
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True, logprobs=3)
    (generation,) = LLM(folder, SMALL).generate(prompt, params)
    wanted = hf_logits(folder, [*prompt, *generation.token_ids]).log_softmax(-1)
    for i, entry in enumerate(generation.logprobs):
        row = wanted[len(prompt) - 1 + i]
        values, tokens = row.topk(3)
        assert entry.token == generation.token_ids[i]
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=2e-4)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=2e-4)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch() -> None:
    llm = LLM(tiny_checkpoint("default"), SMALL)
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=10, ignore_eos=True) for seed in range(5)]
    together = [generation.token_ids for generation in llm.generate(prompts(), params)]
    alone = [llm.generate(p, each)[0].token_ids for p, each in zip(prompts(), params, strict=True)]
    assert together == alone
    other = SamplingParams(temperature=1.0, seed=99, max_new_tokens=10, ignore_eos=True)
    assert llm.generate(prompts()[0], other)[0].token_ids != alone[0]


def test_streams_may_interleave_and_be_left_early() -> None:
    llm = LLM(tiny_checkpoint("default"), SMALL)
    first, second = prompts()[1], prompts()[3]
    wanted = [generation.token_ids for generation in llm.generate([first, second], greedy(8))]
    streams = [llm.stream(first, greedy(8)), llm.stream(second, greedy(8))]
    got: list[list[int]] = [[], []]
    for outputs in zip(*streams, strict=True):
        for i, output in enumerate(outputs):
            got[i] += output.token_ids
    assert [tuple(tokens) for tokens in got] == wanted
    abandoned = llm.stream(first, greedy(8))
    next(iter(abandoned))
    del abandoned
    assert llm.generate(second, greedy(8))[0].token_ids == wanted[1]
    assert llm.num_free == (llm.num_pages, llm.num_slots)


def test_requests_that_cannot_be_served_are_refused_before_any_runs() -> None:
    llm = LLM(tiny_checkpoint("default"), SMALL)
    with pytest.raises(RequestRefusedError, match="context"):
        llm.generate([[1, 2], [1] * 200], greedy(2))
    with pytest.raises(RequestRefusedError, match="tokenizer"):
        llm.generate("text", greedy(2))
    with pytest.raises(RequestRefusedError, match="stop"):
        llm.generate([1, 2], SamplingParams(stop=("x",)))
    assert llm.num_free == (llm.num_pages, llm.num_slots)
    assert len(llm.generate([1, 2], greedy(2))[0].token_ids) == 2


def test_folders_that_cannot_be_served_say_why(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("default"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        LLM(folder, SMALL)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="gpt2"):
        LLM(folder, SMALL)
    with pytest.raises(ConfigError, match="config"):
        LLM(tmp_path / "absent", SMALL)


def test_sizes_that_cannot_work_are_refused_with_their_arithmetic() -> None:
    folder = tiny_checkpoint("default")
    with pytest.raises(ValueError, match="cache_bytes"):
        LLM(folder, EngineOptions(cache_bytes=1000))
    with pytest.raises(ValueError, match="max_context"):
        LLM(folder, EngineOptions(max_context=10**9))
    for options in (
        EngineOptions(page_size=0),
        EngineOptions(max_batch=0),
        EngineOptions(max_context=0),
        EngineOptions(num_pages=0),
    ):
        with pytest.raises(ValueError, match="expected at least 1, got 0"):
            LLM(folder, options)
    with pytest.raises(ValueError, match="dtype"):
        LLM(folder, EngineOptions(dtype="int8"))
