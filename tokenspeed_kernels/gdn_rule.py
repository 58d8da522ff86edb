"""What the ops of the gated delta rule share: one token of the reference, cost and tolerance."""

import torch
from torch import Tensor

from tokenspeed_registry import Signature, rounded_sum

HEADS = "k_heads > 0 and v_heads % k_heads == 0"


def flops(s: Signature, tokens: float) -> float:
    """Decay 1, read 2, update 2 and output 2 operations a state element and token."""
    return 7 * tokens * s["v_heads"] * s["d_v"] * s["d_k"]


def state_bytes(s: Signature, states: float) -> float:
    """Bytes of `states` states of all heads."""
    return states * s["v_heads"] * s["d_v"] * s["d_k"] * s.dtype("state").itemsize


def terms(s: Signature, steps: int) -> int:
    """Norm and product sum over d_k; a state element collects some four roundings at each of `steps` tokens.

    The rule contracts (β ≤ 1, normalised keys), so that none of these grows on its way. The factor 4 stands for a
    doubled error: a state is made of outer products, whose largest element exceeds the typical one by that of two
    vectors.
    """
    return 4 * (2 * s["d_k"] + 4 * steps)


def recurrent_tolerance(s: Signature, role: str, steps: int) -> float:
    """See `terms`."""
    return rounded_sum(s.dtype(role), terms=terms(s, steps))


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, normalise: bool
) -> tuple[Tensor, Tensor]:
    """One token of one sequence in float64: the new state [v_heads d_v d_k] and the output [v_heads d_v]."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if normalise:
        q, k = _unit(q), _unit(k)
    new_state, out = torch.empty_like(state), torch.empty_like(v)
    for head in range(v.shape[0]):
        key_head = head // (v.shape[0] // k.shape[0])
        decayed = g[head].exp() * state[head]
        delta = beta[head] * (v[head] - decayed @ k[key_head])
        new_state[head] = decayed + torch.outer(delta, k[key_head])
        out[head] = new_state[head] @ (q[key_head] * scale)
    return new_state, out


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
