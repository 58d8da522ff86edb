"""Constants of the n-gram hash: the released checkpoint's literal values, and those of transformers."""

import pytest
from safetensors.torch import load_file

from tests.engine.tiny import BASE, tiny_checkpoint
from tokenspeed_engine.models.families import read_model
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig, parse_config
from tokenspeed_engine.models.qwen4_exp.ngram_hash import is_prime, ngram_hash
from tokenspeed_engine.splitmix64 import GAMMA, splitmix64

REAL_MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
REAL_PRIMES = (
    20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
    20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171,
)  # fmt: skip


def real_config() -> Qwen4ExpConfig:
    return parse_config(
        {
            "model_type": "qwen4_exp_text",
            "hidden_size": 2560,
            "num_hidden_layers": 48,
            "ple_layer_ids": [2],
            "eos_token_id": 248044,
        }
    )


def test_released_checkpoint() -> None:
    constants = ngram_hash(real_config(), 0)
    assert constants.multipliers == REAL_MULTIPLIERS
    assert constants.moduli == REAL_PRIMES
    assert constants.offsets[0] == 0
    assert constants.offsets[1] == 20000003
    assert constants.offsets[-1] == 300001275
    assert constants.rows == 320001536


def test_products_of_token_ids_fit_63_bits() -> None:
    assert max(REAL_MULTIPLIERS) * (248320 - 1) < 1 << 63


def test_splitmix64() -> None:
    """First outputs of the generator's reference implementation for seed 0."""
    outputs = [splitmix64(GAMMA * step) for step in range(3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_primes_below_ten_thousand() -> None:
    sieve = [True] * 10_000
    sieve[0] = sieve[1] = False
    for n in range(2, 100):
        if sieve[n]:
            sieve[n * n :: n] = [False] * len(sieve[n * n :: n])
    assert [n for n in range(10_000) if is_prime(n)] == [n for n in range(10_000) if sieve[n]]


@pytest.mark.parametrize("composite", [2047, 3215031751, 3825123056546413051])
def test_strong_pseudoprimes(composite: int) -> None:
    """The least composites that pass for primes with the first 1, 4 and 9 prime bases."""
    assert not is_prime(composite)


@pytest.mark.parametrize("variant", ["default", "bigrams", "several_ngram_layers"])
def test_constants_that_transformers_saves(variant: str) -> None:
    folder = tiny_checkpoint(variant)
    config = read_model(folder).config
    assert isinstance(config, Qwen4ExpConfig)
    saved = load_file(folder / "model.safetensors")
    for index, layer_id in enumerate(config.ple_layer_ids):
        constants = ngram_hash(config, index)
        prefix = f"model.layers.{layer_id - 1}.ple.ple_embedding."
        assert saved[f"{prefix}layer_multipliers"].tolist() == list(constants.multipliers)
        assert saved[f"{prefix}ngram_heads_vocab_sizes"].tolist() == list(constants.moduli)
        assert saved[f"{prefix}ngram_heads_offsets"].tolist() == list(constants.offsets)
        assert constants.rows % BASE["make_ngram_vocab_size_divisible_by"] == 0
