"""Caches have the sizes of the model's description, and what is announced is what gets allocated."""

import pytest
import torch

from tests.engine.forward import CPU
from tests.engine.tiny import VARIANTS, tiny_checkpoint
from tokenspeed_engine.models.families import CacheSizes, Verify, describe_model, read_model

RELEASED = {
    "model_type": "qwen4_exp_text",
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
    "rope_parameters": {"rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    "ple_layer_ids": [2],
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "eos_token_id": 248044,
}


def sizes_of(page_size: int, num_drafts: int = 0, verify: Verify = "replay", draft_head: bool = False) -> CacheSizes:
    return CacheSizes(page_size, 5, 3, 2, num_drafts, verify, draft_head)


def test_bytes_of_the_released_model() -> None:
    each = describe_model(RELEASED).cache_bytes(sizes_of(64), torch.bfloat16)
    keys_and_values = 24_576  # a token, over 12 layers
    block_keys = 768  # a token
    assert each.per_page == 64 * (keys_and_values + block_keys)
    recurrent = 36 * 48 * 128 * 128 * 4
    convolutions = 36 * 10_240 * 3 * 2
    ngram_convolution = 10_240 * 9 * 2
    raw_index_keys = 12 * 4 * 128 * 2
    assert recurrent == 108 << 20
    assert each.per_slot == each.per_snapshot == recurrent + convolutions + ngram_convolution + raw_index_keys
    assert each.per_row == 0


def test_bytes_of_drafts_of_the_released_model() -> None:
    """Three drafts: as many more rows of history and of raw keys; the head's layer; a way to take states back."""
    plain = describe_model(RELEASED).cache_bytes(sizes_of(64), torch.bfloat16)
    replay = describe_model(RELEASED).cache_bytes(sizes_of(64, 3, "replay", True), torch.bfloat16)
    states = describe_model(RELEASED).cache_bytes(sizes_of(64, 3, "states", True), torch.bfloat16)
    page_of_the_head = 64 * (2048 + 64)
    assert replay.per_page == states.per_page == plain.per_page + page_of_the_head
    histories = 36 * 10_240 * 3 * 2 + 10_240 * 3 * 2
    raw_index_keys = 12 * 3 * 128 * 2 + (4 + 2 * 3) * 128 * 2
    assert states.per_slot == states.per_snapshot == plain.per_slot + histories + raw_index_keys
    kept = 36 * 8 * ((16 * 128 + 48 * 128) * 2 + 2 * 48 * 4)
    assert replay.per_slot == states.per_slot + kept
    assert replay.per_snapshot == states.per_snapshot
    assert replay.per_row == page_of_the_head
    assert states.per_row == page_of_the_head + 3 * (108 << 20)


@pytest.mark.parametrize(("num_drafts", "verify"), [(0, "replay"), (1, "replay"), (4, "states")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_are_those_allocated(variant: str, dtype: torch.dtype, num_drafts: int, verify: Verify) -> None:
    description = read_model(tiny_checkpoint(variant))
    sizes = sizes_of(8, num_drafts, verify, draft_head=num_drafts > 1)
    each = description.cache_bytes(sizes, dtype)
    caches = description.allocate_caches(sizes, dtype, CPU)
    wanted = 5 * each.per_page + 3 * each.per_slot + 2 * each.per_row
    assert sum(tensor.nbytes for tensor in caches.tensors()) == wanted


@pytest.mark.parametrize(("variant", "rows"), [("default", 9), ("bigrams", 6)])
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_ngram_history_reaches_as_far_as_the_convolution(variant: str, rows: int, num_drafts: int) -> None:
    """Three taps back, as far apart as the n-grams are long; and over the drafts that may have to be taken back."""
    caches = read_model(tiny_checkpoint(variant)).allocate_caches(sizes_of(8, num_drafts), torch.float32, CPU)
    shapes = {layer: history.shape for layer, history in caches.ngram.items()}
    assert shapes == {1: (3, rows + num_drafts, 4 * 32)}


def test_a_page_holds_whole_blocks() -> None:
    description = read_model(tiny_checkpoint())
    with pytest.raises(ValueError, match=r"page_size: expected a multiple of the indexer's compress ratio, 4, got 6"):
        description.cache_bytes(sizes_of(6), torch.float32)
    with pytest.raises(ValueError, match="page_size"):
        description.allocate_caches(sizes_of(6), torch.float32, CPU)


@pytest.mark.parametrize(("variant", "tokens"), [("default", 2), ("bigrams", 1), ("no_ngrams", 0)])
def test_context(variant: str, tokens: int) -> None:
    assert read_model(tiny_checkpoint(variant)).context_tokens == tokens


def test_context_is_filled_with_the_hash_eos() -> None:
    """The config's first EOS, whatever else ends an answer."""
    assert describe_model(RELEASED | {"eos_token_id": [248044, 7]}).context_fill == 248044
