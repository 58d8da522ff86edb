"""Inputs for the causal convolution."""

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernels.cases import FLOATS
from tokenspeed_kernels.cases.paging import cu_seqlens, strided
from tokenspeed_registry.cases import CaseSet, Make, Params

SPARE_SLOTS = 2
"""Slots of each pool that the call does not use; they hold NaN, which no result may show."""


def choose_slots(make: Make, count: int, padding: str) -> Tensor:
    """`count` distinct slots in random order, of which some become −1: none, middle, ends or all."""
    slots = make.permutation(count + SPARE_SLOTS)[:count]
    if padding == "all":
        slots[:] = -1
    elif padding == "middle":
        slots[count // 2 : count // 2 + 1] = -1
    elif padding == "ends":
        slots[:1] = -1
        slots[-1:] = -1
    return slots


def _common(p: Params, make: Make, count: int) -> dict[str, Any]:
    """A history has `extra` more rows than the taps need and some sequence drops; dropped rows hold NaN."""
    drops = make.integers(count, low=0, high=p["dropped"] + 1)
    drops[1:2] = p["dropped"]
    history = (p["width"] - 1) * p["dilation"] + p["extra"] + p["dropped"]
    slots = choose_slots(make, count, p["padding"])
    state = torch.full((count + SPARE_SLOTS, history, p["channels"]), torch.nan, dtype=p["dtype"])
    used = slots[slots >= 0].long()
    state[used] = make.normal(used.numel(), history, p["channels"], dtype=p["dtype"])
    for slot, drop in zip(slots.tolist(), drops.tolist(), strict=True):
        if slot >= 0:
            state[slot, history - drop :] = torch.nan
    return {
        "weight": make.normal(p["channels"], p["width"], dtype=p["dtype"]),
        "state": state,
        "slots": slots,
        "dropped": drops if p["dropped"] else None,
        "dilation": p["dilation"],
        "activation": p["activation"],
    }


def _causal_conv_prefill(p: Params, make: Make) -> dict[str, Any]:
    lengths = p["lengths"]
    arguments = _common(p, make, len(lengths))
    x = make.normal(sum(lengths), p["channels"], dtype=p["dtype"])
    fresh = {
        "mixed": torch.arange(len(lengths)) % 2 == 0,
        "all": torch.ones(len(lengths), dtype=torch.bool),
        "none": torch.zeros(len(lengths), dtype=torch.bool),
    }[p["fresh"]]
    offsets = cu_seqlens(lengths)
    for i, slot in enumerate(arguments["slots"].tolist()):
        if slot < 0:
            x[offsets[i] : offsets[i + 1]] = torch.nan
        elif fresh[i]:
            arguments["state"][slot] = torch.nan
    return arguments | {"x": strided(x) if p["strided"] else x, "cu_seqlens": offsets, "fresh": fresh}


def _causal_conv_update(p: Params, make: Make) -> dict[str, Any]:
    batch, q_len = p["batch"], p["q_len"]
    arguments = _common(p, make, batch)
    x = make.normal(batch, q_len, p["channels"], dtype=p["dtype"])
    x[arguments["slots"] < 0] = torch.nan
    return arguments | {"x": strided(x) if p["strided"] else x}


_AXES: dict[str, list[Any]] = {
    "channels": [64, 1, 5, 200],
    "width": [4, 1, 2, 3],
    "dilation": [1, 3, 2],
    "extra": [0, 1, 4],
    # The largest count of rows that any sequence drops.
    "dropped": [0, 1, 3, 8],
    "dtype": FLOATS,
    "activation": ["silu", "none"],
    "padding": ["none", "middle", "ends", "all"],
    "strided": [False, True],
}

causal_conv_prefill = CaseSet(
    axes={
        "lengths": [(5, 3), (), (0,), (1,), (2, 1, 0, 3), (0, 0, 4), (17, 1, 30), (65,)],
        "fresh": ["mixed", "all", "none"],
        **_AXES,
    },
    build=_causal_conv_prefill,
    edges=[
        {"lengths": (1, 2, 3, 4, 9, 10, 11), "dilation": 3, "fresh": fresh, "dtype": dtype, "padding": "middle"}
        for fresh in ("mixed", "none")
        for dtype in FLOATS
    ]
    + [
        {"lengths": (0, 1, 0, 2, 5), "dropped": 4, "dilation": dilation, "fresh": fresh, "dtype": dtype}
        for dilation, fresh, dtype in ((1, "none", torch.float32), (3, "mixed", torch.bfloat16))
    ],
    shrink=[{"lengths": (5, 3)}, {"lengths": (17, 1), "dtype": torch.float16}],
    models={
        "qwen4_exp GDN prefill": {"lengths": (8192,), "channels": 10240, "dtype": torch.bfloat16},
        "qwen4_exp n-gram prefill": {"lengths": (8192,), "channels": 10240, "dilation": 3, "dtype": torch.bfloat16},
    },
    sweeps={
        "qwen4_exp GDN prefill": [{"lengths": lengths} for lengths in ((1024,), (8192,), (800,) * 10)],
        "qwen4_exp n-gram prefill": [{"lengths": (8192,)}],
    },
)

causal_conv_update = CaseSet(
    axes={
        "batch": [3, 0, 1, 6],
        "q_len": [1, 2, 4, 8, 11],
        **_AXES,
    },
    build=_causal_conv_update,
    edges=[
        {"q_len": q_len, "dropped": dropped, "dilation": dilation, "dtype": dtype, "padding": padding, "extra": 1}
        for q_len, dropped, padding in (
            (0, 4, "none"),
            (1, 4, "none"),
            (4, 0, "middle"),
            (4, 4, "middle"),
            (2, 4, "none"),
        )
        for dilation, dtype in ((1, torch.float32), (3, torch.bfloat16))
    ],
    shrink=[{"batch": 3}, {"batch": 2, "dtype": torch.float16}],
    models={
        "qwen4_exp GDN decode": {"batch": 32, "channels": 10240, "dtype": torch.bfloat16},
        "qwen4_exp GDN verify": {
            "batch": 32,
            "q_len": 4,
            "dropped": 3,
            "channels": 10240,
            "dtype": torch.bfloat16,
        },
        "qwen4_exp n-gram verify": {
            "batch": 32,
            "q_len": 4,
            "dropped": 3,
            "channels": 10240,
            "dilation": 3,
            "dtype": torch.bfloat16,
        },
    },
    sweeps={
        model: [{"batch": batch} for batch in (1, 32, 256)]
        for model in ("qwen4_exp GDN decode", "qwen4_exp GDN verify", "qwen4_exp n-gram verify")
    },
)
