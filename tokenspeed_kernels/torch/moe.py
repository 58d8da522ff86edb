"""Mixture of experts in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_kernels import moe
from tokenspeed_kernels.torch.linear import reads_past_rows
from tokenspeed_registry import copy_into, kernel


@kernel(moe.moe_route, backend="torch")
def moe_route(
    logits: Tensor, *, top_k: int, renormalise: bool = True, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    # Chosen by the logits, which order the experts as the probabilities do but never tie by rounding.
    wide = logits.float()
    chosen, experts = wide.topk(top_k, dim=-1)
    weights = chosen.softmax(dim=-1) if renormalise else wide.softmax(dim=-1).gather(1, experts)
    result = weights, experts.int()
    return result if out is None else copy_into(out, result)


@kernel(moe.moe_route_grouped, backend="torch")
def moe_route_grouped(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    groups: int = 1,
    top_groups: int = 1,
    renormalise: bool = True,
    scaling: float = 1.0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    choice = scores + bias
    if top_groups < groups:
        grouped = choice.view(choice.shape[0], groups, choice.shape[1] // groups)
        worth = grouped.topk(2, dim=-1).values.sum(dim=-1)
        dropped = torch.ones_like(worth, dtype=torch.bool)
        dropped.scatter_(1, worth.topk(top_groups, dim=-1).indices, False)
        choice = grouped.masked_fill(dropped[:, :, None], -torch.inf).flatten(1)
    experts = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    result = weights * scaling, experts.int()
    return result if out is None else copy_into(out, result)


# Not to be captured: see `sum_of_experts`.
@kernel(moe.moe_experts, backend="torch", graph_capturable=False)
def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    first_expert: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    count, hidden, inter = down.shape
    dtype = torch.float32 if reads_past_rows(x, hidden, inter) else x.dtype
    experts = Experts(count, inter, dtype, gate_up.__getitem__, down.__getitem__)
    y = sum_of_experts(x, weights, ids, first_expert, experts)
    return y if out is None else copy_into(out, y)


@dataclass(frozen=True)
class Experts:
    """`count` experts of inner width `inter`, and the dtype in which to multiply.

    `gate_up` and `down` give the matrices [2*inter, hidden] and [hidden, inter] of the expert at a place, 0 to count-1;
    each is asked for once a call, and only where a token goes.
    """

    count: int
    inter: int
    dtype: torch.dtype
    gate_up: Callable[[int], Tensor]
    down: Callable[[int], Tensor]


def sum_of_experts(x: Tensor, weights: Tensor, ids: Tensor, first_expert: int, experts: Experts) -> Tensor:
    """What `moe_experts` returns.

    The tokens of an expert are a matrix of their own, whose size only the host can pass to a matrix product. What lies
    on a device is therefore read back, once a call.
    """
    tokens, top_k = ids.shape
    places = ids - first_expert
    places = places.masked_fill((places < 0) | (places >= experts.count), -1)
    by_expert, pairs = places.flatten().sort(stable=True)
    hit, counts = (part.tolist() for part in torch.unique_consecutive(by_expert, return_counts=True))
    skipped = counts[0] if hit and hit[0] == -1 else 0
    pairs = pairs[skipped:]
    rows = x[pairs // max(top_k, 1)].to(experts.dtype)
    projected = rows.new_empty(pairs.shape[0], 2 * experts.inter)
    groups = [(expert, count) for expert, count in zip(hit, counts, strict=True) if expert != -1]
    for (expert, _), inputs, outputs in zip(groups, *_split(groups, rows, projected), strict=True):
        torch.mm(inputs, experts.gate_up(expert).to(experts.dtype).T, out=outputs)
    inner = silu_and_multiply(projected)
    for (expert, _), inputs, outputs in zip(groups, *_split(groups, inner, rows), strict=True):
        torch.mm(inputs, experts.down(expert).to(experts.dtype).T, out=outputs)
    # Back in the order of the tokens, where a skipped pair is a row of zeros and its weight may be anything.
    values = torch.zeros(tokens * top_k, x.shape[1], dtype=torch.float32, device=x.device)
    values[pairs] = rows.float()
    kept = weights.masked_fill(places == -1, 0.0)
    return torch.bmm(kept.unsqueeze(1), values.view(tokens, top_k, x.shape[1])).squeeze(1).to(x.dtype)


@kernel(moe.silu_mul, backend="torch")
def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = silu_and_multiply(gate_up)
    return y if out is None else copy_into(out, y)


@kernel(moe.sigmoid_mul, backend="torch")
def sigmoid_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = (x.float() * gate.float().sigmoid()).to(x.dtype)
    return y if out is None else copy_into(out, y)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """silu of the first half of each row times the second, in float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _split(groups: list[tuple[int, int]], *matrices: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows of each group, for each matrix."""
    counts = [count for _, count in groups]
    return [torch.split(matrix, counts) for matrix in matrices]
