"""Caches have the sizes of the model's description, and what is announced is what gets allocated."""

import pytest
import torch

from tests.engine.forward import CPU
from tests.engine.tiny import VARIANTS, tiny_checkpoint
from tokenspeed_engine.models.families import describe_model, read_model

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


def test_bytes_of_the_released_model() -> None:
    sizes = describe_model(RELEASED).cache_bytes(64, torch.bfloat16)
    keys_and_values = 24_576  # a token, over 12 layers
    block_keys = 768  # a token
    assert sizes.per_page == 64 * (keys_and_values + block_keys)
    recurrent = 36 * 48 * 128 * 128 * 4
    convolutions = 36 * 10_240 * 3 * 2
    ngram_convolution = 10_240 * 9 * 2
    raw_index_keys = 12 * (4 + 4) * 128 * 2
    assert recurrent == 108 << 20
    assert sizes.per_slot == recurrent + convolutions + ngram_convolution + raw_index_keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_are_those_allocated(variant: str, dtype: torch.dtype) -> None:
    description = read_model(tiny_checkpoint(variant))
    sizes = description.cache_bytes(8, dtype)
    caches = description.allocate_caches(5, 8, 3, dtype, CPU)
    assert sum(tensor.nbytes for tensor in caches.tensors()) == 5 * sizes.per_page + 3 * sizes.per_slot


@pytest.mark.parametrize(("variant", "rows"), [("default", 9), ("bigrams", 6)])
def test_ngram_history_reaches_as_far_as_the_convolution(variant: str, rows: int) -> None:
    """Three taps back, as far apart as the n-grams are long."""
    caches = read_model(tiny_checkpoint(variant)).allocate_caches(1, 8, 2, torch.float32, CPU)
    assert {layer: history.shape for layer, history in caches.ngram.items()} == {1: (2, rows, 4 * 32)}


def test_a_page_holds_whole_blocks() -> None:
    description = read_model(tiny_checkpoint())
    with pytest.raises(ValueError, match=r"page_size: expected a multiple of the indexer's compress ratio, 4, got 6"):
        description.cache_bytes(6, torch.float32)
    with pytest.raises(ValueError, match="page_size"):
        description.allocate_caches(2, 6, 1, torch.float32, CPU)


@pytest.mark.parametrize(("variant", "tokens"), [("default", 2), ("bigrams", 1), ("no_ngrams", 0)])
def test_context(variant: str, tokens: int) -> None:
    assert read_model(tiny_checkpoint(variant)).context_tokens == tokens


def test_context_is_filled_with_the_hash_eos() -> None:
    """The config's first EOS, whatever else ends an answer."""
    assert describe_model(RELEASED | {"eos_token_id": [248044, 7]}).context_fill == 248044
