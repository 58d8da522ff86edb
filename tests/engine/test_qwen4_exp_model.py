"""The model answers as transformers does, however its tokens are cut into steps and wherever its caches lie."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.forward import Harness, Text, weights_of, with_padding
from tests.engine.tiny import BASE, EOS, VARIANTS, hf_logits, tiny_checkpoint
from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.models.families import describe_model, read_model
from tokenspeed_engine.models.qwen4_exp.caches import Caches
from tokenspeed_registry import trace


def make_ids(length: int, seed: int = 1) -> list[int]:
    """Ids with EOS alone, twice in a row, and three tokens apart, where the text is long enough."""
    ids = [(7 * index * index + (3 + seed) * index + 5 * seed) % BASE["vocab_size"] for index in range(length)]
    for position in (20, 41, 42, 61, 64):
        if position < length:
            ids[position] = EOS
    return ids


IDS = make_ids(90)
BUDGET = BASE["indexer_budget"]


def assert_close(text: Text, expected: Tensor) -> None:
    """Every position within 2e-4; NaN is not."""
    assert text.done == len(text.ids)
    error = (torch.stack(text.logits) - expected).abs().amax(-1)
    assert (error < 2e-4).all(), f"worst {error.max():.1e} at position {int(error.argmax())}"


def run_in_chunks(harness: Harness, text: Text, counts: Sequence[int]) -> None:
    for count in counts:
        harness.run(prefills=[(text, count)])


def edges(*positions: int) -> list[int]:
    """Chunk lengths that end at these positions, then at the end of IDS."""
    bounds = [0, *positions, len(IDS)]
    return [end - start for start, end in itertools.pairwise(bounds)]


CHUNKS = {
    "whole": [90],
    "sevens": [*[7] * 12, 6],
    "first token alone": [1, 89],
    "two tokens, then one by one": [2, 1, 1, 1, 85],
    "around a page": edges(7, 9, 16, 17, 23, 24, 33),
    "around a block": edges(3, 4, 8, 11, 13, 16, 30, 33),
    "around the budget": edges(BUDGET - 1, BUDGET, BUDGET + 1, BUDGET + 2, BUDGET + 3, BUDGET + 4, BUDGET + 5),
    "around EOS": edges(20, 21, 41, 42, 43, 62, 64, 65, 66),
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
    """From before the budget's end to beyond it, over EOS and across pages."""
    folder = tiny_checkpoint(variant)
    harness = Harness.of_checkpoint(folder)
    text = harness.start(IDS[:50])
    harness.run(prefills=[(text, 10)])
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


@pytest.mark.parametrize(
    ("variant", "page_size", "seed"),
    [*((variant, 8, 0) for variant in VARIANTS), ("default", 4, 1), ("default", 16, 2), ("compress_ratio_2", 6, 3)],
)
def test_many_texts_at_once(variant: str, page_size: int, seed: int) -> None:
    """Decodes and chunks side by side; later texts take over pages and slots as earlier ones leave them."""
    folder = tiny_checkpoint(variant)
    harness = Harness.of_checkpoint(folder, page_size=page_size, seed=seed)
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


def test_only_own_pages_and_slots_are_touched() -> None:
    harness = Harness.of_checkpoint(tiny_checkpoint())
    text = harness.start(IDS[:30])
    run_in_chunks(harness, text, [11, 13])
    while text.left:
        harness.run(decodes=[text])
    caches: Caches = harness.caches
    paged = [tensor for cache in caches.attention.values() for tensor in (cache.k, cache.v)]
    slotted = [tensor for cache in caches.delta.values() for tensor in (cache.state, cache.conv)]
    slotted += caches.ngram.values()
    for cache in caches.attention.values():
        assert cache.index is not None
        paged.append(cache.index.block_keys)
        slotted.append(cache.index.ring)
    assert len(paged) + len(slotted) == sum(len(pool) for pool in caches.tensors()) == 15
    for tensor, own in [
        *((tensor, set(text.pages)) for tensor in paged),
        *((tensor, {text.slot}) for tensor in slotted),
    ]:
        written = {row for row in range(len(tensor)) if not tensor[row].isnan().all()}
        assert written == own
    assert all(not tensor[text.slot].isnan().any() for tensor in slotted)


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
    wider = with_padding(batch, EOS)
    before = [pool.clone() for pool in harness.caches.tensors()]
    with torch.inference_mode():
        logits = harness.model.forward(wider, harness.caches).logits
    assert (logits - hf_logits(folder, IDS[:40])[-1:]).abs().max() < 2e-4
    for old, new in zip(before, harness.caches.tensors(), strict=True):
        old, new = old.nan_to_num(7), new.nan_to_num(7)
        changed = {row for row in range(old.shape[1]) if not torch.equal(old[:, row], new[:, row])}
        assert changed <= {text.slot, *text.pages}


def copy_with_config(folder: Path, target: Path, changes: dict[str, object]) -> Path:
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(fields))
    return target


def test_without_an_indexer_attention_is_dense(tmp_path: Path) -> None:
    """As dense as with a budget that no text exceeds."""
    folder = tiny_checkpoint()
    generous = copy_with_config(folder, tmp_path, {"indexer_budget": 512})
    fields = json.loads((folder / "config.json").read_text())
    dense = describe_model({name: value for name, value in fields.items() if not name.startswith("indexer_")})
    harness = Harness(dense, dense.build(weights_of(folder)))
    text = harness.start(IDS)
    with trace() as calls:
        run_in_chunks(harness, text, [50, 30])
        while text.left:
            harness.run(decodes=[text])
    assert_close(text, hf_logits(generous, IDS))
    assert (hf_logits(generous, IDS) - hf_logits(folder, IDS)).abs().max() > 1e-2
    assert {call.op for call in calls}.isdisjoint({"index_cache_write", "select_blocks", "sparse_attention"})


def test_tied_embeddings() -> None:
    folder = tiny_checkpoint()
    fields = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    loaded = weights_of(folder)
    copied = Weights({**loaded.tensors, "lm_head": loaded["embed_tokens"]}, loaded.layouts)
    untied = {name: tensor for name, tensor in loaded.tensors.items() if name != "lm_head"}
    logits = []
    for description, weights in (
        (describe_model(fields), Weights(untied, loaded.layouts)),
        (read_model(folder), copied),
    ):
        harness = Harness(description, description.build(weights))
        text = harness.start(IDS)
        harness.run(prefills=[(text, 90)])
        logits.append(torch.stack(text.logits))
    assert torch.equal(*logits)


def test_bfloat16_is_close_to_float32() -> None:
    """The same weights, those of a checkpoint in bfloat16. Routing and selection may flip where they are near a tie."""
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
