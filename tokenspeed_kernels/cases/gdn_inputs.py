"""Inputs for the op that makes the gated delta rule's inputs: those of the convolution and of the gates."""

from typing import Any

import torch

from tokenspeed_kernels.cases.conv import causal_conv_prefill, causal_conv_update
from tokenspeed_kernels.cases.gdn import gdn_gates
from tokenspeed_registry.cases import CaseSet, Make, Params


def _convolution(source: CaseSet, p: Params, make: Make) -> dict[str, Any]:
    arguments = source.build({**p, "dilation": 1, "activation": "silu"}, make)
    return {name: value for name, value in arguments.items() if name not in ("dilation", "activation")}


def _update(p: Params, make: Make) -> dict[str, Any]:
    arguments = _convolution(causal_conv_update, p, make)
    gates = gdn_gates.build({**p, "tokens": p["batch"] * p["q_len"]}, make)
    for name in ("a", "b"):
        gates[name] = gates[name].unflatten(0, (p["batch"], p["q_len"]))
        gates[name][arguments["slots"] < 0] = torch.nan
    return arguments | gates


def _prefill(p: Params, make: Make) -> dict[str, Any]:
    arguments = _convolution(causal_conv_prefill, p, make)
    gates = gdn_gates.build({**p, "tokens": sum(p["lengths"])}, make)
    padding = (arguments["slots"] < 0).repeat_interleave(arguments["cu_seqlens"].diff())
    for name in ("a", "b"):
        gates[name][padding] = torch.nan
    return arguments | gates


_AXES: dict[str, list[Any]] = {
    **{axis: list(values) for axis, values in causal_conv_update.axes.items()},
    "heads": [48, 1, 3],
    "spread": [1.0, 20.0],
}
for _axis in ("batch", "q_len", "dilation", "activation"):
    del _AXES[_axis]
_QWEN: Params = {"channels": 10240, "dtype": torch.bfloat16}

gdn_inputs_update = CaseSet(
    axes={"batch": [3, 0, 1, 6], "q_len": [1, 2, 4, 8], **_AXES},
    build=_update,
    edges=[
        {"q_len": q_len, "dropped": dropped, "dtype": dtype, "padding": "middle", "strided": True}
        for q_len, dropped in ((0, 4), (1, 4), (4, 0), (4, 4))
        for dtype in (torch.float32, torch.bfloat16)
    ],
    shrink=[{"batch": 3}, {"batch": 2, "dtype": torch.float16}],
    models={
        "qwen4_exp decode": {"batch": 32, **_QWEN},
        "qwen4_exp verify, 3 drafts": {"batch": 32, "q_len": 4, "dropped": 3, **_QWEN},
    },
    sweeps={
        model: [{"batch": batch} for batch in (1, 32, 256)]
        for model in ("qwen4_exp decode", "qwen4_exp verify, 3 drafts")
    },
)

gdn_inputs_prefill = CaseSet(
    axes={
        "lengths": causal_conv_prefill.axes["lengths"],
        "fresh": causal_conv_prefill.axes["fresh"],
        **_AXES,
    },
    build=_prefill,
    edges=[
        {"lengths": (1, 2, 3, 4, 9, 10, 11), "fresh": fresh, "dtype": dtype, "padding": "middle", "strided": True}
        for fresh, dtype in (("mixed", torch.float32), ("none", torch.bfloat16))
    ],
    shrink=[{"lengths": (5, 3)}, {"lengths": (17, 1), "dtype": torch.float16}],
    models={"qwen4_exp prefill": {"lengths": (8192,), **_QWEN}},
    sweeps={"qwen4_exp prefill": [{"lengths": lengths} for lengths in ((1024,), (8192,), (800,) * 10)]},
)
