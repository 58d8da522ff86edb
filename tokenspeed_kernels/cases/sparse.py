"""Inputs for block-sparse attention. `sequences` are pairs of a length and the number of new tokens at its end.

A pair with fewer tokens than new ones is padding: its tokens at negative positions must be ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.cases import FLOATS, FP8
from tokenspeed_kernels.cases.paging import (
    cu_seqlens,
    distinct_slots,
    page_table,
    paged_cache,
    scale_tensor,
    scaled_cache,
    strided,
)
from tokenspeed_registry.cases import CaseSet, Make, Params

SEQUENCES: list[tuple[tuple[int, int], ...]] = [
    ((9, 2), (4, 4), (14, 3)),
    (),
    ((7, 0), (5, 1), (0, 0)),
    ((0, 2), (30, 1), (1, 3), (8, 1)),
    ((37, 37),),
    ((23, 4), (22, 4), (21, 4), (20, 4)),
    ((3, 1), (3, 3), (65, 8)),
]
DECODE = tuple((length, 1) for length in range(4096, 8192, 128))
VERIFY = tuple((length, 4) for length in range(4096, 8192, 128))
PREFILL = ((8192, 2048),)
SWEEPS: dict[str, list[Params]] = {
    "qwen4_exp decode": [
        {"sequences": ((length, 1),), "batch": batch}
        for length, batch in ((8192, 1), (8192, 32), (8192, 128), (131_072, 1), (131_072, 8))
    ],
    "qwen4_exp verify": [{"sequences": ((8192, 4),), "batch": batch} for batch in (1, 32)],
    "qwen4_exp prefill": [{"sequences": ((length, 2048),)} for length in (8192, 65_536)],
}


def _sequences(p: Params) -> tuple[tuple[int, int], ...]:
    """Of a sweep, `batch` times the same."""
    sequences: tuple[tuple[int, int], ...] = p["sequences"]
    batch: int = p.get("batch", 1)
    return sequences * batch


def _packing(sequences: Sequence[tuple[int, int]]) -> tuple[list[int], list[int], dict[str, Tensor]]:
    """Lengths, numbers of new tokens, and the index tensors of both."""
    lengths, new = [length for length, _ in sequences], [count for _, count in sequences]
    return lengths, new, {"cu_seqlens": cu_seqlens(new), "seq_lens": torch.tensor(lengths, dtype=torch.int32)}


def _positions(sequences: Sequence[tuple[int, int]]) -> list[int]:
    return [position for length, new in sequences for position in range(length - new, length)]


def _punch(make: Make, table: Tensor) -> None:
    """Replaces a third of a page table by −1."""
    table[make.integers(*table.shape, low=0, high=3) == 0] = -1


def _index_cache_write(p: Params, make: Make) -> dict[str, Any]:
    ratio, blocks, dim, dtype, sequences = p["ratio"], p["blocks"], p["dim"], p["dtype"], _sequences(p)
    lengths, new, packing = _packing(sequences)
    ring_rows, pool = ratio + p["spare_rows"], len(sequences) + 2
    slots = distinct_slots(make, len(sequences), pool, padding=min(p["padding"], len(sequences)))
    # Only what a kernel may read is a number: the keys of open blocks in the ring, those of tokens in the call.
    ring = torch.full((pool, ring_rows, dim), torch.nan, dtype=dtype)
    raw_k = make.normal(sum(new), dim, dtype=dtype)
    raw_k[torch.tensor(_positions(sequences), dtype=torch.int64) < 0] = torch.nan
    for slot, (length, count), keys in zip(slots.tolist(), sequences, torch.split(raw_k, new), strict=True):
        if slot == -1:
            keys.fill_(torch.nan)
            continue
        first = max(length - count, 0)
        for position in range(first // ratio * ratio, first):
            ring[slot, position % ring_rows] = make.normal(dim, dtype=dtype)
    table, pages = page_table(make, lengths, blocks * ratio)
    if p["holes"]:
        _punch(make, table)
    half = min(p["half"], dim // 2)
    return {
        "raw_k": strided(raw_k) if p["strided"] else raw_k,
        "ring": ring,
        "block_cache": torch.full((pages, blocks, dim), torch.nan, dtype=p["cache_dtype"] or dtype),
        "page_table": table,
        "slots": slots,
        **packing,
        "weight": make.normal(dim, dtype=dtype, scale=0.1),
        "inv_freq": 1e4 ** (-torch.arange(half) / max(half, 1)),
        "ratio": ratio,
        "eps": 1e-6,
    }


_QWEN4_INDEXER = {"ratio": 4, "blocks": 16, "dim": 128, "half": 32, "dtype": torch.bfloat16}

index_cache_write = CaseSet(
    axes={
        "sequences": SEQUENCES,
        "ratio": [4, 2, 1, 8],
        "spare_rows": [4, 0, 1, 3],
        "blocks": [2, 1, 8],
        "dim": [16, 40, 128],
        "half": [4, 8, 0],
        "dtype": FLOATS,
        "padding": [0, 1, 4],
        "holes": [False, True],
        "strided": [False, True],
        "cache_dtype": [None, FP8],
    },
    build=_index_cache_write,
    edges=[
        {"sequences": ((262_144, 5),), "blocks": 64},
        {"sequences": ((262_144, 5),), "blocks": 64, "dtype": torch.bfloat16},
        {"sequences": SEQUENCES[3], "padding": 1, "holes": True},
        {"cache_dtype": FP8, "dtype": torch.bfloat16, "dim": 128, "half": 8},
    ],
    shrink=[{"sequences": ((9, 1), (70, 4))}],
    models={
        "qwen4_exp decode": {"sequences": DECODE, **_QWEN4_INDEXER},
        "qwen4_exp verify": {"sequences": VERIFY, **_QWEN4_INDEXER},
        "qwen4_exp prefill": {"sequences": PREFILL, **_QWEN4_INDEXER},
    },
    sweeps=SWEEPS,
)


def index_queries(p: Params, make: Make) -> dict[str, Any]:
    ratio, blocks, dim, dtype, sequences = p["ratio"], p["blocks"], p["dim"], p["dtype"], _sequences(p)
    lengths, new, packing = _packing(sequences)
    table, pages = page_table(make, lengths, blocks * ratio)
    complete = [length // ratio for length in lengths]
    q = make.normal(sum(new), p["heads"], dim, dtype=dtype)
    cache = paged_cache(make, table, complete, pages, blocks, dim, dtype=p["cache_dtype"] or dtype)
    if p["holes"]:
        _punch(make, table)
    return {
        "q": strided(q) if p["strided"] else q,
        "block_cache": cache,
        "page_table": table,
        **packing,
        "ratio": ratio,
        "max_blocks": max(0, max(complete, default=0) + p["spare_blocks"]),
    }


QWEN4_SCORES = {"ratio": 4, "blocks": 16, "dim": 128, "heads": 4, "dtype": torch.bfloat16}

index_scores = CaseSet(
    axes={
        "sequences": SEQUENCES,
        "ratio": [4, 2, 1, 8],
        "blocks": [2, 1, 8],
        "heads": [4, 1, 3],
        "dim": [16, 40, 128],
        "spare_blocks": [0, 3, 50, -1],
        "dtype": FLOATS,
        "holes": [False, True],
        "strided": [False, True],
        "cache_dtype": [None, FP8],
    },
    build=index_queries,
    edges=[{"cache_dtype": FP8, "dtype": torch.bfloat16, "dim": 128, "holes": True}],
    shrink=[{"sequences": ((9, 1), (70, 4))}],
    models={
        "qwen4_exp decode": {"sequences": DECODE, **QWEN4_SCORES},
        "qwen4_exp verify": {"sequences": VERIFY, **QWEN4_SCORES},
        "qwen4_exp prefill": {"sequences": PREFILL, **QWEN4_SCORES},
    },
    sweeps=SWEEPS,
)


def _topk_blocks(p: Params, make: Make) -> dict[str, Any]:
    scores = make.normal(p["tokens"], p["max_blocks"])
    match p["values"]:
        case "ties":  # what the sum of rectified products gives where few are positive
            scores = scores.round().clamp_min_(0.0)
        case "equal":
            scores.zero_()
    visible = make.integers(p["tokens"], 1, low=0, high=p["max_blocks"] + 1)
    if p["hidden"] == "causal":
        scores[torch.arange(p["max_blocks"]) >= visible] = -torch.inf
    elif p["hidden"] == "scattered":
        scores[make.integers(*scores.shape, low=0, high=3) == 0] = -torch.inf
    return {"scores": scores, "top_k": p["top_k"]}


def _topk_error(arguments: Mapping[str, Any], got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """0 for a right choice in any order, else infinite: as many as wanted, distinct, −1 last, with the best scores.

    Scores are compared as they are: no kernel has to compute on them, so a choice is among equals or wrong.
    """
    scores, blocks = arguments["scores"], got[0].long()
    if blocks.shape != wanted[0].shape:
        return float("inf")
    for row, mine, theirs in zip(scores, blocks.tolist(), wanted[0].long(), strict=True):
        best = theirs[theirs >= 0]
        count = len(best)
        chosen = mine[:count]
        if len(set(chosen)) != count or not all(0 <= block < len(row) for block in chosen):
            return float("inf")
        if any(block != -1 for block in mine[count:]) or row[chosen].sort().values.ne(row[best].sort().values).any():
            return float("inf")
    return 0.0


topk_blocks = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17],
        "max_blocks": [20, 0, 1, 8, 300],
        "top_k": [8, 1, 64, 20],
        "values": ["distinct", "ties", "equal"],
        "hidden": ["causal", "none", "scattered"],
    },
    build=_topk_blocks,
    edges=[{"tokens": 33, "max_blocks": 300, "top_k": 64, "values": "ties"}],
    shrink=[{"tokens": 3}, {"tokens": 17, "max_blocks": 300, "values": "ties"}],
    models={
        "qwen4_exp decode": {"tokens": 32, "max_blocks": 2048, "top_k": 512},
        "qwen4_exp prefill": {"tokens": 2048, "max_blocks": 2048, "top_k": 512},
    },
    compare=_topk_error,
    sweeps={
        "qwen4_exp decode": [{"max_blocks": 2048}, {"max_blocks": 65_536}],
        "qwen4_exp prefill": [{"max_blocks": 2048}, {"max_blocks": 16_384}],
    },
)


def _choose(p: Params, make: Make) -> Tensor:
    """Blocks of every token: distinct, some of them −1, anywhere; `wild` adds blocks that it does not see yet."""
    positions, top_k = _positions(_sequences(p)), p["top_k"]
    blocks = torch.full((len(positions), top_k), -1, dtype=torch.int32)
    for row, position in zip(blocks, positions, strict=True):
        complete = max(position + 1, 0) // p["ratio"]
        chosen = make.permutation(complete + 2 if p["chosen"] == "wild" else complete)[:top_k]
        if p["chosen"] == "some":
            chosen = chosen[: make.random.randint(0, len(chosen))]
        if p["chosen"] != "none":
            row[make.permutation(top_k, torch.int64)[: len(chosen)]] = chosen
    return blocks


def _sparse_attention(p: Params, make: Make) -> dict[str, Any]:
    ratio, dim, dtype, sequences = p["ratio"], p["dim"], p["dtype"], _sequences(p)
    (heads, kv_heads), page = p["heads"], ratio * p["blocks"]
    lengths, new, packing = _packing(sequences)
    table, pages = page_table(make, lengths, page)
    q = make.normal(sum(new), heads, dim, dtype=dtype)
    k, v = (
        scaled_cache(
            paged_cache(make, table, lengths, pages, page, kv_heads, dim, dtype=torch.float32),
            p["cache_dtype"] or dtype,
            scale,
        )
        for scale in p["scales"]
    )
    if p["holes"]:
        _punch(make, table)
    return {
        "q": strided(q) if p["strided"] else q,
        "k_cache": strided(k, dim=1) if p["strided"] else k,
        "v_cache": strided(v) if p["strided"] else v,
        "page_table": table,
        "blocks": _choose(p, make),
        **packing,
        "ratio": ratio,
        "scale": dim**-0.5,
        "k_scale": scale_tensor(p["scales"][0]),
        "v_scale": scale_tensor(p["scales"][1]),
    }


_QWEN4_ATTENTION = {
    "ratio": 4, "blocks": 16, "heads": (24, 2), "dim": 256, "top_k": 512, "chosen": "most", "dtype": torch.bfloat16
}  # fmt: skip


def _count_chosen(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Cached tokens that some query attends to, and pairs of a query and a token; absent pages count too."""
    ratio, blocks, pairs, cached = arguments["ratio"], arguments["blocks"].long(), 0, 0
    ends = arguments["cu_seqlens"].tolist()
    for length, first, last in zip(arguments["seq_lens"].tolist(), ends, ends[1:], strict=False):
        seen = torch.zeros(max(length, 0), dtype=torch.bool)
        for row, position in zip(blocks[first:last].cpu(), range(length - last + first, length), strict=True):
            if position >= 0:
                complete = (position + 1) // ratio
                chosen = row[(row >= 0) & (row < complete)]
                seen[: complete * ratio].view(-1, ratio)[chosen] = True
                seen[complete * ratio : position + 1] = True
                pairs += chosen.numel() * ratio + position + 1 - complete * ratio
        cached += int(seen.sum())
    return {"cached_tokens": cached, "pairs": pairs}


sparse_attention = CaseSet(
    axes={
        "sequences": SEQUENCES,
        "ratio": [4, 2, 1, 8],
        "blocks": [2, 1, 8],
        "heads": [(4, 2), (1, 1), (6, 2), (8, 1)],
        "dim": [16, 40, 256],
        "top_k": [3, 1, 9, 64],
        "chosen": ["most", "some", "none", "wild"],
        "dtype": FLOATS,
        "holes": [False, True],
        "strided": [False, True],
        "cache_dtype": [None, FP8],
        # Of keys and of values, None for none.
        "scales": [(None, None), (0.05, 2.0), (None, 0.02)],
    },
    build=_sparse_attention,
    counts=_count_chosen,
    edges=[
        {"sequences": SEQUENCES[6], "top_k": 64, "chosen": "wild"},
        {"cache_dtype": FP8, "scales": (0.05, 2.0), "dtype": torch.bfloat16, "dim": 256, "heads": (24, 2)},
    ],
    shrink=[{"sequences": ((9, 1), (70, 4))}],
    models={
        "qwen4_exp decode": {"sequences": DECODE, **_QWEN4_ATTENTION},
        "qwen4_exp decode, fp8 cache": {
            "sequences": DECODE,
            **_QWEN4_ATTENTION,
            "cache_dtype": FP8,
            "scales": (0.05, 0.1),
        },
        "qwen4_exp verify": {"sequences": VERIFY, **_QWEN4_ATTENTION},
        "qwen4_exp prefill": {"sequences": PREFILL, **_QWEN4_ATTENTION},
    },
    sweeps=SWEEPS,
)
