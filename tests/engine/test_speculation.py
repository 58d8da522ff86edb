"""Drafts change nothing but how many tokens a step yields: against transformers, at every number of them accepted."""

import functools
from collections.abc import Callable

import pytest
import torch

from tests.engine.drive import DraftSource, Driver, Growing, lengths, oracle, own_drafts, serve
from tests.engine.tiny import BASE, EOS, hf_greedy, hf_logits, tiny_checkpoint
from tests.engine.tiny_draft import draft_checkpoint, hf_drafts
from tokenspeed_engine.models.families import Verify

COUNT = 12
VOCAB = BASE["vocab_size"]


def prompt_of(length: int, seed: int) -> list[int]:
    return [(7 * i * i + 3 * i + 11 * length + seed) % 90 + 4 if i % 11 != 9 else EOS for i in range(length)]


@functools.cache
def cases(variant: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts whose greedy continuations have no near-tie, with these."""
    prompts, answers = [], []
    for length in lengths():
        for seed in range(30):
            try:
                answers.append(hf_greedy(tiny_checkpoint(variant), prompt_of(length, seed), COUNT + 5))
            except RuntimeError:
                continue
            prompts.append(prompt_of(length, seed))
            break
    return prompts, answers


def oracles(answers: list[list[int]], right: float) -> Callable[[Driver, list[Growing]], DraftSource]:
    def source(driver: Driver, texts: list[Growing]) -> DraftSource:
        return oracle(driver, {id(text): answer for text, answer in zip(texts, answers, strict=False)}, right, VOCAB)

    return source


def assert_as_transformers(variant: str, texts: list[Growing], answers: list[list[int]]) -> None:
    for text, answer in zip(texts, answers, strict=True):
        assert text.generated[:COUNT] == answer[:COUNT]
        assert_probabilities(variant, text)


def assert_probabilities(variant: str, text: Growing) -> None:
    """Those of all generated tokens are as of one uncached pass."""
    logits = hf_logits(tiny_checkpoint(variant), text.tokens[:-1]).log_softmax(-1)[text.prompt - 1 :]
    wanted = torch.tensor([float(row[token]) for row, token in zip(logits, text.generated, strict=True)])
    got = torch.tensor([entry.logprob for entry in text.logprobs])
    assert [entry.token for entry in text.logprobs] == text.generated
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("verify", ["replay", "states"])
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 4])
def test_drafts_of_an_oracle_change_nothing(num_drafts: int, verify: Verify, buckets: bool) -> None:
    prompts, answers = cases("default")
    driver = Driver(tiny_checkpoint(), num_drafts=num_drafts, verify=verify, buckets=buckets, seed=num_drafts)
    texts = serve(driver, prompts, COUNT, oracles(answers, 0.7))
    assert_as_transformers("default", texts, answers)


@pytest.mark.parametrize("verify", ["replay", "states"])
@pytest.mark.parametrize("variant", ["several_ngram_layers", "compress_ratio_2", "no_ngrams"])
def test_of_other_models_too(variant: str, verify: Verify) -> None:
    prompts, answers = cases(variant)
    driver = Driver(tiny_checkpoint(variant), num_drafts=4, verify=verify, page_size=4, seed=5)
    assert_as_transformers(variant, serve(driver, prompts, COUNT, oracles(answers, 0.7)), answers)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_all_drafts_wrong_and_all_right(right: float) -> None:
    prompts, answers = cases("default")
    driver = Driver(tiny_checkpoint(), num_drafts=4, seed=3)
    assert_as_transformers("default", serve(driver, prompts, COUNT, oracles(answers, right)), answers)


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_the_draft_head_changes_nothing(num_drafts: int, buckets: bool) -> None:
    prompts, answers = cases("default")
    driver = Driver(draft_checkpoint(), num_drafts=num_drafts, buckets=buckets, draft_head=True, seed=1)
    texts = serve(driver, prompts, COUNT, lambda *_: own_drafts)
    assert_as_transformers("default", texts, answers)
    assert all(len(text.drafts) == num_drafts for text in texts)


@pytest.mark.parametrize(("num_drafts", "page_size", "buckets"), [(4, 8, False), (3, 4, True), (1, 16, True)])
def test_guesses_of_the_draft_head(num_drafts: int, page_size: int, buckets: bool) -> None:
    """After chunks of a prompt, and after drafts of which some were accepted, as of the whole text at once."""
    prompts, answers = cases("default")
    driver = Driver(
        draft_checkpoint(), num_drafts=num_drafts, page_size=page_size, buckets=buckets, draft_head=True, seed=2
    )
    compared = 0
    for prompt, answer in list(zip(prompts, answers, strict=True))[-6:]:
        text = driver.start(prompt, len(answer))
        while not text.decodes:
            driver.step(prefills=[(text, min(7, text.prompt - text.computed))])
            if text.decodes:
                compared += assert_guessed(text, num_drafts)
        drafts = oracle(driver, {id(text): answer}, 0.6, VOCAB)
        while len(text.generated) < COUNT:
            driver.step(decodes=[(text, drafts(text))])
            compared += assert_guessed(text, num_drafts)
        driver.finish(text)
    assert compared > 20


@pytest.mark.parametrize("draft_head", [False, True])
@pytest.mark.parametrize("num_drafts", [3, 4])
def test_raw_index_keys_of_an_open_block_survive_drafts(num_drafts: int, draft_head: bool) -> None:
    """Over many rejections in a long text, where a wrong block key soon changes what is attended to."""
    prompt = prompt_of(40, 1)
    (plain,) = serve(Driver(tiny_checkpoint()), [prompt], 80, lambda *_: lambda text: ())
    folder = draft_checkpoint() if draft_head else tiny_checkpoint()
    driver = Driver(folder, num_drafts=num_drafts, draft_head=draft_head, seed=11)
    text = driver.start(prompt, 90)
    driver.step(prefills=[(text, 40)])
    drafts = oracle(driver, {id(text): plain.generated}, 0.5, VOCAB)
    while len(text.generated) < 80:
        driver.step(decodes=[(text, drafts(text))])
        if draft_head:
            assert_guessed(text, num_drafts)
    assert_probabilities("default", text)


def assert_guessed(text: Growing, num_drafts: int) -> int:
    """Compares guess after guess, up to the first that is nearly a tie; returns how many were compared."""
    for i, logits in enumerate(hf_drafts("default", text.tokens, num_drafts)):
        best, second = logits.topk(2).values.tolist()
        if best - second < 1e-3:
            return i
        assert text.drafts[i] == int(logits.argmax()), f"guess {i} after {len(text.tokens)} tokens"
    return num_drafts
