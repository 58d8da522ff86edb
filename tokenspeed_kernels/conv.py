"""Causal depthwise convolution over packed sequences with a rolling history of inputs.

Channel c of token t becomes activation(Σ_j weight[c, j] · x[t − (width−1−j) · dilation, c]); what lies before the
sequence is zero. The sum is float32 and rounded to x's dtype before the activation. What the ops share:

`x`: inputs of the new tokens, before the convolution. May be strided but for the last dim.
`weight`: taps of each channel; the last one is the current token's. There is no bias.
`state`: the caller's pool of histories, one a slot: the last `history` inputs of a sequence, oldest first.
`slots`: the slot of each sequence, no two the same; −1 marks padding: nothing of it is read or written, and its output
is zero.
`dilation`: tokens between taps, 1 for an ordinary convolution.
`activation`: "silu", or "none" for the bare sum.

Source: the short convolutions of Mamba, arXiv:2312.00752, and Gated Delta Networks, arXiv:2412.06464; the dilated one
of the n-gram block in Qwen3.8.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from tokenspeed_registry import Cost, Indices, Lengths, Offsets, Signature, op, rounded_sum

_REACH = "history >= (width - 1) * dilation"


def _flops(s: Signature) -> int:
    return 2 * s["width"] * s.numel("x")


def _history_bytes(s: Signature, seqs: int) -> int:
    """Histories read and written once."""
    return 2 * seqs * s["history"] * s["channels"] * s.dtype("state").itemsize


def _tolerance(s: Signature, role: str) -> float:
    """The output is rounded before and after the activation; the history is a copy."""
    return 0.0 if role == "state" else rounded_sum(s.dtype(role), terms=s["width"], roundings=2)


def _convolve(inputs: Tensor, first: int, weight: Tensor, dilation: int, activation: str) -> Tensor:
    """Outputs [tokens channels] in float64 for the tokens from row `first` on of one sequence's inputs."""
    outputs = torch.zeros(inputs.shape[0] - first, inputs.shape[1], dtype=torch.float64, device=inputs.device)
    width = weight.shape[1]
    for i in range(outputs.shape[0]):
        for tap in range(width):
            source = first + i - (width - 1 - tap) * dilation
            if source >= 0:
                outputs[i] += weight[:, tap].double() * inputs[source].double()
    rounded = outputs.to(inputs.dtype).double()
    return rounded / (1 + (-rounded).exp()) if activation == "silu" else rounded


@op(
    family="conv",
    cases="tokenspeed_kernels.cases.conv:causal_conv_prefill",
    outputs=("y",),
    output_dtypes={"y": "x"},
    static=("channels", "width", "history"),
    mutates=("state",),
    strided=("x",),
    same_dtype=(("x", "weight", "state"),),
    where=("width >= 1", "dilation >= 1", _REACH),
    checks=(Indices("slots", "pool"), Offsets("cu_seqlens", "tokens")),
    cost=lambda s: Cost(
        flops=_flops(s),
        nbytes=s.nbytes("x", "weight", "slots", "cu_seqlens", "fresh", "y") + _history_bytes(s, s["seqs"]),
    ),
    tolerance=_tolerance,
)
def causal_conv_prefill(
    x: Float[Tensor, "tokens channels"],
    weight: Float[Tensor, "channels width"],
    state: Float[Tensor, "pool history channels"],
    slots: Int32[Tensor, "seqs"],
    cu_seqlens: Int32[Tensor, "seqs+1"],
    fresh: Bool[Tensor, "seqs"],
    *,
    dilation: int = 1,
    activation: Literal["none", "silu"] = "silu",
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens channels"]:
    """All tokens of packed sequences; `state[slots]` then holds each one's last `history` inputs.

    `x`, `weight`, `state`, `slots`, `dilation`, `activation`: see the module.
    `cu_seqlens`: sequence i is tokens cu_seqlens[i] to cu_seqlens[i+1], possibly none.
    `fresh`: true where nothing comes before the sequence: the history is zero, and what its slot holds, NaN included,
    is not looked at. False: the sequence goes on from its slot, so that a prompt may come in pieces.

    Returns the outputs, in x's dtype. Raises `ArgumentError` for arguments that do not fit, also for a history shorter
    than (width−1) · dilation; `ContentError` for a slot outside the pool or bad offsets where those are checked (short
    CPU tensors, or debug mode).

    Source: Mamba, section 3.4; the streaming history is what its decoding keeps.
    """
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    history = state.shape[1]
    bounds = cu_seqlens.tolist()
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        before = torch.zeros_like(state[slot]) if fresh[i] else state[slot].clone()
        inputs = torch.cat([before, x[bounds[i] : bounds[i + 1]]])
        result[bounds[i] : bounds[i + 1]] = _convolve(inputs, history, weight, dilation, activation)
        state[slot] = inputs[inputs.shape[0] - history :]
    return result


@op(
    family="conv",
    cases="tokenspeed_kernels.cases.conv:causal_conv_update",
    outputs=("y",),
    output_dtypes={"y": "x"},
    static=("q_len", "channels", "width", "history"),
    mutates=("state",),
    strided=("x",),
    same_dtype=(("x", "weight", "state"),),
    where=(
        "width >= 1",
        "dilation >= 1",
        _REACH,
        "accepted is None or history >= (width - 1) * dilation + q_len",
    ),
    checks=(Indices("slots", "pool"), Lengths("accepted", ("q_len",))),
    cost=lambda s: Cost(
        flops=_flops(s), nbytes=s.nbytes("x", "weight", "slots", "accepted", "y") + _history_bytes(s, s["batch"])
    ),
    tolerance=_tolerance,
)
def causal_conv_update(
    x: Float[Tensor, "batch q_len channels"],
    weight: Float[Tensor, "channels width"],
    state: Float[Tensor, "pool history channels"],
    slots: Int32[Tensor, "batch"],
    *,
    accepted: Int32[Tensor, "batch"] | None = None,
    dilation: int = 1,
    activation: Literal["none", "silu"] = "silu",
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "batch q_len channels"]:
    """`q_len` tokens of each sequence, after its history in `state[slots]`, which takes them in.

    `x`, `weight`, `state`, `slots`, `dilation`, `activation`: see the module.
    `accepted`: None: every row of the history counts. Else, for speculation: the newest q_len rows of the history are
    the tokens of the previous call, of which the first `accepted[b]` (0 to q_len) count; the rest is dropped. Where no
    row is in doubt, as after a prefill, pass q_len. It takes a history of at least (width−1) · dilation + q_len rows.

    After the call the history ends with this call's tokens, and what counted lies before them. Returns the outputs, in
    x's dtype. Raises `ArgumentError` for arguments that do not fit, also for a history that is too short;
    `ContentError` for a slot outside the pool or a count above q_len where those are checked (short CPU tensors, or
    debug mode).

    Source: Mamba, section 3.4; taking rejected tokens back is this project's own.
    """
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    q_len, history = x.shape[1], state.shape[1]
    for b, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        dropped = 0 if accepted is None else q_len - int(accepted[b])
        before = state[slot, : history - dropped].clone()
        inputs = torch.cat([before, x[b]])
        result[b] = _convolve(inputs, before.shape[0], weight, dilation, activation)
        state[slot] = inputs[inputs.shape[0] - history :]
    return result
