"""What the gated delta rule takes, from the projections of its tokens, in one op: short convolution and gates.

Each op is a causal convolution of `conv`, of dilation 1 and with silu, together with `gdn_gates` of the same tokens.
`x`, `weight`, `state`, `slots` and `dropped` are those of `conv`, where the channels are all queries, keys and values:
what comes out is cut into them by views. `a`, `b`, `a_log` and `dt_bias` are those of `gdn_gates`. Where a slot is −1,
gates are neither read nor left as they are: they come out zero, like the convolution's outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int32
from torch import Tensor

from tokenspeed_kernels.conv import Droppable, causal_conv_prefill, causal_conv_update
from tokenspeed_kernels.gdn import gdn_gates
from tokenspeed_registry import Cost, Indices, Offsets, Signature, op, rounded_sum

_DTYPES = (("x", "weight", "state"), ("a", "b"))
_RELATIONS = ("width >= 1", "history >= width - 1")
_GATES = "a", "b", "a_log", "dt_bias", "g", "beta"


@dataclass(frozen=True)
class _Droppable(Droppable):
    """As in a convolution of dilation 1."""

    needs: tuple[str, ...] = ("history", "width")

    def verify(self, op: str, values: Tensor, dims: Mapping[str, int]) -> None:
        super().verify(op, values, {**dims, "dilation": 1})


def _cost(s: Signature, seqs: int, *indices: str) -> Cost:
    """As the convolution and the gates by themselves; a history is read and written once."""
    history = 2 * seqs * s["history"] * s["channels"] * s.dtype("state").itemsize
    return Cost(
        flops=2 * s["width"] * s.numel("x") + 10 * s.numel("g"),
        nbytes=s.nbytes("x", "weight", *indices, "y", *_GATES) + history,
    )


def _tolerance(s: Signature, role: str) -> float:
    """As those of the convolution and of the gates; the history is a copy."""
    if role == "state":
        return 0.0
    return rounded_sum(s.dtype(role), terms=s["width"], roundings=2) if role == "y" else rounded_sum(s.dtype(role), 32)


def _gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, valid: Tensor) -> list[Tensor]:
    """Those of tokens [tokens heads]; zero where `valid` [tokens] is false."""
    gates = gdn_gates.contract.reference(a, b, a_log, dt_bias)
    assert isinstance(gates, tuple)
    return [torch.where(valid[:, None], x, 0.0) for x in gates]


@op(
    family="gdn",
    cases="tokenspeed_kernels.cases.gdn_inputs:gdn_inputs_update",
    outputs=("y", "g", "beta"),
    output_dtypes={"y": "x"},
    static=("q_len", "channels", "width", "history", "heads"),
    mutates=("state",),
    strided=("x", "a", "b"),
    same_dtype=_DTYPES,
    where=_RELATIONS,
    checks=(Indices("slots", "pool"), _Droppable("dropped")),
    cost=lambda s: _cost(s, s["batch"], "slots", "dropped"),
    tolerance=_tolerance,
)
def gdn_inputs_update(
    x: Float[Tensor, "batch q_len channels"],
    a: Float[Tensor, "batch q_len heads"],
    b: Float[Tensor, "batch q_len heads"],
    weight: Float[Tensor, "channels width"],
    state: Float[Tensor, "pool history channels"],
    slots: Int32[Tensor, "batch"],
    a_log: Float32[Tensor, "heads"],
    dt_bias: Float32[Tensor, "heads"],
    *,
    dropped: Int32[Tensor, "batch"] | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[
    Float[Tensor, "batch q_len channels"],
    Float32[Tensor, "batch q_len heads"],
    Float32[Tensor, "batch q_len heads"],
]:
    """`causal_conv_update` with silu and `gdn_gates`, for `q_len` tokens of each sequence.

    `x`, `weight`, `state`, `slots`, `dropped`: see module `conv`. `a`, `b`, `a_log`, `dt_bias`: see `gdn_gates`.
    `x`, `a` and `b` may be strided but for their last dim.

    Returns the convolution's outputs in x's dtype, the log decay and the write strength in float32; all zero where a
    slot is −1. Raises as `causal_conv_update` does.

    Source: Gated Delta Networks, arXiv:2412.06464, section 3.4.
    """
    batch, q_len, heads = a.shape
    y = causal_conv_update.contract.reference(x, weight, state, slots, dropped=dropped)
    assert isinstance(y, Tensor)
    valid = (slots >= 0).repeat_interleave(q_len)
    g, beta = _gates(a.reshape(-1, heads), b.reshape(-1, heads), a_log, dt_bias, valid)
    return y, g.view(batch, q_len, heads), beta.view(batch, q_len, heads)


@op(
    family="gdn",
    cases="tokenspeed_kernels.cases.gdn_inputs:gdn_inputs_prefill",
    outputs=("y", "g", "beta"),
    output_dtypes={"y": "x"},
    static=("channels", "width", "history", "heads"),
    mutates=("state",),
    strided=("x", "a", "b"),
    same_dtype=_DTYPES,
    where=_RELATIONS,
    checks=(
        Indices("slots", "pool"),
        Offsets("cu_seqlens", "tokens"),
        _Droppable("dropped"),
    ),
    cost=lambda s: _cost(s, s["seqs"], "slots", "cu_seqlens", "fresh", "dropped"),
    tolerance=_tolerance,
)
def gdn_inputs_prefill(
    x: Float[Tensor, "tokens channels"],
    a: Float[Tensor, "tokens heads"],
    b: Float[Tensor, "tokens heads"],
    weight: Float[Tensor, "channels width"],
    state: Float[Tensor, "pool history channels"],
    slots: Int32[Tensor, "seqs"],
    cu_seqlens: Int32[Tensor, "seqs+1"],
    fresh: Bool[Tensor, "seqs"],
    a_log: Float32[Tensor, "heads"],
    dt_bias: Float32[Tensor, "heads"],
    *,
    dropped: Int32[Tensor, "seqs"] | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[
    Float[Tensor, "tokens channels"],
    Float32[Tensor, "tokens heads"],
    Float32[Tensor, "tokens heads"],
]:
    """`causal_conv_prefill` with silu and `gdn_gates`, for all tokens of packed sequences.

    `x`, `weight`, `state`, `slots`, `dropped`: see module `conv`. `cu_seqlens`, `fresh`: see `causal_conv_prefill`.
    `a`, `b`, `a_log`, `dt_bias`: see `gdn_gates`. `x`, `a` and `b` may be strided but for their last dim.

    Returns the convolution's outputs in x's dtype, the log decay and the write strength in float32; all zero where a
    slot is −1. Raises as `causal_conv_prefill` does.

    Source: Gated Delta Networks, arXiv:2412.06464, section 3.4.
    """
    y = causal_conv_prefill.contract.reference(x, weight, state, slots, cu_seqlens, fresh, dropped=dropped)
    assert isinstance(y, Tensor)
    g, beta = _gates(a, b, a_log, dt_bias, (slots >= 0).repeat_interleave(cu_seqlens.diff()))
    return y, g, beta
