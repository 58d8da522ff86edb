"""The executor on a device: graphs, drafts and host tables give what plain steps give, over pools full of NaN."""

import functools
import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.drive import DraftSource, Driver, Growing, oracle, own_drafts, serve
from tokenspeed_engine.control import CopyPage, CopySlot, Fetch, Offload, Settle
from tokenspeed_engine.models.families import Verify, describe_model

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
COUNT = 40
VOCAB = 512
CONFIG = {
    "model_type": "qwen4_exp_text",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "hc_count": 4,
    "hc_lowrank": 32,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 500,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 1,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "eos_token_id": 3,
    "max_position_embeddings": 2048,
    "mtp_num_hidden_layers": 1,
}
_scratch = tempfile.TemporaryDirectory(prefix="tiny-on-device-")


@functools.cache
def checkpoint() -> Path:
    """Random weights that leave no term idle."""
    folder = Path(_scratch.name)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for parameter in describe_model(CONFIG).weight_plan((), draft_head=True).parameters:
        for piece, _ in parameter.layouts[0].pieces:
            tensor = torch.randn(piece.shape, generator=generator)
            if "norm" in piece.name:
                tensor = 0.2 * tensor + (1.0 if "linear_attn.norm" in piece.name else 0.0)
            elif len(piece.shape) > 1 and "embed" not in piece.name and "conv1d" not in piece.name:
                tensor *= (3.0 if "lm_head" in piece.name else 1.5) / math.sqrt(piece.shape[-1])
            tensors[piece.name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def driver(**options: object) -> Driver:
    return Driver(checkpoint(), page_size=16, num_rows=5, num_slots=8, max_length=400, device=CUDA, **options)  # type: ignore[arg-type]


def prompts() -> list[list[int]]:
    return [
        [(7 * i * i + 3 * i + 11 * length) % 500 + 4 for i in range(length)] for length in (1, 3, 5, 33, 90, 200, 17)
    ]


@functools.cache
def plain() -> list[Growing]:
    """One token a step, without graphs."""
    return serve(driver(), prompts(), COUNT, lambda *_: lambda text: ())


def assert_same(texts: list[Growing]) -> None:
    """Token for token up to where float32 sums in another order could decide, and probabilities to 1e-3."""
    shared = 0
    for text, wanted in zip(texts, plain(), strict=True):
        for i, (token, other) in enumerate(zip(text.logprobs, wanted.logprobs, strict=False)):
            assert abs(token.logprob - other.logprob) < 2e-3, (i, token, other)
            if token.token != other.token:
                break
            shared += 1
    assert shared > 0.9 * COUNT * len(texts)


@pytest.mark.parametrize("host_tables", [False, True])
def test_graphs_equal_plain_steps(host_tables: bool) -> None:
    assert_same(
        serve(driver(buckets=True, host_tables=host_tables, seed=1), prompts(), COUNT, lambda *_: lambda text: ())
    )


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("verify", ["replay", "states"])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_of_an_oracle_change_nothing(num_drafts: int, verify: Verify, buckets: bool) -> None:
    def source(driver: Driver, texts: list[Growing]) -> DraftSource:
        answers = {id(text): wanted.generated for text, wanted in zip(texts, plain(), strict=False)}
        return oracle(driver, answers, 0.8, VOCAB)

    assert_same(serve(driver(num_drafts=num_drafts, verify=verify, buckets=buckets), prompts(), COUNT, source))


@pytest.mark.parametrize("host_tables", [False, True])
def test_the_draft_head_in_graphs_and_without(host_tables: bool) -> None:
    """The same guesses, but where they are nearly ties."""
    guesses = []
    for buckets in (False, True):
        one = driver(num_drafts=3, draft_head=True, buckets=buckets, host_tables=host_tables)
        text = one.start(prompts()[4], 200)
        one.step(prefills=[(text, 90)])
        found = [text.drafts]
        while len(text.generated) < COUNT:
            one.step(decodes=[(text, text.drafts[: len(text.generated) % 4])])
            found.append(text.drafts)
        guesses.append((text.generated, found))
    assert guesses[0][0] == guesses[1][0]
    same = [a == b for a, b in zip(guesses[0][1], guesses[1][1], strict=True)]
    assert sum(same) > 0.9 * len(same)
    assert_same_head(own_drafts)


def assert_same_head(source: DraftSource) -> None:
    assert_same(serve(driver(num_drafts=3, draft_head=True, buckets=True, seed=3), prompts(), COUNT, lambda *_: source))


@pytest.mark.parametrize("verify", ["replay", "states"])
def test_a_text_goes_on_from_host_and_from_a_copy(verify: Verify) -> None:
    one = driver(num_drafts=3, verify=verify, buckets=True, num_host=1)
    prompt = prompts()[4]
    text = one.start(prompt, 100)
    one.step(prefills=[(text, 90)])
    for _ in range(4):
        one.step(decodes=[(text, [1, 2, 3])])
    length = text.computed
    copies = []
    for way in ("copied", "by the host"):
        slot = one.free_slots.pop()
        pages = tuple(one.free_pages.pop() for _ in text.pages)
        move = [CopySlot(text.slot, slot)] if way == "copied" else [Offload(text.slot, 0), Fetch(0, slot)]
        moves = [Settle(text.slot, length), *(CopyPage(*pair) for pair in zip(text.pages, pages, strict=True)), *move]
        copies.append(Growing(list(text.tokens), text.prompt, pages, slot, computed=length))
        one.step(transfers=moves)
    for _ in range(6):
        one.step(decodes=[(each, [4, 5]) for each in (text, *copies)])
    assert copies[0].generated == copies[1].generated == text.generated
