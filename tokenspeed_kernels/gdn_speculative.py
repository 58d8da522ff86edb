"""Speculative verify of the gated delta rule: drafted tokens whose effect on the state can be taken back.

Two ops, since they move different bytes: `gdn_verify` writes a state per token, of which the caller picks one;
`gdn_verify_replay` only reads states, and a later call replays the tokens that were accepted. Either leaves things as
if only the accepted tokens had come. `q`, `k`, `v`, `g`, `beta`, `state`, `scale` and `normalise` are those of `gdn`,
for `q_len` tokens of each sequence; no two sequences of a call may share a slot of the pool.
"""

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from tokenspeed_kernels.gdn_rule import HEADS, flops, recurrent_tolerance, state_bytes, step
from tokenspeed_registry import Cost, Indices, Lengths, op


@op(
    family="gdn",
    cases="tokenspeed_kernels.cases.gdn:gdn_verify",
    outputs=("o",),
    output_dtypes={"o": "v"},
    static=("q_len", "k_heads", "v_heads", "d_k", "d_v"),
    mutates=("state",),
    strided=("q", "k", "v"),
    same_dtype=(("q", "k", "v"),),
    where=(HEADS,),
    checks=(Indices("initial_slots", "pool"), Indices("slots", "pool")),
    cost=lambda s: Cost(
        flops=flops(s, s["batch"] * s["q_len"]),
        nbytes=s.nbytes("q", "k", "v", "g", "beta", "initial_slots", "slots", "o")
        + state_bytes(s, s["batch"] * (1 + s["q_len"])),
    ),
    tolerance=lambda s, role: recurrent_tolerance(s, role, steps=s["q_len"]),
)
def gdn_verify(
    q: Float[Tensor, "batch q_len k_heads d_k"],
    k: Float[Tensor, "batch q_len k_heads d_k"],
    v: Float[Tensor, "batch q_len v_heads d_v"],
    g: Float32[Tensor, "batch q_len v_heads"],
    beta: Float32[Tensor, "batch q_len v_heads"],
    state: Float[Tensor, "pool v_heads d_v d_k"],
    initial_slots: Int32[Tensor, "batch"],
    slots: Int32[Tensor, "batch q_len"],
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "batch q_len v_heads d_v"]:
    """Drafted tokens of each sequence, with the state after every one of them, from which the caller picks.

    `q`, `k`, `v`, `g`, `beta`, `state`, `scale`, `normalise`: see module `gdn`.
    `initial_slots`: the slot with the state from which each sequence starts; −1 marks padding, whatever `slots` says:
    nothing of it is read or written, and its output is zero.
    `slots`: where to write the state after each token: that after token i goes to `state[slots[b, i]]`; −1: not kept.

    To commit a tokens, call next with initial slot `slots[b, a-1]`; for a = 0 with the old one, which must not be among
    `slots[b]` if that can happen. Returns the outputs, in v's dtype. Raises `ArgumentError` for arguments that do not
    fit, `ContentError` for a slot outside the pool where slots are checked (short CPU tensors, or debug mode).

    Source: Gated Delta Networks, arXiv:2412.06464, equation 10.
    """
    result = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    for b, initial in enumerate(initial_slots.tolist()):
        if initial < 0:
            continue
        current = state[initial].double()
        for i, slot in enumerate(slots[b].tolist()):
            token = q[b, i], k[b, i], v[b, i], g[b, i], beta[b, i]
            current, result[b, i] = step(current, *token, scale, normalise)
            if slot >= 0:
                state[slot] = current
    return result


@op(
    family="gdn",
    cases="tokenspeed_kernels.cases.gdn:gdn_verify_replay",
    outputs=("o",),
    output_dtypes={"o": "v"},
    static=("q_len", "capacity", "k_heads", "v_heads", "d_k", "d_v"),
    mutates=("state", "kept_k", "kept_v", "kept_g", "kept_beta"),
    strided=("q", "k", "v"),
    same_dtype=(("q", "k", "v", "kept_k", "kept_v"),),
    where=(HEADS, "capacity >= q_len"),
    checks=(Indices("slots", "pool"), Lengths("kept", ("capacity",))),
    # Of the kept tokens and of states folded, neither of which the dims tell, nothing is counted.
    cost=lambda s: Cost(
        flops=flops(s, s["batch"] * s["q_len"]),
        nbytes=s.nbytes("q", "slots", "kept", "o") + 2 * s.nbytes("k", "v", "g", "beta") + state_bytes(s, s["batch"]),
    ),
    tolerance=lambda s, role: (
        0.0 if role.startswith("kept") else recurrent_tolerance(s, role, steps=s["capacity"] + s["q_len"])
    ),
)
def gdn_verify_replay(
    q: Float[Tensor, "batch q_len k_heads d_k"],
    k: Float[Tensor, "batch q_len k_heads d_k"],
    v: Float[Tensor, "batch q_len v_heads d_v"],
    g: Float32[Tensor, "batch q_len v_heads"],
    beta: Float32[Tensor, "batch q_len v_heads"],
    state: Float[Tensor, "pool v_heads d_v d_k"],
    kept_k: Float[Tensor, "pool capacity k_heads d_k"],
    kept_v: Float[Tensor, "pool capacity v_heads d_v"],
    kept_g: Float32[Tensor, "pool capacity v_heads"],
    kept_beta: Float32[Tensor, "pool capacity v_heads"],
    slots: Int32[Tensor, "batch"],
    kept: Int32[Tensor, "batch"],
    *,
    scale: float,
    normalise: bool = True,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "batch q_len v_heads d_v"]:
    """Drafted tokens of each sequence, whose inputs are kept and replayed once it is known how many of them count.

    `q`, `k`, `v`, `g`, `beta`, `state`, `scale`, `normalise`: see module `gdn`. Buffers hold k and v as they came, so
    `normalise` must not change between calls.
    `kept_k`, `kept_v`, `kept_g`, `kept_beta`: the caller's buffers, one a slot of the pool, for the k, v, g and beta of
    up to `capacity` tokens that are not in the slot's state yet. What they hold at first does not matter.
    `slots`: the slot of each sequence in pool and buffers; −1 marks padding: nothing of it is read or written, and its
    output is zero.
    `kept`: how many tokens at the head of a slot's buffers, 0 to capacity, are committed but not yet in its state; 0
    after a prefill. The state to start from is the slot's, advanced by them; `gdn_decode` of that slot would miss them.

    If kept + q_len > capacity, the call folds: it writes the state to start from to the pool, and the new tokens go to
    rows 0 to q_len−1 of the buffers; otherwise the pool is only read and they go to rows kept to kept+q_len−1. The next
    call's `kept` is (0 if folded else kept) + the number of tokens accepted since.

    Returns the outputs, in v's dtype. Raises `ArgumentError` for arguments that do not fit, also for a capacity below
    q_len; `ContentError` for a slot outside the pool or a count above the capacity where those are checked (short CPU
    tensors, or debug mode).

    Source: Gated Delta Networks, arXiv:2412.06464, equation 10.
    """
    result = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    q_len, capacity = k.shape[1], kept_k.shape[1]
    for b, (slot, count) in enumerate(zip(slots.tolist(), kept.tolist(), strict=True)):
        if slot < 0:
            continue
        current = state[slot].double()
        for row in range(count):
            key = kept_k[slot, row]
            token = key, key, kept_v[slot, row], kept_g[slot, row], kept_beta[slot, row]  # any query does
            current, _ = step(current, *token, scale, normalise)
        first = count
        if count + q_len > capacity:
            state[slot] = current
            first = 0
        for i in range(q_len):
            current, result[b, i] = step(current, q[b, i], k[b, i], v[b, i], g[b, i], beta[b, i], scale, normalise)
            for buffer, new in ((kept_k, k), (kept_v, v), (kept_g, g), (kept_beta, beta)):
                buffer[slot, first + i] = new[b, i]
    return result
