"""Inputs for the gated delta rule."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.cases import FLOATS
from tokenspeed_kernels.cases.conv import SPARE_SLOTS, choose_slots
from tokenspeed_kernels.cases.paging import cu_seqlens, strided
from tokenspeed_registry.cases import CaseSet, Make, Params


def _gdn_gates(p: Params, make: Make) -> dict[str, Any]:
    shape = p["tokens"], p["heads"]
    a, b = (make.normal(*shape, dtype=p["dtype"], scale=p["spread"]) for _ in range(2))
    return {
        "a": strided(a) if p["strided"] else a,
        "b": strided(b) if p["strided"] else b,
        "a_log": make.uniform(p["heads"], low=-2.0, high=3.0),
        "dt_bias": make.normal(p["heads"], scale=2.0),
    }


def _inputs(p: Params, make: Make, *rows: int, valid: Tensor) -> dict[str, Any]:
    """q, k, v, g and beta of `rows`; those where `valid` (of the first dims) is false hold NaN."""
    k_heads, v_heads = p["heads"]
    q, k = (make.normal(*rows, k_heads, p["d_k"]) for _ in range(2))
    if p["keys"] == "similar":
        # Tokens that write over each other: within a chunk their updates depend on one another as much as they can.
        k = 0.2 * k + make.normal(k_heads, p["d_k"])
    if not p["normalise"]:
        # Some as long as the rule allows without growing, others so short that normalising them would show.
        q, k = (
            torch.nn.functional.normalize(x, dim=-1) * make.uniform(*rows, k_heads, 1, low=0.5, high=1.0)
            for x in (q, k)
        )
    v = make.normal(*rows, v_heads, p["d_v"])
    g = {
        "usual": -make.uniform(*rows, v_heads, low=0.0, high=1.5),
        "slow": -make.uniform(*rows, v_heads, low=0.0, high=0.002),
        # Most tokens keep nearly everything, some nearly nothing, side by side.
        "strong": torch.tensor([0.0, -0.01, -0.3, -12.0, -80.0])[
            make.integers(*rows, v_heads, low=0, high=5, dtype=torch.int64)
        ],
    }[p["gates"]]
    beta = make.uniform(*rows, v_heads, low=0.0, high=1.0)
    for x in (q, k, v, g, beta):
        x[~valid] = torch.nan
    arguments = {name: x.to(p["dtype"]) for name, x in (("q", q), ("k", k), ("v", v))}
    if p["strided"]:
        arguments = {name: strided(x) for name, x in arguments.items()}
    return arguments | {"g": g, "beta": beta, "scale": p["d_k"] ** -0.5, "normalise": p["normalise"]}


def _pool(p: Params, make: Make, slots: int, used: Tensor) -> Tensor:
    """States of which those not `used` are NaN."""
    shape = p["heads"][1], p["d_v"], p["d_k"]
    state = torch.full((slots, *shape), torch.nan, dtype=p["state_dtype"])
    used = used[used >= 0].long()
    state[used] = make.normal(used.numel(), *shape, dtype=p["state_dtype"], scale=0.3)
    return state


def _gdn_decode(p: Params, make: Make) -> dict[str, Any]:
    slots = choose_slots(make, p["batch"], p["padding"])
    inputs = _inputs(p, make, p["batch"], valid=slots >= 0)
    return inputs | {"slots": slots, "state": _pool(p, make, p["batch"] + SPARE_SLOTS, slots)}


def _gdn_prefill(p: Params, make: Make) -> dict[str, Any]:
    lengths = p["lengths"]
    slots = choose_slots(make, len(lengths), p["padding"])
    every = torch.arange(len(lengths))
    fresh = {"mixed": every % 2 == 0, "all": every >= 0, "none": every < 0}[p["fresh"]]
    valid = (slots >= 0).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    inputs = _inputs(p, make, sum(lengths), valid=valid)
    state = _pool(p, make, len(lengths) + SPARE_SLOTS, slots[~fresh])
    return inputs | {"slots": slots, "state": state, "cu_seqlens": cu_seqlens(lengths), "fresh": fresh}


def _gdn_verify(p: Params, make: Make) -> dict[str, Any]:
    batch, q_len = p["batch"], p["q_len"]
    initial = choose_slots(make, batch, p["padding"])
    free = torch.tensor(sorted(set(range(batch + SPARE_SLOTS)) - set(initial.tolist())), dtype=torch.int32)
    more = torch.arange(batch + SPARE_SLOTS, batch * (1 + q_len) + SPARE_SLOTS, dtype=torch.int32)
    slots = torch.cat([free, more])[make.permutation(batch * q_len, torch.int64)].reshape(batch, q_len)
    if p["keep"] == "last":
        slots[:, :-1] = -1
    elif p["keep"] == "in place":
        slots[:, 0] = initial
    state = _pool(p, make, batch * (1 + q_len) + SPARE_SLOTS, initial)
    inputs = _inputs(p, make, batch, q_len, valid=initial >= 0)
    return inputs | {"initial_slots": initial, "slots": slots, "state": state}


def _buffers(p: Params, make: Make, slots: Tensor, kept: Tensor, capacity: int) -> dict[str, Any]:
    """Pool and buffers of kept tokens; rows that are not kept hold NaN."""
    pool = slots.numel() + SPARE_SLOTS
    valid = torch.zeros(pool, capacity, dtype=torch.bool)
    for slot, count in zip(slots.tolist(), kept.tolist(), strict=True):
        if slot >= 0:
            valid[slot, :count] = True
    old = _inputs({**p, "strided": False}, make, pool, capacity, valid=valid)
    buffers = {f"kept_{name}": old[name] for name in ("k", "v", "g", "beta")}
    return buffers | {"slots": slots, "kept": kept, "state": _pool(p, make, pool, slots)}


def _gdn_verify_replay(p: Params, make: Make) -> dict[str, Any]:
    batch, q_len = p["batch"], p["q_len"]
    capacity = p["rounds"] * q_len + p["rounds"] // 3
    slots = choose_slots(make, batch, p["padding"])
    kept = {
        "random": make.integers(batch, low=0, high=capacity + 1),
        "zero": torch.zeros(batch, dtype=torch.int32),
        "few": (torch.arange(batch, dtype=torch.int32) + 1) % q_len,
        "fits": torch.full((batch,), capacity - q_len, dtype=torch.int32),
        "folds": torch.full((batch,), min(capacity - q_len + 1, capacity), dtype=torch.int32),
        "full": torch.full((batch,), capacity, dtype=torch.int32),
    }[p["kept"]]
    inputs = _inputs(p, make, batch, q_len, valid=slots >= 0)
    return inputs | _buffers(p, make, slots, kept, capacity)


def _gdn_fold(p: Params, make: Make) -> dict[str, Any]:
    batch, capacity = p["batch"], p["capacity"]
    kept = {
        "random": make.integers(batch, low=0, high=capacity + 1),
        "some": torch.where(torch.arange(batch) % 2 == 1, capacity, 0).int(),
        "zero": torch.zeros(batch, dtype=torch.int32),
        "full": torch.full((batch,), capacity, dtype=torch.int32),
    }[p["kept"]]
    buffers = _buffers(p, make, choose_slots(make, batch, p["padding"]), kept, capacity)
    return buffers | {"normalise": p["normalise"]}


def _gated_rms_norm(p: Params, make: Make) -> dict[str, Any]:
    shape = p["tokens"], p["heads"], p["dim"]
    x, gate = make.normal(*shape, dtype=p["dtype"], scale=p["scale"]), make.normal(*shape, dtype=p["dtype"], scale=3.0)
    return {
        "x": strided(x) if p["strided"] else x,
        "gate": strided(gate) if p["strided"] else gate,
        "weight": make.uniform(p["dim"], low=0.5, high=1.5, dtype=p["weight_dtype"]),
        "eps": 1e-6,
        "activation": p["activation"],
    }


_RULE: dict[str, list[Any]] = {
    "heads": [(1, 2), (2, 6), (1, 1), (3, 3)],
    "d_k": [128, 64, 16, 24],
    "d_v": [128, 64, 16, 40],
    "dtype": FLOATS,
    "state_dtype": [torch.float32, torch.bfloat16, torch.float16],
    "gates": ["usual", "slow", "strong"],
    "keys": ["random", "similar"],
    "normalise": [True, False],
    "padding": ["none", "middle", "ends", "all"],
    "strided": [False, True],
}
_QWEN: Params = {"heads": (16, 48), "dtype": torch.bfloat16}
_BF16: Params = {"dtype": torch.bfloat16, "padding": "middle", "strided": True}
_BATCHES = (1, 8, 32, 128, 256)

gdn_gates = CaseSet(
    axes={
        "tokens": [5, 0, 1, 33],
        "heads": [48, 1, 3],
        "dtype": FLOATS,
        "spread": [1.0, 20.0],
        "strided": [False, True],
    },
    build=_gdn_gates,
    shrink=[{"tokens": 5}],
    models={"qwen4_exp decode": {"tokens": 32, "dtype": torch.bfloat16}},
    sweeps={"qwen4_exp decode": [{"tokens": tokens} for tokens in (1, 32, 8192)]},
)

gdn_decode = CaseSet(
    axes={"batch": [3, 0, 1, 7], **_RULE},
    build=_gdn_decode,
    edges=[_BF16, {**_BF16, "state_dtype": torch.bfloat16, "gates": "strong"}],
    shrink=[{"batch": 2, "padding": "ends"}],
    models={"qwen4_exp decode": {"batch": 32, **_QWEN}, "qwen4_exp decode, one request": {"batch": 1, **_QWEN}},
    sweeps={"qwen4_exp decode": [{"batch": batch} for batch in _BATCHES]},
)

gdn_prefill = CaseSet(
    axes={
        "lengths": [(5, 3), (), (0,), (1,), (63,), (64,), (65,), (127, 2), (128,), (129,), (0, 70, 1, 0, 130, 64)],
        "fresh": ["mixed", "all", "none"],
        **_RULE,
    },
    build=_gdn_prefill,
    edges=[
        edge | {"gates": gates}
        for gates in ("slow", "strong")
        for edge in (
            {"lengths": (130, 0, 65, 1), "keys": "similar", "fresh": "none"},
            {"lengths": (64, 63, 1), **_BF16},
        )
    ],
    shrink=[{"lengths": (3, 1)}],
    models={
        "qwen4_exp prefill": {"lengths": (8192,), **_QWEN},
        "qwen4_exp prefill, agent turns": {"lengths": (800,) * 10, "fresh": "none", **_QWEN},
    },
    sweeps={
        "qwen4_exp prefill": [
            {"lengths": lengths, "heads": heads}
            for heads in ((16, 48), (4, 12))
            for lengths in ((1024,), (8192,), (65536,), (1024,) * 8, (16384,) * 2, (8192,) * 8)
        ]
    },
)

gdn_verify = CaseSet(
    axes={"batch": [2, 0, 1, 4], "q_len": [2, 1, 4, 8], "keep": ["all", "last", "in place"], **_RULE},
    build=_gdn_verify,
    edges=[_BF16, {**_BF16, "keep": "last", "gates": "strong"}],
    shrink=[{"batch": 1}],
    models={"qwen4_exp verify, 3 drafts": {"batch": 32, "q_len": 4, **_QWEN}},
    sweeps={"qwen4_exp verify, 3 drafts": [{"batch": batch} for batch in _BATCHES]},
)


def _count_kept(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Sequences that are no padding, their kept tokens, and those of them that fold."""
    kept = arguments["kept"][arguments["slots"] >= 0]
    folds = kept + arguments["k"].shape[1] > arguments["kept_k"].shape[1]
    return {"sequences": kept.numel(), "kept_tokens": int(kept.sum()), "folded": int(folds.sum())}


gdn_verify_replay = CaseSet(
    axes={
        "batch": [2, 0, 1, 4],
        "q_len": [2, 1, 4, 8],
        "rounds": [2, 1, 3],
        "kept": ["random", "zero", "fits", "folds", "full"],
        **_RULE,
    },
    build=_gdn_verify_replay,
    counts=_count_kept,
    edges=[{**_BF16, "kept": kept, "rounds": 3} for kept in ("fits", "folds")],
    shrink=[{"batch": 1}],
    models={"qwen4_exp verify, 3 drafts": {"batch": 32, "q_len": 4, **_QWEN}},
    sweeps={
        # Few enough kept that none fold, then, as in the midst of generation, some.
        "qwen4_exp verify, 3 drafts": [{"batch": batch, "kept": "few"} for batch in _BATCHES]
        + [{"batch": batch} for batch in (1, 32, 256)]
    },
)

gdn_fold = CaseSet(
    axes={
        "batch": [3, 0, 1, 4],
        "capacity": [4, 0, 1, 8, 13],
        # "some": nothing of the first sequence, everything of the next, and so on.
        "kept": ["random", "some", "zero", "full"],
        **{axis: values for axis, values in _RULE.items() if axis != "strided"},
    },
    build=_gdn_fold,
    edges=[
        *({"dtype": torch.bfloat16, "padding": "middle", "kept": kept} for kept in ("some", "full")),
        {"batch": 1, "capacity": 70, "kept": "full", "gates": "strong", "d_k": 16, "d_v": 24},
    ],
    shrink=[{"batch": 1}],
    models={"qwen4_exp, 3 drafts": {"batch": 32, "capacity": 8, **_QWEN}},
    sweeps={"qwen4_exp, 3 drafts": [{"batch": batch} for batch in _BATCHES]},
)

gated_rms_norm = CaseSet(
    axes={
        "tokens": [3, 0, 1, 17],
        "heads": [2, 1, 48],
        "dim": [128, 64, 1, 100],
        "dtype": FLOATS,
        "weight_dtype": FLOATS,
        "activation": ["sigmoid", "silu"],
        # Small enough for eps to show.
        "scale": [1.0, 1e-3],
        "strided": [False, True],
    },
    build=_gated_rms_norm,
    shrink=[{"tokens": 3}, {"tokens": 17, "dtype": torch.float16}],
    models={"qwen4_exp prefill": {"tokens": 8192, "heads": 48, "dtype": torch.bfloat16}},
    sweeps={"qwen4_exp prefill": [{"tokens": tokens} for tokens in (1, 32, 1024, 8192)]},
)
