"""Mixture of experts: routing, the experts themselves, and the gated products around them.

Sources: Switch Transformers (arXiv:2101.03961) for softmax routing, DeepSeek-V3 (arXiv:2412.19437) for grouped sigmoid
routing, GLU Variants (arXiv:2002.05202) for SwiGLU experts; the model descriptions in docs/models.md.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from tokenspeed_registry import Cost, Signature, op, rounded_sum


@op(
    family="moe",
    cases="tokenspeed_kernels.cases.moe:moe_route",
    outputs=("weights", "experts_chosen"),
    static=("experts", "top_k"),
    strided=("logits",),
    where=("top_k >= 1", "top_k <= experts"),
    cost=lambda s: Cost(flops=4 * s.numel("logits"), nbytes=s.nbytes("logits", "weights", "experts_chosen")),
    # Softmax in float32 whatever the dtype of the logits, which are taken as they are: a sum over the experts.
    tolerance=lambda s, role: rounded_sum(torch.float32, terms=s["experts"]),
)
def moe_route(
    logits: Float[Tensor, "tokens experts"],
    *,
    top_k: int,
    renormalise: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float32[Tensor, "tokens top_k"], Int32[Tensor, "tokens top_k"]]:
    """The `top_k` likeliest experts of each token, in descending order of probability, and their weights.

    `logits`: router logits, finite; may be strided between tokens. `top_k`: experts a token, 1 to the number of them.
    `renormalise`: whether a token's weights are divided by their sum and so add up to 1.

    Returns the weights, which are the probabilities of the chosen experts by a float32 softmax over all of them, and
    the experts' ids. Among equal logits any choice and any order will do. Raises `ArgumentError` for arguments that do
    not fit, also for a `top_k` below 1 or above the number of experts.

    Source: Switch Transformers, section 2.1, with top-k weights renormalised as in Mixtral (arXiv:2401.04088).
    """
    probabilities = logits.double().softmax(dim=-1)
    weights, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k].int()
    return (weights / weights.sum(dim=-1, keepdim=True) if renormalise else weights), experts


@op(
    family="moe",
    cases="tokenspeed_kernels.cases.moe:moe_route_grouped",
    outputs=("weights", "experts_chosen"),
    static=("experts", "top_k", "groups", "top_groups"),
    strided=("logits",),
    where=(
        "groups >= 1 and experts % groups == 0",
        "groups == 1 or experts >= 2 * groups",
        "1 <= top_groups <= groups",
        "1 <= top_k <= top_groups * (experts // groups)",
    ),
    cost=lambda s: Cost(flops=6 * s.numel("logits"), nbytes=s.nbytes("logits", "bias", "weights", "experts_chosen")),
    # All in float32: a sigmoid and a sum over the chosen.
    tolerance=lambda s, role: rounded_sum(torch.float32, terms=s["top_k"]),
)
def moe_route_grouped(
    logits: Float32[Tensor, "tokens experts"],
    bias: Float32[Tensor, "experts"],
    *,
    top_k: int,
    groups: int = 1,
    top_groups: int = 1,
    renormalise: bool = True,
    scaling: float = 1.0,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float32[Tensor, "tokens top_k"], Int32[Tensor, "tokens top_k"]]:
    """The `top_k` experts of each token by biased sigmoid scores, from its best groups of experts only.

    An expert's score is sigmoid(logit), its choice score + bias. Experts form `groups` groups of equal size in the
    order of their ids; a group is worth the sum of its two best choices. The best `top_groups` groups stay, and of
    their experts the `top_k` of the highest choices are taken, in descending order, whatever the signs of those.

    `logits`: router logits, finite; may be strided between tokens. `bias`: finite; decides who is chosen, not with what
    weight. `top_k`: experts a token, no more than `top_groups` groups have. `groups`: a divisor of the number of
    experts that leaves two or more in a group; 1: no group step. `top_groups`: 1 to `groups`. `renormalise`: whether a
    token's weights are divided by their sum (plus 1e-20). `scaling`: factor of all weights, applied last.

    Returns the weights, which are the scores of the chosen experts without the bias, renormalised and scaled, and the
    experts' ids. Among equal groups or choices any selection and any order will do. Raises `ArgumentError` for
    arguments that do not fit, also for numbers of groups and experts that break these rules.

    Source: DeepSeek-V3, section 2.1.2, and its reference implementation (`noaux_tc`).
    """
    tokens, experts = logits.shape
    size = experts // groups
    scores = 1 / (1 + (-logits.double()).exp())
    chosen = torch.zeros(tokens, top_k, dtype=torch.int64)
    for token in range(tokens):
        choice = (scores[token] + bias.double()).tolist()
        members = [range(group * size, (group + 1) * size) for group in range(groups)]
        best = sorted(members, key=lambda ids: -sum(sorted((choice[e] for e in ids), reverse=True)[:2]))[:top_groups]
        candidates = [expert for ids in best for expert in ids]
        chosen[token] = torch.tensor(sorted(candidates, key=lambda expert: -choice[expert])[:top_k])
    weights = scores.gather(1, chosen)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scaling, chosen.int()


def experts_cost(s: Signature, *matrices: str) -> Cost:
    """An expert is read once, if a token has it. Where ids are not known, all count as here and as different."""
    pairs = s.count("pairs", s["tokens"] * s["top_k"])
    hit = s.count("experts_hit", min(s["experts"], pairs))
    read = hit / s["experts"] if s["experts"] else 0.0
    return Cost(
        flops=pairs * (6 * s["inter"] * s["hidden"] + 5 * s["inter"] + 2 * s["hidden"]),
        nbytes=s.nbytes("x", "weights", "ids", "y") + read * s.nbytes(*matrices),
    )


@op(
    family="moe",
    cases="tokenspeed_kernels.cases.moe:moe_experts",
    outputs=("y",),
    output_dtypes={"y": "x"},
    static=("hidden", "inter", "experts", "top_k"),
    strided=("x",),
    same_dtype=(("x", "gate_up", "down"),),
    where=("first_expert >= 0",),
    cost=lambda s: experts_cost(s, "gate_up", "down"),
    # Two projections in a row and the sum over experts; gate and up, their product, down and the sum are rounded.
    tolerance=lambda s, role: rounded_sum(s.dtype("x"), terms=s["hidden"] + s["inter"] + s["top_k"], roundings=4),
)
def moe_experts(
    x: Float[Tensor, "tokens hidden"],
    gate_up: Float[Tensor, "experts 2*inter hidden"],
    down: Float[Tensor, "experts hidden inter"],
    weights: Float32[Tensor, "tokens top_k"],
    ids: Int32[Tensor, "tokens top_k"],
    *,
    first_expert: int = 0,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "tokens hidden"]:
    """Weighted sum of each token's experts: Σ w · down_e(silu(gate_e x) · up_e x).

    `x`: a row a token; may be strided between tokens. `gate_up`: of each expert the rows of the gate, then those of the
    up projection. `down`: of each expert the projection back to `hidden`.
    `weights`, `ids`: the weight of each chosen expert and its id, as routing returns them, in any order; an expert may
    occur twice. `first_expert`: the id of the first expert in `gate_up` and `down`, where those are a rank's share of
    all. Any other id (-1 for padding, or an expert that lives elsewhere) contributes nothing: neither its weight nor,
    for a token without any expert here, its row of `x` is read, and such a token's output is zero.

    Sums are float32; what passes from one projection to the next may be rounded to x's dtype, as the result is. Raises
    `ArgumentError` for arguments that do not fit, also for a negative `first_expert`.

    Source: GLU Variants, equation 6 (SwiGLU), with routing as in Switch Transformers.
    """
    return sum_of_experts(
        x, weights, ids, first_expert, [(gate_up[e].double(), down[e].double()) for e in range(gate_up.shape[0])]
    )


def sum_of_experts(
    x: Tensor, weights: Tensor, ids: Tensor, first_expert: int, experts: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Reference: what `moe_experts` returns, from the float64 gate-and-up and down matrices of each expert here."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            if first_expert <= expert < first_expert + len(experts):
                gate_up, down = experts[expert - first_expert]
                gate, up = (gate_up @ x[token].double()).chunk(2)
                y[token] += weights[token, place].double() * (down @ (_silu(gate) * up))
    return y


@op(
    family="moe",
    cases="tokenspeed_kernels.cases.moe:silu_mul",
    outputs=("y",),
    output_dtypes={"y": "gate_up"},
    static=("width",),
    strided=("gate_up",),
    where=("width % 2 == 0",),
    cost=lambda s: Cost(flops=2.5 * s.numel("gate_up"), nbytes=s.nbytes("gate_up", "y")),
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=1),
)
def silu_mul(
    gate_up: Float[Tensor, "rows width"],
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "rows width//2"]:
    """silu(gate) · up in float32, rounded once.

    `gate_up`: the gate in the first half of each row, up in the second; may be strided between rows.

    Raises `ArgumentError` for arguments that do not fit, also for an odd width.

    Source: GLU Variants, equation 6 (SwiGLU).
    """
    gate, up = gate_up.double().chunk(2, dim=-1)
    return _silu(gate) * up


@op(
    family="moe",
    cases="tokenspeed_kernels.cases.moe:sigmoid_mul",
    outputs=("y",),
    output_dtypes={"y": "x"},
    static=("dim", "gate_dim"),
    strided=("x", "gate"),
    same_dtype=(("x", "gate"),),
    where=("gate_dim == dim or gate_dim == 1",),
    cost=lambda s: Cost(flops=s.numel("x") + 4 * s.numel("gate"), nbytes=s.nbytes("x", "gate", "y")),
    tolerance=lambda s, role: rounded_sum(s.dtype(role), terms=1),
)
def sigmoid_mul(
    x: Float[Tensor, "rows dim"],
    gate: Float[Tensor, "rows gate_dim"],
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Float[Tensor, "rows dim"]:
    """x · sigmoid(gate) in float32, rounded once.

    `x`: what is gated. `gate`: before the sigmoid, a value for each element of `x` (output gate of attention) or one a
    row (gate of a shared expert). Both may be strided between rows.

    Raises `ArgumentError` for arguments that do not fit, also for a gate of any other width.

    Source: output gate of gated attention (arXiv:2505.06708); shared expert of Qwen2-MoE.
    """
    return x.double() / (1 + (-gate.double()).exp())


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())
