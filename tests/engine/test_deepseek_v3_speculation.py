"""Rows of several tokens: the model has no draft head that is served, but verifies drafts that come from elsewhere."""

import functools

import pytest
import torch

from tests.engine.drive import DraftSource, Driver, Growing, lengths, oracle, serve
from tests.engine.tiny_deepseek import BASE, hf_greedy, hf_logits, tiny_checkpoint

COUNT = 10
VOCAB = BASE["vocab_size"]


@functools.cache
def cases() -> tuple[list[list[int]], list[list[int]]]:
    prompts, answers = [], []
    for length in lengths():
        for seed in range(30):
            prompt = [(7 * i * i + 3 * i + 11 * length + seed) % VOCAB for i in range(length)]
            try:
                answers.append(hf_greedy(tiny_checkpoint(), prompt, COUNT + 5))
            except RuntimeError:
                continue
            prompts.append(prompt)
            break
    return prompts, answers


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_drafts_change_nothing(num_drafts: int, buckets: bool) -> None:
    prompts, answers = cases()
    driver = Driver(tiny_checkpoint(), num_drafts=num_drafts, buckets=buckets, page_size=4, seed=num_drafts)

    def source(driver: Driver, texts: list[Growing]) -> DraftSource:
        return oracle(driver, {id(text): answer for text, answer in zip(texts, answers, strict=False)}, 0.7, VOCAB)

    for text, answer in zip(serve(driver, prompts, COUNT, source), answers, strict=True):
        assert text.generated[:COUNT] == answer[:COUNT]
        logits = hf_logits(tiny_checkpoint(), text.tokens[:-1]).log_softmax(-1)[text.prompt - 1 :]
        wanted = torch.tensor([float(row[token]) for row, token in zip(logits, text.generated, strict=True)])
        got = torch.tensor([entry.logprob for entry in text.logprobs])
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=0)
