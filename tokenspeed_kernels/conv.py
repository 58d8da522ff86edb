"""Causal depthwise convolution over packed sequences with a rolling history of inputs.

Channel c of token t becomes activation(Σ_j weight[c, j] · x[t − (width−1−j) · dilation, c]); what lies before the
sequence is zero. The sum is float32 and rounded to x's dtype before the activation. What the ops share:

`x`: inputs of the new tokens, before the convolution. May be strided but for the last dim.
`weight`: taps of each channel; the last one is the current token's. There is no bias.
`state`: the caller's pool of histories, one a slot: the last `history` inputs of a sequence, oldest first.
`dropped`: how many of the newest rows of each history do not count; 0 where not given. They are taken out before the
call's own tokens come in. So inputs that turned out wrong, such as rejected drafts, are taken back by the next call,
whichever op it is and however many tokens it brings; without any, it does just that. `history` must exceed
(width−1) · dilation, what the taps reach back over, by at least the largest count.
`slots`: the slot of each sequence, no two the same; −1 marks padding: nothing of it is read or written, and its output
is zero.
`dilation`: tokens between taps, 1 for an ordinary convolution.
`activation`: "silu", or "none" for the bare sum.

What a history holds: call the rows true that are the sequence's inputs, or the zeros before its start. A fresh prefill
leaves all of them true. Where v are, a call of n tokens that drops d leaves the newest min(history, v − d + n) true,
its own tokens last. It takes v − d ≥ (width−1) · dilation; that holds in every call, with a history as long as said, if
only tokens of the sequence's previous call are dropped. With d > n there is nothing to put at the old end: the d − n
oldest rows become zeros, which are not true.

Source: the short convolutions of Mamba, arXiv:2312.00752, and Gated Delta Networks, arXiv:2412.06464; the dilated one
of the n-gram block in Qwen3.8.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from tokenspeed_registry import ContentError, Cost, Indices, Offsets, Signature, op, rounded_sum

_REACH = "history >= (width - 1) * dilation"


@dataclass(frozen=True)
class Droppable:
    """Counts of history rows without which the taps still have all of theirs."""

    argument: str
    needs: tuple[str, ...] = ("history", "width", "dilation")

    def verify(self, op: str, values: Tensor, dims: Mapping[str, int]) -> None:
        limit = dims["history"] - (dims["width"] - 1) * dims["dilation"]
        for count in values.tolist():
            if not 0 <= count <= limit:
                expected = f"counts from 0 to history-(width-1)*dilation={limit}"
                raise ContentError(op, self.argument, expected, str(count))


def _flops(s: Signature) -> int:
    return 2 * s["width"] * s.numel("x")


def _history_bytes(s: Signature, seqs: int) -> int:
    """Histories read and written once."""
    return 2 * seqs * s["history"] * s["channels"] * s.dtype("state").itemsize


def _tolerance(s: Signature, role: str) -> float:
    """The output is rounded before and after the activation; the history is a copy."""
    return 0.0 if role == "state" else rounded_sum(s.dtype(role), terms=s["width"], roundings=2)


def _drop(history: Tensor, count: int) -> Tensor:
    """One history [history channels] without its `count` newest rows, and with as many zeros before the oldest."""
    return torch.cat([torch.zeros_like(history[:count]), history[: history.shape[0] - count]])


def _convolve(inputs: Tensor, first: int, weight: Tensor, dilation: int, activation: str) -> Tensor:
    """Outputs [tokens channels] in float64 for the tokens from row `first` on of one sequence's inputs.

    At least (width−1) · dilation rows lie before `first`.
    """
    outputs = torch.zeros(inputs.shape[0] - first, inputs.shape[1], dtype=torch.float64, device=inputs.device)
    width = weight.shape[1]
    for i in range(outputs.shape[0]):
        for tap in range(width):
            outputs[i] += weight[:, tap].double() * inputs[first + i - (width - 1 - tap) * dilation].double()
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
    checks=(Indices("slots", "pool"), Offsets("cu_seqlens", "tokens"), Droppable("dropped")),
    cost=lambda s: Cost(
        flops=_flops(s),
        nbytes=s.nbytes("x", "weight", "slots", "cu_seqlens", "fresh", "dropped", "y") + _history_bytes(s, s["seqs"]),
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
    dropped: Int32[Tensor, "seqs"] | None = None,
    dilation: int = 1,
    activation: Literal["none", "silu"] = "silu",
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens channels"]:
    """All tokens of packed sequences, after their histories in `state[slots]`, which take them in.

    `x`, `weight`, `state`, `slots`, `dropped`, `dilation`, `activation`: see the module.
    `cu_seqlens`: sequence i is tokens cu_seqlens[i] to cu_seqlens[i+1], possibly none.
    `fresh`: true where nothing comes before the sequence: the history is zero, and what its slot holds, NaN included,
    is not looked at, so that `dropped` changes nothing. False: the sequence goes on from its slot, so that a prompt
    may come in pieces.

    Returns the outputs, in x's dtype. Raises `ArgumentError` for arguments that do not fit, also for a history shorter
    than (width−1) · dilation; `ContentError` for a slot outside the pool, bad offsets, or a count that leaves too
    little of the history, where those are checked (short CPU tensors, or debug mode).

    Source: Mamba, section 3.4; the streaming history is what its decoding keeps. Taking tokens back is this project's
    own.
    """
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    history = state.shape[1]
    bounds = cu_seqlens.tolist()
    counts = [0] * slots.numel() if dropped is None else dropped.tolist()
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        before = torch.zeros_like(state[slot]) if fresh[i] else _drop(state[slot], counts[i])
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
    where=("width >= 1", "dilation >= 1", _REACH),
    checks=(Indices("slots", "pool"), Droppable("dropped")),
    cost=lambda s: Cost(
        flops=_flops(s), nbytes=s.nbytes("x", "weight", "slots", "dropped", "y") + _history_bytes(s, s["batch"])
    ),
    tolerance=_tolerance,
)
def causal_conv_update(
    x: Float[Tensor, "batch q_len channels"],
    weight: Float[Tensor, "channels width"],
    state: Float[Tensor, "pool history channels"],
    slots: Int32[Tensor, "batch"],
    *,
    dropped: Int32[Tensor, "batch"] | None = None,
    dilation: int = 1,
    activation: Literal["none", "silu"] = "silu",
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "batch q_len channels"]:
    """`q_len` tokens of each sequence, after its history in `state[slots]`, which takes them in.

    `x`, `weight`, `state`, `slots`, `dropped`, `dilation`, `activation`: see the module. Where the call before verified
    q drafts, of which the first a were accepted, `dropped` is q − a, whatever this call's `q_len`.

    Returns the outputs, in x's dtype. Raises `ArgumentError` for arguments that do not fit, also for a history shorter
    than (width−1) · dilation; `ContentError` for a slot outside the pool, or a count that leaves too little of the
    history, where those are checked (short CPU tensors, or debug mode).

    Source: Mamba, section 3.4; taking rejected tokens back is this project's own.
    """
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    history = state.shape[1]
    counts = [0] * slots.numel() if dropped is None else dropped.tolist()
    for b, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        inputs = torch.cat([_drop(state[slot], counts[b]), x[b]])
        result[b] = _convolve(inputs, history, weight, dilation, activation)
        state[slot] = inputs[inputs.shape[0] - history :]
    return result
