"""The model answers as transformers does, however its tokens are cut into steps and wherever its caches lie."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.engine.forward import Harness, Text, weights_of, with_padding
from tests.engine.tiny_deepseek import BASE, VARIANTS, hf_logits, tiny_checkpoint
from tokenspeed_engine.models.deepseek_v3.model import DeepseekV3Model
from tokenspeed_engine.models.families import read_model


def make_ids(length: int, seed: int = 1) -> list[int]:
    return [(7 * index * index + (3 + seed) * index + 5 * seed) % BASE["vocab_size"] for index in range(length)]


IDS = make_ids(90)


def assert_close(text: Text, expected: Tensor) -> None:
    """Every position within 2e-4; NaN is not."""
    assert text.done == len(text.ids)
    error = (torch.stack(text.logits) - expected).abs().amax(-1)
    assert (error < 2e-4).all(), f"worst {error.max():.1e} at position {int(error.argmax())}"


def run_in_chunks(harness: Harness, text: Text, counts: Sequence[int]) -> None:
    for count in counts:
        harness.run(prefills=[(text, count)])


def model_of(harness: Harness) -> DeepseekV3Model:
    assert isinstance(harness.model, DeepseekV3Model)
    return harness.model


CHUNKS = {
    "whole": [90],
    "of 7": [7] * 12 + [6],
    "at page edges": [8, 7, 1, 17, 31, 24, 2],
    "single tokens, then long": [1, 1, 1, 1, 60, 1, 25],
}


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompt_in_chunks(variant: str, chunks: str) -> None:
    folder = tiny_checkpoint(variant)
    harness = Harness.of_checkpoint(folder)
    text = harness.start(IDS)
    run_in_chunks(harness, text, CHUNKS[chunks])
    assert_close(text, hf_logits(folder, IDS))


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_after_a_prompt(variant: str) -> None:
    """Absorbed attention over rows that expanded prefills wrote, across pages."""
    folder = tiny_checkpoint(variant)
    harness = Harness.of_checkpoint(folder)
    text = harness.start(IDS[:50])
    run_in_chunks(harness, text, [6, 13])
    while text.left:
        harness.run(decodes=[text])
    assert_close(text, hf_logits(folder, IDS[:50]))


def test_decode_from_the_first_token_on() -> None:
    folder = tiny_checkpoint()
    harness = Harness.of_checkpoint(folder)
    text = harness.start(IDS)
    harness.run(prefills=[(text, 1)])
    while text.left:
        harness.run(decodes=[text])
    assert_close(text, hf_logits(folder, IDS))


@pytest.mark.parametrize("variant", ["default", "two_mscales", "one_beta", "no_mscale"])
def test_far_beyond_the_original_context(variant: str) -> None:
    """Positions up to 330, of an original context of 64; the prefix in parts of 50 rows."""
    folder = tiny_checkpoint(variant)
    harness = Harness.of_checkpoint(folder)
    model_of(harness).prefix_rows = 50
    ids = make_ids(330)
    text = harness.start(ids)
    run_in_chunks(harness, text, [128, 128, 70])
    while text.left:
        harness.run(decodes=[text])
    assert_close(text, hf_logits(folder, ids))


@pytest.mark.parametrize("prefix_rows", [1, 7, 16, 40])
def test_prefixes_in_parts(prefix_rows: int) -> None:
    """Prefixes of several lengths beside a fresh prompt; parts end inside pages, and some rows have none of a part."""
    folder = tiny_checkpoint()
    harness = Harness.of_checkpoint(folder)
    model_of(harness).prefix_rows = prefix_rows
    texts = [harness.start(make_ids(length, seed=length)) for length in (60, 31, 12, 9)]
    harness.run(prefills=[(texts[0], 41), (texts[1], 5), (texts[2], 11)])
    harness.run(decodes=[texts[2]], prefills=[(texts[0], 10), (texts[3], 9), (texts[1], 19)])
    harness.run(prefills=[(texts[0], 9), (texts[1], 7)])
    for text in texts:
        assert_close(text, hf_logits(folder, text.ids))


@pytest.mark.parametrize(
    ("variant", "page_size", "seed"),
    [*((variant, 8, 0) for variant in ("default", "bare", "two_mscales")), ("default", 1, 1), ("no_q_lora", 5, 2)],
)
def test_many_texts_at_once(variant: str, page_size: int, seed: int) -> None:
    """Decodes and chunks side by side; later texts take over pages as earlier ones leave them."""
    folder = tiny_checkpoint(variant)
    harness = Harness.of_checkpoint(folder, page_size=page_size, seed=seed)
    model_of(harness).prefix_rows = 20
    chance = harness.random
    waiting = [make_ids(length, seed=length) for length in (37, 1, 70, 16, 5, 54, 23, 2)]
    prompts = {len(ids): chance.randint(max(1, len(ids) - 20), len(ids)) for ids in waiting}
    running: list[Text] = []
    finished: list[Text] = []
    while waiting or running:
        while waiting and harness.free_slots:
            running.append(harness.start(waiting.pop(0)))
        awake = [text for text in running if chance.random() < 0.8] or running
        decodes = [text for text in awake if text.done >= prompts[len(text.ids)]]
        prefills = [
            (text, min(chance.randint(1, 17), prompts[len(text.ids)] - text.done))
            for text in awake
            if text not in decodes
        ]
        harness.run(decodes, prefills)
        for text in [text for text in running if not text.left]:
            running.remove(text)
            finished.append(text)
            harness.finish(text)
    assert len(finished) == 8
    for text in finished:
        assert_close(text, hf_logits(folder, text.ids))


def test_only_own_pages_are_touched() -> None:
    harness = Harness.of_checkpoint(tiny_checkpoint())
    text = harness.start(IDS[:30])
    run_in_chunks(harness, text, [11, 13])
    while text.left:
        harness.run(decodes=[text])
    (latents,) = harness.caches.tensors()
    assert len(latents) == BASE["num_hidden_layers"]
    for pool in latents:
        rows = pool[list(text.pages)].flatten(0, 1)
        assert rows[:30].isfinite().all()
        assert rows[30:].isnan().all()
        others = [page for page in range(len(pool)) if page not in text.pages]
        assert pool[others].isnan().all()


def test_logits_of_sampled_tokens_only() -> None:
    folder = tiny_checkpoint()
    harness = Harness.of_checkpoint(folder)
    text, other = harness.start(IDS[:40]), harness.start(IDS[5:25])
    expected = hf_logits(folder, IDS[:40])
    with torch.inference_mode():
        first = dataclasses.replace(harness.batch([], [(text, 25)]), sampled=torch.empty(0, dtype=torch.int64))
        assert harness.model.forward(first, harness.caches).logits.shape == (0, BASE["vocab_size"])
        text.done = 25
        second = dataclasses.replace(harness.batch([text], [(other, 20)]), sampled=torch.tensor([20, 0]))
        logits = harness.model.forward(second, harness.caches).logits
    torch.testing.assert_close(logits, torch.stack([hf_logits(folder, IDS[5:25])[-1], expected[25]]), atol=2e-4, rtol=0)


def test_padding_rows_change_nothing() -> None:
    """Decode rows without a sequence, as a graph captured for a larger batch needs them."""
    folder = tiny_checkpoint()
    harness = Harness.of_checkpoint(folder)
    text = harness.start(IDS[:40])
    harness.run(prefills=[(text, 39)])
    batch = harness.batch([text], [])
    wider = with_padding(batch)
    before = [pool.clone() for pool in harness.caches.tensors()]
    with torch.inference_mode():
        logits = harness.model.forward(wider, harness.caches).logits
    assert (logits - hf_logits(folder, IDS[:40])[-1:]).abs().max() < 2e-4
    for old, new in zip(before, harness.caches.tensors(), strict=True):
        old, new = old.nan_to_num(7), new.nan_to_num(7)
        changed = {row for row in range(old.shape[1]) if not torch.equal(old[:, row], new[:, row])}
        assert changed <= set(text.pages)


def test_bfloat16_is_close_to_float32() -> None:
    """The same weights, those of a checkpoint in bfloat16. Routing may flip where it is near a tie."""
    folder = tiny_checkpoint("default", torch.bfloat16)
    description = read_model(folder)
    harness = Harness(description, description.build(weights_of(folder, torch.bfloat16)), torch.bfloat16)
    text = harness.start(IDS)
    run_in_chunks(harness, text, [40, 37])
    while text.left:
        harness.run(decodes=[text])
    logits, expected = torch.stack(text.logits), hf_logits(folder, IDS)
    assert logits.isfinite().all()
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.85
    assert (logits - expected).abs().median() < 0.05 * expected.std()
