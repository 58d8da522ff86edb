"""Inputs for n-gram embeddings."""

import itertools
from typing import Any

import torch

from tokenspeed_kernels.cases import FLOATS
from tokenspeed_registry.cases import CaseSet, Make, Params

TABLES = [*FLOATS, torch.float8_e4m3fn]

_EOS = 3
_VOCAB = 12
"""Small, so that a random text ends often inside a window; a sweep's "vocab" makes all its n-grams differ."""


def _text(p: Params, make: Make) -> dict[str, Any]:
    lengths: list[int] = p["lengths"]
    tokens, history = sum(lengths), p["order"] - 1
    vocab = p.get("vocab", _VOCAB)
    ids = make.integers(tokens, low=0, high=vocab, dtype=torch.int64)
    context = make.integers(len(lengths), history, low=0, high=vocab, dtype=torch.int64)
    context[::2] = _EOS  # every other sequence starts here
    if p["padding"]:
        ids[make.integers(tokens, low=0, high=4) == 0] = -1
        context[make.integers(*context.shape, low=0, high=4) == 0] = -1
    return {
        "ids": ids,
        "context": context,
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "eos": _EOS,
    }


def _hash(p: Params, make: Make) -> dict[str, Any]:
    heads = p["heads_per_order"] * (p["order"] - 1)
    moduli = make.integers(heads, low=1, high=p["modulus"], dtype=torch.int64)
    # A model's are positive; one of the peers knows no others.
    lowest = 0 if p.get("positive") else -p["multiplier"]
    return {
        # Beyond 2^59 the products wrap, and half of them are negative.
        "multipliers": make.integers(p["order"], low=lowest, high=p["multiplier"], dtype=torch.int64) | 1,
        "moduli": moduli,
        "offsets": moduli.cumsum(0) - moduli,
    }


def _table(p: Params, make: Make, rows: int) -> dict[str, Any]:
    scales = {"none": None, "one": 1, "row": rows}[p["scale"]]
    return {
        "table": make.normal(rows, p["dim"], dtype=p["table_dtype"]),
        "scale": None if scales is None else make.uniform(scales, low=0.01, high=2.0),
        "dtype": p["dtype"],
        # A shard of the second half of a larger table: about half the rows belong to another.
        "first_row": rows // 2 if p["shard"] else None,
    }


def _ngram_lookup(p: Params, make: Make) -> dict[str, Any]:
    rows = make.integers(p["tokens"], p["heads"], low=0, high=p["table_rows"], dtype=torch.int64)
    if p["padding"]:
        rows[make.integers(*rows.shape, low=0, high=3) == 0] = -1
    return {"rows": rows, **_table(p, make, p["table_rows"])}


def _ngram_embed(p: Params, make: Make) -> dict[str, Any]:
    hashing = _hash(p, make)
    return {**_text(p, make), **hashing, **_table(p, make, int(hashing["moduli"].sum()))}


def _ngram_gate(p: Params, make: Make) -> dict[str, Any]:
    tokens, streams, hidden = p["tokens"], p["streams"], p["hidden"]
    size = torch.arange(1, streams + 1).view(1, -1, 1)  # streams of different size
    arguments: dict[str, Any] = {
        "x": (make.normal(tokens, streams, hidden, scale=p["magnitude"]) * size).to(p["dtype"]),
        "key": (make.normal(tokens, streams, hidden, scale=p["magnitude"]) * size).to(p["dtype"]),
        "value": make.normal(tokens, hidden, dtype=p["dtype"]),
        "norm_key": make.normal(streams, hidden, dtype=p["dtype"], scale=0.3),
        "norm_query": make.normal(streams, hidden, dtype=p["dtype"], scale=0.3),
        "norm_conv": make.normal(streams, hidden, dtype=p["dtype"], scale=0.3),
        "eps": 1e-6,
    }
    if p["score"] == "zero":
        arguments["key"].zero_()
    elif p["score"] == "clamped":
        # Disjoint support but for one element: the score is one product, small and of either sign.
        arguments["x"][..., 1::2] = 0
        arguments["key"][..., 0::2] = 0
        arguments["key"][..., 0] = 1e-7 * p["magnitude"] * make.normal(tokens, streams).sign()
    else:
        _keep_off_zero(arguments)
    return arguments


def _keep_off_zero(arguments: dict[str, Any]) -> None:
    """Replaces keys whose score is near 0, where the square root makes large errors of the sum's small ones."""
    x, key = arguments["x"].double(), arguments["key"].double()
    weight = (1 + arguments["norm_key"].double()) * (1 + arguments["norm_query"].double())
    size = x.square().mean(-1).sqrt() * key.square().mean(-1).sqrt() * x.shape[-1] ** 0.5
    near_zero = (x * key * weight).sum(-1, keepdim=True).abs() < 0.05 * size.unsqueeze(-1)
    aligned = arguments["x"] * weight.sign().to(arguments["x"].dtype)
    arguments["key"] = torch.where(near_zero, aligned, arguments["key"])


def _ngram_inject(p: Params, make: Make) -> dict[str, Any]:
    shape = p["tokens"], p["streams"], p["hidden"]
    arguments = {name: make.normal(*shape, dtype=p["dtype"]) for name in ("x", "gated", "conv")}
    if p["cancels"] and p["dtype"] != torch.float32:
        # What remains is what rounding takes from a sum of two; in float32 it would be rounding error alone.
        arguments["x"] = -(arguments["gated"] + arguments["conv"])
    return arguments


_HASH_AXES: Params = {
    "lengths": [[3, 4, 1], [], [0], [1], [2], [9], [0, 5, 0, 0, 2, 1, 0]],
    "order": [3, 2, 4],
    "heads_per_order": [2, 1, 8],
    "modulus": [11, 2, 1 << 40],
    "multiplier": [100, 1 << 62],
    "padding": [False, True],
}
_LOOKUP_AXES: Params = {
    "dim": [8, 1, 5],
    "table_dtype": TABLES,
    "dtype": FLOATS,
    "scale": ["none", "one", "row"],
    "shard": [False, True],
}
_STREAM_AXES: Params = {"tokens": [3, 0, 1, 17], "streams": [4, 1, 2], "hidden": [32, 2, 41], "dtype": FLOATS}

_REAL_HASH = {"order": 3, "heads_per_order": 8, "modulus": 20_000_000, "multiplier": 1 << 45}
_REAL_STREAMS = {"streams": 4, "hidden": 2560, "dtype": torch.bfloat16}
_FP8_TABLE = {"table_dtype": torch.float8_e4m3fn, "scale": "one", "modulus": 1 << 19, "vocab": 248320, "positive": True}
_REAL_ROWS = {"heads": 16, "dim": 160, "dtype": torch.bfloat16}

ngram_hash = CaseSet(
    axes=_HASH_AXES,
    build=lambda p, make: {**_text(p, make), **_hash(p, make)},
    shrink=[{"lengths": [3, 4, 1]}],
    models={
        "qwen4_exp decode": {**_REAL_HASH, "lengths": [1] * 32},
        "qwen4_exp prefill": {**_REAL_HASH, "lengths": [8192]},
    },
    sweeps={"qwen4_exp decode": [{"lengths": [1] * seqs} for seqs in (1, 32, 256)], "qwen4_exp prefill": [{}]},
)

ngram_lookup = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17],
        "heads": [4, 1, 16],
        "table_rows": [50, 1],
        "padding": [False, True],
        **_LOOKUP_AXES,
    },
    build=_ngram_lookup,
    edges=[
        {"table_dtype": torch.float8_e4m3fn, "scale": "row", "padding": True},
        {"table_dtype": torch.bfloat16, "dtype": torch.bfloat16, "padding": True},
    ],
    # A million rows stand in for the model's 320 million, of which each call reads as few.
    shrink=[{"tokens": 3, "table_rows": 50}, {"tokens": 17, "table_rows": 50, "dtype": torch.float16}],
    models={
        "qwen4_exp decode": {**_REAL_ROWS, "tokens": 32, "table_rows": 1 << 20, "table_dtype": torch.bfloat16},
        "qwen4_exp prefill, fp8 table": {
            **_REAL_ROWS,
            "tokens": 8192,
            "table_rows": 1 << 20,
            "table_dtype": torch.float8_e4m3fn,
            "scale": "one",
        },
    },
    # 670 MB of table, past any cache as the model's 51 GB are.
    sweeps={
        "qwen4_exp prefill, fp8 table": [{"tokens": tokens, "table_rows": 1 << 22} for tokens in (1, 32, 1024, 8192)]
    },
)

ngram_embed = CaseSet(
    axes={**_HASH_AXES, "modulus": [11, 2, 101], **_LOOKUP_AXES},
    build=_ngram_embed,
    edges=[{"table_dtype": torch.float8_e4m3fn, "scale": "row", "padding": True}],
    shrink=[{"lengths": [3, 4, 1], "modulus": 101}, {"lengths": [17], "modulus": 101, "dtype": torch.float16}],
    models={
        "qwen4_exp decode": {
            **_REAL_HASH,
            "modulus": 1 << 16,
            "lengths": [1] * 32,
            "dim": 160,
            "table_dtype": torch.bfloat16,
            "dtype": torch.bfloat16,
        }
    },
    sweeps={
        "qwen4_exp decode": [{"lengths": lengths, **_FP8_TABLE} for lengths in ([1], [1] * 32, [1024], [8192])],
    },
)

ngram_gate = CaseSet(
    axes={**_STREAM_AXES, "magnitude": [1.0, 1e-3, 100.0], "score": ["usual", "zero", "clamped"]},
    build=_ngram_gate,
    shrink=[{"tokens": 3}, {"tokens": 17, "dtype": torch.float16}],
    models={
        "qwen4_exp decode": {**_REAL_STREAMS, "tokens": 32},
        "qwen4_exp prefill": {**_REAL_STREAMS, "tokens": 8192},
    },
    sweeps={"qwen4_exp decode": [{"tokens": tokens} for tokens in (1, 32, 256, 1024, 8192)]},
)

ngram_inject = CaseSet(
    axes={**_STREAM_AXES, "cancels": [False, True]},
    build=_ngram_inject,
    edges=[{"cancels": True, "dtype": dtype} for dtype in FLOATS[1:]],
    shrink=[{"tokens": 3}, {"tokens": 17, "dtype": torch.float16}],
    models={
        "qwen4_exp decode": {**_REAL_STREAMS, "tokens": 32},
        "qwen4_exp prefill": {**_REAL_STREAMS, "tokens": 8192},
    },
    sweeps={"qwen4_exp decode": [{"tokens": tokens} for tokens in (1, 32, 256, 1024, 8192)]},
)
