"""Inputs for dense attention over a paged cache."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.cases import FLOATS, FP8
from tokenspeed_kernels.cases.paging import (
    add_extremes,
    cu_seqlens,
    distinct_slots,
    page_table,
    paged_cache,
    scale_tensor,
    scaled_cache,
    strided,
)
from tokenspeed_registry.cases import CaseSet, Make, Params

# The dtype of the caches, None for that of the model, and the scales of keys and values, None for none.
_CACHE: dict[str, list[Any]] = {"cache_dtype": [None, FP8], "scales": [(None, None), (0.05, 2.0), (None, 0.02)]}


def _joint(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Both caches as views into one that has keys and values of a page side by side."""
    both = torch.stack((k, v), dim=1)
    return both[:, 0], both[:, 1]


def _kv_cache_write(p: Params, make: Make) -> dict[str, Any]:
    row = p["kv_heads"], p["dim"]
    k, v = (make.normal(p["tokens"], *row, dtype=p["dtype"]) for _ in "kv")
    pages = max(p["pages"], -(-p["tokens"] // p["page"]))
    if p["extremes"]:
        add_extremes(k, v)
    caches = [make.normal(pages, p["page"], *row).to(p["cache_dtype"] or p["dtype"]) for _ in "kv"]
    k_cache, v_cache = _joint(*caches) if p["strided"] else caches
    padding = {"none": 0, "some": (p["tokens"] + 1) // 2, "all": p["tokens"]}[p["padding"]]
    return {
        "k": strided(k) if p["strided"] else k,
        "v": strided(v) if p["strided"] else v,
        "slot_mapping": distinct_slots(make, p["tokens"], pages * p["page"], padding=padding, dtype=torch.int64),
        "k_cache": k_cache,
        "v_cache": v_cache,
        **_scales(p),
    }


def _scales(p: Params) -> dict[str, Tensor | None]:
    return {name: scale_tensor(scale) for name, scale in zip(("k_scale", "v_scale"), p["scales"], strict=True)}


_QWEN: dict[str, Any] = {"page": 64, "dim": 256, "dtype": torch.bfloat16}

kv_cache_write = CaseSet(
    axes={
        "tokens": [5, 0, 1, 20],
        "pages": [6, 9],
        "page": [4, 1, 16],
        "kv_heads": [2, 1],
        "dim": [16, 1, 64],
        "dtype": FLOATS,
        "padding": ["none", "some", "all"],
        "strided": [False, True],
        "extremes": [False, True],
        **_CACHE,
    },
    build=_kv_cache_write,
    edges=[
        *(_QWEN | {"padding": padding, "strided": strided} for padding in ("none", "some") for strided in (0, 1)),
        *(_QWEN | {"cache_dtype": FP8, "scales": scales, "strided": True} for scales in ((None, None), (0.05, 0.1))),
        {"cache_dtype": FP8, "scales": (0.05, 2.0), "dtype": torch.bfloat16, "padding": "some", "tokens": 20},
        *(
            {"cache_dtype": FP8, "scales": scales, "extremes": True, "dtype": dtype}
            for scales, dtype in (
                ((None, None), torch.float32),
                ((None, None), torch.bfloat16),
                ((3.0, 0.5), torch.half),
            )
        ),
    ],
    shrink=[{"tokens": 5, "pages": 6}],
    models={
        "qwen4_exp prefill": _QWEN | {"tokens": 8192, "pages": 1024, "strided": True},
        "qwen4_exp prefill, fp8 cache": _QWEN
        | {"tokens": 8192, "pages": 1024, "strided": True, "cache_dtype": FP8, "scales": (0.05, 0.1)},
    },
    sweeps={"qwen4_exp prefill": [{"tokens": tokens} for tokens in (1, 32, 8192)]},
)


def _paged_attention(p: Params, make: Make) -> dict[str, Any]:
    new = p["new"] * p.get("batch", 1)  # of a sweep, so often the same
    lengths = [count + make.random.randint(0, p["before"]) for count in new]
    if p["short"] and lengths:
        # A padding sequence has no tokens cached, and one may hold fewer than it asks for.
        lengths[0], lengths[-1] = 0, new[-1] // 2
    heads, kv_heads = p["heads"]
    table, pages = page_table(make, lengths, p["page"])
    row = kv_heads, p["dim"]
    caches = [paged_cache(make, table, lengths, pages, p["page"], *row, dtype=torch.float32) for _ in "kv"]
    if p["outlier"]:
        for entries, length, count in zip(table.tolist(), lengths, new, strict=True):
            for position in range(max(length - count + 1, 0), length):
                caches[1][entries[position // p["page"]], position % p["page"]] *= 100.0
    dtype = p["cache_dtype"] or p["dtype"]
    caches = [scaled_cache(cache, dtype, scale) for cache, scale in zip(caches, p["scales"], strict=True)]
    q = make.normal(sum(new), heads, p["dim"], dtype=p["dtype"])
    k_cache, v_cache = _joint(*caches) if p["strided"] else caches
    return {
        "q": strided(q) if p["strided"] else q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": table,
        "cu_seqlens_q": cu_seqlens(new),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "scale": p["dim"] ** -0.5,
        "max_q_len": max(new, default=0) + p["slack"],
        **_scales(p),
    }


_QWEN_HEADS = _QWEN | {"heads": (24, 2)}


def _count_pairs(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Tokens of sequences that ask for something, and pairs of a query and a token that it sees."""
    lengths, new = arguments["seq_lens"].long(), arguments["cu_seqlens_q"].long().diff()
    sequences = zip(lengths.tolist(), new.tolist(), strict=True)
    pairs = sum(max(length - back, 0) for length, count in sequences for back in range(count))
    return {"cached_tokens": int(lengths[new > 0].sum()), "pairs": pairs}


paged_attention = CaseSet(
    axes={
        "new": [(1, 3, 0, 2), (1,), (), (0, 0), (1, 1, 1, 1, 1), (4, 4), (17, 1, 2)],
        "before": [20, 0, 130],
        "heads": [(4, 2), (1, 1), (3, 3), (8, 1), (24, 2)],
        "dim": [16, 5, 64],
        "page": [4, 1, 16, 64],
        "dtype": FLOATS,
        "short": [False, True],
        # Values of the tokens that some query of the call must not see are a hundred times the others.
        "outlier": [False, True],
        "slack": [0, 3],
        "strided": [False, True],
        **_CACHE,
    },
    build=_paged_attention,
    counts=_count_pairs,
    edges=[
        {"new": (4, 4, 4), "outlier": True, "before": 0},
        {"new": (2, 8, 1), "outlier": True, "page": 1, "strided": True},
        {"new": (1, 1, 1), "short": True, "dtype": torch.bfloat16},
        {"new": (130, 2), "before": 3, "heads": (2, 1), "outlier": True},
        # What kernels for the models' own widths serve: they refuse the small ones above.
        *(_QWEN_HEADS | {"new": new, "before": 61} for new in ((1, 1, 1), (4, 4), (3, 0, 130))),
        _QWEN_HEADS | {"short": True, "outlier": True},
        _QWEN_HEADS | {"strided": True},
        _QWEN_HEADS | {"dtype": torch.float16, "heads": (12, 1)},
        {"cache_dtype": FP8, "scales": (0.05, 2.0), "dtype": torch.bfloat16, "short": True},
        *(_QWEN_HEADS | {"cache_dtype": FP8, "scales": scales} for scales in ((None, None), (0.05, 0.1))),
    ],
    shrink=[{"new": (1, 1), "before": 70}, {"new": (4, 0, 70), "before": 70}],
    models={
        "qwen4_exp decode": _QWEN_HEADS | {"new": (1,) * 32, "before": 4096},
        "qwen4_exp decode, fp8 cache": _QWEN_HEADS
        | {"new": (1,) * 32, "before": 4096, "cache_dtype": FP8, "scales": (0.05, 0.1)},
        "qwen4_exp verify": _QWEN_HEADS | {"new": (4,) * 16, "before": 4096},
        "qwen4_exp prefill": _QWEN_HEADS | {"new": (4096,), "before": 4096},
    },
    sweeps={
        "qwen4_exp decode": [{"new": (1,), "batch": batch, "before": 8192} for batch in (1, 8, 32, 128)],
        "qwen4_exp decode, fp8 cache": [{"before": 8192}],
        "qwen4_exp verify": [{"new": (4,), "batch": batch, "before": 8192} for batch in (1, 32)],
        "qwen4_exp prefill": [{"new": (new,), "before": 0} for new in (1024, 8192)],
    },
)
