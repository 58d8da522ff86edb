"""Causal depthwise convolution over packed sequences with a rolling history of inputs.

Channel c of token t becomes activation(Σ_j weight[c, j] · x[t − (width−1−j) · dilation, c]): the last tap is the
current token, and what lies before the sequence is zero. The sum is float32 and rounded to x's dtype before the
activation.
A pool [pool, history, channels] of the caller's holds the last inputs of each sequence, oldest first; a sequence whose
slot is −1 is padding: nothing of it is read or written, and its output is zero. No two sequences of a call may share a
slot.

Source: the short convolutions of Mamba, arXiv:2312.00752, and Gated Delta Networks, arXiv:2412.06464; the dilated one
of the n-gram block in Qwen3.8.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int32
from tokenspeed_registry import Cost, Indices, Lengths, Offsets, Signature, op, rounded_sum
from torch import Tensor

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

    Sequence i is tokens cu_seqlens[i] to cu_seqlens[i+1], possibly none. `fresh[i]`: nothing comes before it and its
    slot's content, whatever that is, is not looked at: missing history becomes zero. Otherwise it goes on from its
    slot. `dilation`: tokens between taps. `x` may be strided. Returns the outputs, in x's dtype. Raises
    `ArgumentError` for arguments that do not fit, also for a slot outside the pool, offsets that are none, and a
    history shorter than (width−1)·dilation.

    Source: as the module's.
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

    Without `accepted` every row of the history counts. With it the newest q_len rows are tokens of the previous call,
    of which the first `accepted[b]` (0 to q_len) count; the rest is dropped. After the call the newest q_len rows are
    this call's tokens, and the counted history lies before them. `accepted` takes a history of at least
    (width−1)·dilation + q_len rows; where no row is in doubt, as after a prefill, it is q_len. `dilation`: tokens
    between taps. `x` may be strided. Returns the outputs, in x's dtype. Raises `ArgumentError` for arguments that do
    not fit, also for a slot outside the pool, a count above q_len and a history that is too short.

    Source: as the module's.
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
