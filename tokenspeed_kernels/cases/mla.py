"""Inputs for multi-head latent attention."""

from collections.abc import Mapping
from typing import Any

import torch

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


def _merge_states(p: Params, make: Make) -> dict[str, Any]:
    shape = p["tokens"], p["heads"]
    sides: dict[str, Any] = {}
    for side in "ab":
        sides[f"out_{side}"] = make.normal(*shape, p["dim"], dtype=p["dtype"])
        # A spread of some units makes either side dominate now and then; a third of the rows has no keys.
        sides[f"lse_{side}"] = make.normal(*shape, scale=3.0)
        if p["empty_rows"]:
            empty = make.integers(*shape, low=0, high=3) == 0
            sides[f"lse_{side}"][empty] = -torch.inf
            # Finite, but otherwise anything: a side without keys has no say in the result.
            sides[f"out_{side}"][empty] *= 1e4
    return sides


merge_states = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17],
        "heads": [2, 1, 16],
        "dim": [64, 512],
        "dtype": FLOATS,
        "empty_rows": [False, True],
    },
    build=_merge_states,
    shrink=[{"tokens": 3}, {"tokens": 17, "dtype": torch.float16, "empty_rows": True}],
    models={"deepseek_v3 prefill with cached prefix": {"tokens": 8192, "heads": 16, "dim": 128}},
)


def _mla_decode(p: Params, make: Make) -> dict[str, Any]:
    q_len, row = p["q_len"], p["latent"] + p["rope"]
    if p.get("uniform"):
        return _uniform_decode(p, make)
    lengths = make.lengths(p["batch"], low=q_len, high=p["longest"] + q_len)
    if lengths:
        lengths[-1] = p["longest"] + q_len
    if p["short"] and lengths:
        # Half the batch is padding; the first sequence holds fewer tokens than it asks for, where there are several.
        lengths[::2] = [0] * len(lengths[::2])
        lengths[0] = q_len // 2
    table, pages = page_table(make, lengths, p["page"])
    cache = paged_cache(make, table, lengths, pages, p["page"], row, dtype=torch.float32)
    if p["outlier"]:
        for entries, length in zip(table.tolist(), lengths, strict=True):
            for position in range(max(length - q_len + 1, 0), length):
                cache[entries[position // p["page"]], position % p["page"], : p["latent"]] *= 100.0
    q = make.normal(p["batch"], q_len, p["heads"], row, dtype=p["dtype"])
    if p["outlier"]:
        # The outliers are values only: as keys they would take all the weight from the others.
        q[..., : p["latent"]] = 0
    cache = scaled_cache(cache, p["cache_dtype"] or p["dtype"], p["kv_scale"])
    return {
        "q": q,
        "kv_cache": strided(cache, dim=p["strided"]) if p["strided"] else cache,
        "page_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "latent": p["latent"],
        "scale": row**-0.5,
        "kv_scale": scale_tensor(p["kv_scale"]),
    }


def _uniform_decode(p: Params, make: Make) -> dict[str, Any]:
    """Every sequence has `longest` tokens, which fill the table: what benches time, built fast at any size."""
    batch, row = p["batch"], p["latent"] + p["rope"]
    lengths = [p["longest"]] * batch
    table, pages = page_table(make, lengths, p["page"], spare_columns=0)
    cache = make.normal(pages, p["page"], row, dtype=p["cache_dtype"] or p["dtype"])
    return {
        "q": make.normal(batch, p["q_len"], p["heads"], row, dtype=p["dtype"]),
        "kv_cache": cache,
        "page_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "latent": p["latent"],
        "scale": row**-0.5,
        "kv_scale": scale_tensor(p["kv_scale"]),
    }


# The dtype of the cache, None for that of the model, and its scale, None for none.
_CACHE: dict[str, list[Any]] = {"cache_dtype": [None, FP8], "kv_scale": [None, 0.02, 3.0]}
_EXTREMES = [(None, torch.float32), (None, torch.bfloat16), (3.0, torch.float16)]
_DEEPSEEK: dict[str, Any] = {"latent": 512, "rope": 64, "page": 64, "dtype": torch.bfloat16}
_DEEPSEEK_DECODE = _DEEPSEEK | {"heads": 128, "longest": 8192}


def _sweep(cells: list[tuple[int, int]], **other: Any) -> list[Params]:
    return [{"batch": batch, "longest": longest, "uniform": True, **other} for batch, longest in cells]


_8K, _64K = 8192, 65536
_CELLS = [(1, _8K), (1, _64K), (8, _8K), (8, _64K), (32, _8K), (32, _64K), (128, _8K)]
_FEW_CELLS = [(1, _8K), (32, _8K)]


def _count_cached(arguments: Mapping[str, Any]) -> dict[str, int]:
    return {"cached_tokens": int(arguments["seq_lens"].sum())}


mla_decode = CaseSet(
    axes={
        "batch": [3, 0, 1, 6],
        "q_len": [1, 2, 4, 8],
        "heads": [2, 1, 3, 16],
        "latent": [32, 1, 48],
        "rope": [8, 0, 16],
        "page": [4, 1, 16, 64],
        # Tokens before the new ones, at most; one sequence has that many.
        "longest": [20, 0, 62, 63, 64, 129],
        "dtype": FLOATS,
        "short": [False, True],
        "outlier": [False, True],
        # The dim of the cache that has gaps, 0 for none: between pages' rows, or in rows.
        "strided": [0, 1, 2],
        **_CACHE,
    },
    build=_mla_decode,
    counts=_count_cached,
    edges=[
        {"q_len": 4, "outlier": True, "page": 1},
        {"q_len": 8, "outlier": True, "longest": 57, "page": 64},
        {"q_len": 8, "short": True, "batch": 6, "dtype": torch.bfloat16},
        # What kernels for the models' own widths serve: they refuse the small ones above.
        *(_DEEPSEEK | {"heads": heads} for heads in (1, 2, 4, 8, 12, 16, 24, 64, 128)),
        *(_DEEPSEEK | {"q_len": q_len, "outlier": True, "batch": 2} for q_len in (1, 2, 4, 8)),
        *(_DEEPSEEK | {"longest": longest, "q_len": 4, "batch": 2} for longest in (0, 1, 59, 60, 61, 196)),
        _DEEPSEEK | {"short": True, "batch": 6, "q_len": 2},
        # So many rows that no device splits the keys, and keys enough for kernels that read long runs in another way.
        _DEEPSEEK | {"batch": 6, "q_len": 8, "heads": 128, "longest": 700},
        _DEEPSEEK | {"strided": 1, "heads": 16},
        _DEEPSEEK | {"dtype": torch.float16, "heads": 16},
        _DEEPSEEK | {"page": 32, "heads": 16},
        {"cache_dtype": FP8, "kv_scale": 0.02, "dtype": torch.bfloat16, "strided": 1},
        *(_DEEPSEEK | {"cache_dtype": FP8, "kv_scale": scale, "heads": 16, "q_len": 2} for scale in (None, 0.1)),
    ],
    shrink=[{"batch": 2, "longest": 70}],
    models={
        "deepseek_v3 decode": _DEEPSEEK_DECODE | {"batch": 32, "q_len": 1},
        "deepseek_v3 verify": _DEEPSEEK_DECODE | {"batch": 16, "q_len": 4},
        "deepseek_v3 decode, fp8 cache": _DEEPSEEK_DECODE
        | {"batch": 32, "q_len": 1, "cache_dtype": FP8, "kv_scale": 0.1},
        "deepseek_v3 decode, 16 heads a rank": _DEEPSEEK_DECODE | {"batch": 64, "q_len": 1, "heads": 16},
        "kimi_k2 decode": _DEEPSEEK_DECODE | {"batch": 32, "q_len": 1, "heads": 64},
    },
    sweeps={
        "deepseek_v3 decode, 16 heads a rank": [
            *_sweep(_CELLS, q_len=1),
            *_sweep(_CELLS, q_len=4),
            *_sweep([(1, _8K)], heads=8, q_len=4),
        ],
        "deepseek_v3 decode": [
            *_sweep(_CELLS, q_len=1),
            *_sweep(_CELLS, q_len=4),
            *(cell for q_len in (1, 4) for heads in (32, 64) for cell in _sweep(_FEW_CELLS, heads=heads, q_len=q_len)),
        ],
        "deepseek_v3 decode, fp8 cache": [
            cell for q_len in (1, 4) for heads in (16, 128) for cell in _sweep(_CELLS, heads=heads, q_len=q_len)
        ],
    },
)


def _mla_prefill(p: Params, make: Make) -> dict[str, Any]:
    new = p["new"]
    cached = p.get("cached") or [make.random.randint(0, p["before"]) for _ in new]
    keys = [before + (count if p["causal"] else 0) for before, count in zip(cached, new, strict=True)]
    if p["short"] and keys:
        keys[0], keys[-1] = 0, new[-1] // 2
    q = make.normal(sum(new), p["heads"], p["qk"], dtype=p["dtype"])
    k = make.normal(sum(keys), p["heads"], p["qk"], dtype=p["dtype"])
    v = make.normal(sum(keys), p["heads"], p["v_dim"], dtype=p["dtype"])
    return {
        "q": strided(q) if p["strided"] else q,
        "k": strided(k) if p["strided"] else k,
        "v": strided(v, dim=1) if p["strided"] else v,
        "cu_seqlens_q": cu_seqlens(new),
        "cu_seqlens_k": cu_seqlens(keys),
        "scale": p["qk"] ** -0.5,
        "causal": p["causal"],
    }


_DEEPSEEK_WIDE: dict[str, Any] = {"qk": 192, "v_dim": 128, "dtype": torch.bfloat16}
_DEEPSEEK_PREFILL = _DEEPSEEK_WIDE | {"heads": 128}

mla_prefill = CaseSet(
    axes={
        "new": [(5, 0, 3), (1,), (), (0, 0), (1, 1, 1, 1), (17, 1, 8)],
        "before": [8, 0, 17],
        "heads": [2, 1, 5],
        "qk": [24, 1, 96],
        "v_dim": [16, 1, 64],
        "dtype": FLOATS,
        "causal": [True, False],
        "short": [False, True],
        "strided": [False, True],
    },
    build=_mla_prefill,
    edges=[
        {"new": (130, 2), "before": 3, "heads": 1},
        {"new": (8, 8, 8), "before": 17, "causal": False, "short": True},
        *(_DEEPSEEK_WIDE | {"new": new, "short": short} for new in ((5, 0, 3), (130,)) for short in (False, True)),
        _DEEPSEEK_WIDE | {"causal": False, "strided": True, "before": 70},
        _DEEPSEEK_WIDE | {"dtype": torch.float16, "heads": 16},
    ],
    shrink=[{"new": (5, 0, 3), "before": 70}],
    models={
        "deepseek_v3 prefill": _DEEPSEEK_PREFILL | {"new": (8192,), "before": 0},
        "deepseek_v3 cached prefix": _DEEPSEEK_PREFILL | {"new": (2048,), "before": 8192, "causal": False},
        "kimi_k2 prefill": _DEEPSEEK_PREFILL | {"new": (4096, 4096), "before": 0, "heads": 64},
    },
    sweeps={
        "deepseek_v3 prefill": [
            *({"heads": 16, "new": new} for new in ((1024,), (8192,), (1024,) * 8)),
            *({"new": new} for new in ((8192,), (32768,), (2048,) * 8)),
            {"new": (1024,), "cached": (65536,)},
        ]
    },
)


def _mla_cache_write(p: Params, make: Make) -> dict[str, Any]:
    row = p["latent"] + p["rope"]
    pages = max(p["pages"], -(-p["tokens"] // p["page"]))
    cache = make.normal(pages, p["page"], row).to(p["cache_dtype"] or p["dtype"])
    latent = make.normal(p["tokens"], p["latent"], dtype=p["dtype"])
    k_rope = make.normal(p["tokens"], p["rope"], dtype=p["dtype"])
    if p["extremes"]:
        add_extremes(latent, k_rope)
    padding = {"none": 0, "some": (p["tokens"] + 1) // 2, "all": p["tokens"]}[p["padding"]]
    return {
        "latent": strided(latent) if p["strided"] else latent,
        "k_rope": strided(k_rope) if p["strided"] else k_rope,
        "slot_mapping": distinct_slots(make, p["tokens"], pages * p["page"], padding=padding, dtype=torch.int64),
        "kv_cache": strided(cache, dim=1) if p["strided"] else cache,
        "kv_scale": scale_tensor(p["kv_scale"]),
    }


mla_cache_write = CaseSet(
    axes={
        "tokens": [5, 0, 1, 20],
        "pages": [6, 9],
        "page": [4, 1, 16],
        "latent": [32, 1, 64],
        "rope": [8, 1, 16],
        "dtype": FLOATS,
        "padding": ["none", "some", "all"],
        "strided": [False, True],
        "extremes": [False, True],
        **_CACHE,
    },
    build=_mla_cache_write,
    edges=[
        *(_DEEPSEEK | {"padding": padding, "strided": strided} for padding in ("none", "some") for strided in (0, 1)),
        *(_DEEPSEEK | {"cache_dtype": FP8, "kv_scale": scale, "padding": "some"} for scale in (None, 0.1)),
        {"cache_dtype": FP8, "kv_scale": 0.02, "dtype": torch.bfloat16, "strided": True, "tokens": 20},
        *({"cache_dtype": FP8, "kv_scale": scale, "extremes": True, "dtype": dtype} for scale, dtype in _EXTREMES),
    ],
    shrink=[{"tokens": 5, "pages": 6}],
    models={
        "deepseek_v3 prefill": _DEEPSEEK | {"tokens": 8192, "pages": 1024, "strided": True},
        "deepseek_v3 prefill, fp8 cache": _DEEPSEEK
        | {"tokens": 8192, "pages": 1024, "strided": True, "cache_dtype": FP8, "kv_scale": 0.1},
    },
    sweeps={"deepseek_v3 prefill": [{"tokens": tokens} for tokens in (1, 32, 1024, 8192)]},
)
