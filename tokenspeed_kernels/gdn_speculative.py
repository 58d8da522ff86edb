"""Speculative verify of the gated delta rule: drafted tokens whose effect on the state can be taken back.

Two ops, since they move different bytes: `gdn_verify` writes a state per token, of which the caller picks one;
`gdn_verify_replay` only reads states, and a later call replays the tokens that were accepted; `gdn_fold` puts them into
the state, for any other op to go on from. Either way things are left as if only the accepted tokens had come. `q`, `k`,
`v`, `g`, `beta`, `state`, `scale` and `normalise` are those of `gdn`, for `q_len` tokens of each sequence; no two
sequences of a call may share a slot of the pool.
"""

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from tokenspeed_kernels.gdn_rule import HEADS, flops, recurrent_tolerance, state_bytes, step
from tokenspeed_registry import Cost, Indices, Lengths, Signature, op


def _buffer_bytes(s: Signature) -> int:
    """The kept tokens of one slot."""
    inputs = s["k_heads"] * s["d_k"] + s["v_heads"] * s["d_v"]
    return s["capacity"] * (inputs * s.dtype("kept_k").itemsize + 2 * s["v_heads"] * s.dtype("kept_g").itemsize)


def _advance(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, count: int, normalise: bool) -> Tensor:
    """One slot's state [v_heads d_v d_k] in float64 after the first `count` tokens of its buffers."""
    state = state.double()
    for row in range(count):
        state, _ = step(state, k[row], k[row], v[row], g[row], beta[row], 1.0, normalise)  # any query does
    return state


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


def _replay_cost(s: Signature) -> Cost:
    """Kept tokens are read and replayed, a folded state is written; where nobody counted, there are none of either."""
    kept, folded, sequences = s.count("kept_tokens", 0), s.count("folded", 0), s.count("sequences", s["batch"])
    new = sequences * s["q_len"]
    token = s.nbytes("k", "v", "g", "beta") / max(s["batch"] * s["q_len"], 1)
    return Cost(
        flops=flops(s, new + kept),
        nbytes=s.nbytes("q", "slots", "kept", "o") + (2 * new + kept) * token + state_bytes(s, sequences + folded),
    )


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
    cost=_replay_cost,
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
    up to `capacity` tokens that are not in the slot's state yet. Rows that are not kept may hold anything, also NaN.
    `slots`: the slot of each sequence in pool and buffers; −1 marks padding: nothing of it is read or written, and its
    output is zero.
    `kept`: how many tokens at the head of a slot's buffers, 0 to capacity, are committed but not yet in its state; 0
    after a prefill. The state to start from is the slot's, advanced by them. Whatever else takes that state (decode,
    prefill, a copy) would miss them: `gdn_fold` first.

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
        current = _advance(state[slot], kept_k[slot], kept_v[slot], kept_g[slot], kept_beta[slot], count, normalise)
        first = count
        if count + q_len > capacity:
            state[slot] = current
            first = 0
        for i in range(q_len):
            current, result[b, i] = step(current, q[b, i], k[b, i], v[b, i], g[b, i], beta[b, i], scale, normalise)
            for buffer, new in ((kept_k, k), (kept_v, v), (kept_g, g), (kept_beta, beta)):
                buffer[slot, first + i] = new[b, i]
    return result


@op(
    family="gdn",
    cases="tokenspeed_kernels.cases.gdn:gdn_fold",
    static=("capacity", "k_heads", "v_heads", "d_k", "d_v"),
    mutates=("state",),
    same_dtype=(("kept_k", "kept_v"),),
    where=(HEADS,),
    checks=(Indices("slots", "pool"), Lengths("kept", ("capacity",))),
    # How many tokens are kept the dims do not tell: all buffers count as full.
    cost=lambda s: Cost(
        flops=flops(s, s["batch"] * s["capacity"]),
        nbytes=s.nbytes("slots", "kept") + 2 * state_bytes(s, s["batch"]) + s["batch"] * _buffer_bytes(s),
    ),
    tolerance=lambda s, role: recurrent_tolerance(s, role, steps=s["capacity"]),
)
def gdn_fold(
    state: Float[Tensor, "pool v_heads d_v d_k"],
    kept_k: Float[Tensor, "pool capacity k_heads d_k"],
    kept_v: Float[Tensor, "pool capacity v_heads d_v"],
    kept_g: Float32[Tensor, "pool capacity v_heads"],
    kept_beta: Float32[Tensor, "pool capacity v_heads"],
    slots: Int32[Tensor, "batch"],
    kept: Int32[Tensor, "batch"],
    *,
    normalise: bool = True,
    backend: str | None = None,
) -> None:
    """Advances states in place by the tokens that `gdn_verify_replay` kept and that were accepted since.

    It comes before anything else that takes a state: decode, the prefill of a next turn, a snapshot, moving a sequence
    elsewhere. The state is then that after all accepted tokens, and the next replay's `kept` is 0.

    `state`: see module `gdn`. `kept_k`, `kept_v`, `kept_g`, `kept_beta`, `normalise`: as `gdn_verify_replay` has them;
    the buffers are only read.
    `slots`: the slot of each sequence in pool and buffers, no two the same; −1 marks padding: nothing of it is read or
    written.
    `kept`: how many tokens at the head of a slot's buffers, 0 to capacity, to advance by; where 0, the state stays bit
    by bit.

    Raises `ArgumentError` for arguments that do not fit; `ContentError` for a slot outside the pool or a count above
    the capacity where those are checked (short CPU tensors, or debug mode).

    Source: Gated Delta Networks, arXiv:2412.06464, equation 10.
    """
    for slot, count in zip(slots.tolist(), kept.tolist(), strict=True):
        if slot >= 0:
            tokens = kept_k[slot], kept_v[slot], kept_g[slot], kept_beta[slot]
            state[slot] = _advance(state[slot], *tokens, count, normalise)
