"""Gated delta rule: gates, decode, prefill, and the gated output norm. Speculative verify is in `gdn_speculative`.

Of every value head, with keys of `d_k` and values of `d_v` numbers, a state S [d_v, d_k] is kept. A token does

    S ← exp(g) S;  δ = β (v − S k);  S ← S + δ kᵀ;  o = scale · S q

in float32. What the ops share:

`q`, `k`, `v`: queries, keys and values, after the short convolution. Value head j uses query and key head
j // (v_heads // k_heads). They may be strided but for their last dim.
`g`: natural log of the decay, at most 0; `beta`: write strength, 0 to 1; both as `gdn_gates` returns them.
`state`: the caller's pool of states, one a slot, float32 in the models; narrower ones are rounded when stored.
`slots`: the slot of each sequence, no two the same; −1 marks padding: nothing of it is read or written, and its output
is zero.
`scale`: multiplies q; d_k^−½ in the models.
`normalise`: whether q and k are first divided by √(Σx² + 1e-6) over each head, or taken as they are.

Source: Gated Delta Networks, arXiv:2412.06464; heads and norms as in the Qwen3-Next and Qwen3.8 models.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Float32, Int32
from torch import Tensor

from tokenspeed_kernels.gdn_rule import HEADS, flops, recurrent_tolerance, state_bytes, step, terms
from tokenspeed_registry import Cost, Indices, Offsets, Signature, op, rounded_sum, unit_roundoff


def _chunked_tolerance(s: Signature, role: str) -> float:
    """As the recurrent one; but tensor cores take operands in the inputs' dtype.

    So δ, the decayed keys and the state between chunks are each rounded to it on the way to output and state.
    """
    coarser = max(s.dtype("q"), s.dtype(role), key=unit_roundoff)
    return rounded_sum(coarser, terms=terms(s, s["tokens"]), roundings=3)


@op(
    family="gdn",
    cases="tokenspeed_kernels.cases.gdn:gdn_gates",
    outputs=("g", "beta"),
    static=("heads",),
    strided=("a", "b"),
    same_dtype=(("a", "b"),),
    cost=lambda s: Cost(flops=10 * s.numel("g"), nbytes=s.nbytes("a", "b", "a_log", "dt_bias", "g", "beta")),
    # An exponential of x carries |x| roundings of its argument, here up to 16.
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=2 * 16),
)
def gdn_gates(
    a: Float[Tensor, "tokens heads"],
    b: Float[Tensor, "tokens heads"],
    a_log: Float32[Tensor, "heads"],
    dt_bias: Float32[Tensor, "heads"],
    *,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float32[Tensor, "tokens heads"], Float32[Tensor, "tokens heads"]]:
    """The delta rule's gates from their projections: g = −exp(a_log) · softplus(a + dt_bias), beta = sigmoid(b).

    `a`, `b`: what the model projects each token to, a number a value head. They may be strided but for their last dim.
    `a_log`: learned log of each head's decay rate. `dt_bias`: learned bias of its time step.

    Returns the log decay `g` (≤ 0, natural log) and the write strength `beta` (0 to 1), in float32 whatever the inputs:
    narrower gates would spoil a state that lives for thousands of tokens. Raises `ArgumentError` for arguments that do
    not fit.

    Source: Gated Delta Networks, arXiv:2412.06464; parameters as in Mamba-2, arXiv:2405.21060.
    """
    softplus = torch.logaddexp(a.double() + dt_bias.double(), torch.zeros((), dtype=torch.float64, device=a.device))
    return -a_log.double().exp() * softplus, 1 / (1 + (-b.double()).exp())


@op(
    family="gdn",
    cases="tokenspeed_kernels.cases.gdn:gdn_decode",
    outputs=("o",),
    output_dtypes={"o": "v"},
    static=("k_heads", "v_heads", "d_k", "d_v"),
    mutates=("state",),
    strided=("q", "k", "v"),
    same_dtype=(("q", "k", "v"),),
    where=(HEADS,),
    checks=(Indices("slots", "pool"),),
    cost=lambda s: Cost(
        flops=flops(s, s["batch"]),
        nbytes=s.nbytes("q", "k", "v", "g", "beta", "slots", "o") + 2 * state_bytes(s, s["batch"]),
    ),
    tolerance=lambda s, role: recurrent_tolerance(s, role, steps=1),
)
def gdn_decode(
    q: Float[Tensor, "batch k_heads d_k"],
    k: Float[Tensor, "batch k_heads d_k"],
    v: Float[Tensor, "batch v_heads d_v"],
    g: Float32[Tensor, "batch v_heads"],
    beta: Float32[Tensor, "batch v_heads"],
    state: Float[Tensor, "pool v_heads d_v d_k"],
    slots: Int32[Tensor, "batch"],
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "batch v_heads d_v"]:
    """One token of each sequence: advances `state[slots]` in place and returns the outputs, in v's dtype.

    `q`, `k`, `v`, `g`, `beta`, `state`, `slots`, `scale`, `normalise`: see the module.

    Raises `ArgumentError` for arguments that do not fit, `ContentError` for a slot outside the pool where slots are
    checked (short CPU tensors, or debug mode).

    Source: Gated Delta Networks, arXiv:2412.06464, equation 10.
    """
    result = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    for b, slot in enumerate(slots.tolist()):
        if slot >= 0:
            new, result[b] = step(state[slot].double(), q[b], k[b], v[b], g[b], beta[b], scale, normalise)
            state[slot] = new
    return result


@op(
    family="gdn",
    cases="tokenspeed_kernels.cases.gdn:gdn_prefill",
    outputs=("o",),
    output_dtypes={"o": "v"},
    static=("k_heads", "v_heads", "d_k", "d_v"),
    mutates=("state",),
    strided=("q", "k", "v"),
    same_dtype=(("q", "k", "v"),),
    where=(HEADS,),
    checks=(Indices("slots", "pool"), Offsets("cu_seqlens", "tokens")),
    cost=lambda s: Cost(
        flops=flops(s, s["tokens"]),
        nbytes=s.nbytes("q", "k", "v", "g", "beta", "slots", "cu_seqlens", "fresh", "o")
        + 2 * state_bytes(s, s["seqs"]),
    ),
    tolerance=_chunked_tolerance,
)
def gdn_prefill(
    q: Float[Tensor, "tokens k_heads d_k"],
    k: Float[Tensor, "tokens k_heads d_k"],
    v: Float[Tensor, "tokens v_heads d_v"],
    g: Float32[Tensor, "tokens v_heads"],
    beta: Float32[Tensor, "tokens v_heads"],
    state: Float[Tensor, "pool v_heads d_v d_k"],
    slots: Int32[Tensor, "seqs"],
    cu_seqlens: Int32[Tensor, "seqs+1"],
    fresh: Bool[Tensor, "seqs"],
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens v_heads d_v"]:
    """All tokens of packed sequences: advances `state[slots]` in place and returns the outputs, in v's dtype.

    `q`, `k`, `v`, `beta`, `state`, `slots`, `scale`, `normalise`: see the module.
    `g`: as there, of any size: a decay ratio between two tokens must come from the sum of g between them.
    `cu_seqlens`: sequence i is tokens cu_seqlens[i] to cu_seqlens[i+1], possibly none.
    `fresh`: true where a sequence starts from a zero state: what its slot holds, NaN included, is not looked at; a
    fresh sequence without tokens leaves zeros. False: it goes on from its slot, so that a prompt may come in pieces.

    Raises `ArgumentError` for arguments that do not fit, `ContentError` for a slot outside the pool or bad offsets
    where those are checked (short CPU tensors, or debug mode).

    Source: Gated Delta Networks, arXiv:2412.06464, equation 10; its section 3.3 has the chunked form.
    """
    result = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    bounds = cu_seqlens.tolist()
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        current = torch.zeros_like(state[slot].double()) if fresh[i] else state[slot].double()
        for t in range(bounds[i], bounds[i + 1]):
            current, result[t] = step(current, q[t], k[t], v[t], g[t], beta[t], scale, normalise)
        state[slot] = current
    return result


@op(
    family="gdn",
    cases="tokenspeed_kernels.cases.gdn:gated_rms_norm",
    outputs=("normed",),
    output_dtypes={"normed": "x"},
    static=("heads", "dim"),
    strided=("x", "gate"),
    same_dtype=(("x", "gate"),),
    cost=lambda s: Cost(flops=9 * s.numel("x"), nbytes=s.nbytes("x", "gate", "weight", "normed")),
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=s["dim"]),
)
def gated_rms_norm(
    x: Float[Tensor, "tokens heads dim"],
    gate: Float[Tensor, "tokens heads dim"],
    weight: Float[Tensor, "dim"],
    *,
    eps: float,
    activation: Literal["sigmoid", "silu"],
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens heads dim"]:
    """The delta rule's output norm: x · rsqrt(mean(x²) + eps) · weight over each head, then · activation(gate).

    `x`: outputs of the delta rule. `gate`: projection of the same tokens, before the activation. Both may be strided
    but for their last dim.
    `weight`: plain factors (centred at one, not at zero), the same for every head.
    `eps`: added to the mean of squares, in its units. `activation`: applied to the gate alone.

    All in float32 with one rounding, to x's dtype. Raises `ArgumentError` for arguments that do not fit.

    Source: Gated Delta Networks, arXiv:2412.06464 (silu); Qwen3.8 (sigmoid).
    """
    wide, gated = x.double(), gate.double()
    activated = 1 / (1 + (-gated).exp())
    if activation == "silu":
        activated = activated * gated
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double() * activated
