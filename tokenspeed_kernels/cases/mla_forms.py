"""Inputs for what surrounds the attention of latent caches."""

from typing import Any

import torch

from tokenspeed_kernels.cases import FLOATS, FP8
from tokenspeed_kernels.cases.paging import cu_seqlens, page_table, paged_cache, scale_tensor, scaled_cache, strided
from tokenspeed_registry.cases import CaseSet, Make, Params

_DEEPSEEK: dict[str, Any] = {"nope": 128, "rope": 64, "latent": 512, "v_dim": 128, "dtype": torch.bfloat16}
_PROJECTION: dict[str, list[Any]] = {
    "tokens": [3, 0, 1, 17],
    "heads": [2, 1, 5, 16],
    "nope": [16, 1, 24],
    "rope": [8, 0, 1],
    "latent": [32, 1, 48],
    "v_dim": [16, 1, 24],
    "dtype": FLOATS,
    # Slices of one query projection, and of the weight whose rows give a head's key and then its value.
    "strided": [False, True],
}


def _weights(p: Params, make: Make) -> tuple[torch.Tensor, torch.Tensor]:
    both = make.normal(p["heads"], p["nope"] + p["v_dim"], p["latent"], dtype=p["dtype"], scale=p["latent"] ** -0.5)
    w_k, w_v = both.split_with_sizes([p["nope"], p["v_dim"]], dim=1)
    return (w_k, w_v) if p["strided"] else (w_k.contiguous(), w_v.contiguous())


def _mla_absorb_query(p: Params, make: Make) -> dict[str, Any]:
    both = make.normal(p["tokens"], p["heads"], p["nope"] + p["rope"], dtype=p["dtype"])
    q_nope, q_rope = both.split_with_sizes([p["nope"], p["rope"]], dim=-1)
    w_k, _ = _weights(p, make)
    if p["strided"]:
        return {"q_nope": q_nope, "q_rope": q_rope, "w_k": w_k}
    return {"q_nope": q_nope.contiguous(), "q_rope": q_rope.contiguous(), "w_k": w_k}


mla_absorb_query = CaseSet(
    axes=_PROJECTION,
    build=_mla_absorb_query,
    edges=[_DEEPSEEK | {"heads": heads, "strided": True} for heads in (1, 4, 12)],
    shrink=[{"tokens": 3}],
    models={
        "deepseek_v3 decode": _DEEPSEEK | {"tokens": 32, "heads": 128, "strided": True},
        "deepseek_v3 verify, 16 heads a rank": _DEEPSEEK | {"tokens": 128, "heads": 16, "strided": True},
        "kimi_k2 decode": _DEEPSEEK | {"tokens": 32, "heads": 64, "strided": True},
    },
    sweeps={
        "deepseek_v3 decode": [{"tokens": tokens} for tokens in (1, 32, 128, 1024)],
        "deepseek_v3 verify, 16 heads a rank": [{"tokens": tokens} for tokens in (1, 32, 128, 1024)],
    },
)


def _mla_value_up(p: Params, make: Make) -> dict[str, Any]:
    latents = make.normal(p["tokens"], p["heads"], p["latent"], dtype=p["dtype"])
    _, w_v = _weights(p, make)
    return {"latent_out": strided(latents) if p["strided"] else latents, "w_v": w_v}


mla_value_up = CaseSet(
    axes=_PROJECTION,
    build=_mla_value_up,
    edges=mla_absorb_query.edges,
    shrink=[{"tokens": 3}],
    models=mla_absorb_query.models,
    sweeps=mla_absorb_query.sweeps,
)


def _mla_cache_read(p: Params, make: Make) -> dict[str, Any]:
    counts, page = p["counts"], p["page"]
    first = [make.random.randint(0, p["before"]) for _ in counts]
    lengths = [start + count for start, count in zip(first, counts, strict=True)]
    table, pages = page_table(make, lengths, page)
    cache = paged_cache(make, table, lengths, pages, page, p["qk"], dtype=torch.float32)
    cache = scaled_cache(cache, p["cache_dtype"] or p["dtype"], p["kv_scale"])
    if p["holes"]:
        table[make.integers(*table.shape, low=0, high=3) == 0] = -1
    return {
        "kv_cache": strided(cache, dim=p["strided"]) if p["strided"] else cache,
        "page_table": table,
        "cu_seqlens": cu_seqlens(counts),
        "first": torch.tensor(first, dtype=torch.int32) if p["before"] else None,
        "rows": sum(counts),
        "dtype": p["dtype"],
        "kv_scale": scale_tensor(p["kv_scale"]),
    }


_CACHED: dict[str, Any] = {"page": 64, "qk": 576, "dtype": torch.bfloat16}

mla_cache_read = CaseSet(
    axes={
        "counts": [(5, 0, 9), (1,), (), (0, 0), (64, 3), (16, 17, 15)],
        # Positions of the first rows, at most; 0 leaves them out.
        "before": [0, 7, 130],
        "page": [4, 1, 16, 64],
        "qk": [40, 1, 576],
        "dtype": FLOATS,
        "cache_dtype": [None, FP8, torch.float32],
        "kv_scale": [None, 0.02, 3.0],
        "holes": [False, True],
        # The dim of the cache that has gaps, 0 for none: between pages' rows, or in rows.
        "strided": [0, 1, 2],
    },
    build=_mla_cache_read,
    edges=[
        *(_CACHED | {"cache_dtype": FP8, "kv_scale": scale, "before": 70} for scale in (None, 0.1)),
        _CACHED | {"counts": (63, 64, 65), "strided": 1},
    ],
    shrink=[{"counts": (5, 0, 70), "before": 9}],
    models={
        "deepseek_v3 cached prefix": _CACHED | {"counts": (8192,)},
        "deepseek_v3 cached prefixes, fp8 cache": _CACHED
        | {"counts": (4096, 4096), "before": 8192, "cache_dtype": FP8, "kv_scale": 0.1},
    },
)
