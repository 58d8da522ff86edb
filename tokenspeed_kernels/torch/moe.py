"""Mixture of experts in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_kernels import moe
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


# The tokens of an expert are a matrix of their own, whose size only the host can pass to a matrix product. What lies on
# a device is read back once a call.
@kernel(moe.moe_experts, backend="torch", graph_capturable=False)
def moe_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, *, out: Tensor | None = None
) -> Tensor:
    tokens, top_k = ids.shape
    by_expert, pairs = ids.flatten().sort(stable=True)
    hit, counts = (part.tolist() for part in torch.unique_consecutive(by_expert, return_counts=True))
    skipped = counts[0] if hit and hit[0] == -1 else 0
    pairs = pairs[skipped:]
    rows = x[pairs // max(top_k, 1)]
    projected = x.new_empty(pairs.shape[0], gate_up.shape[1])
    groups = [(expert, count) for expert, count in zip(hit, counts, strict=True) if expert != -1]
    for (expert, _), inputs, outputs in zip(groups, *_split(groups, rows, projected), strict=True):
        torch.mm(inputs, gate_up[expert].T, out=outputs)
    inner = silu_and_multiply(projected)
    for (expert, _), inputs, outputs in zip(groups, *_split(groups, inner, rows), strict=True):
        torch.mm(inputs, down[expert].T, out=outputs)
    # Back in the order of the tokens, where a skipped pair is a row of zeros and its weight may be anything.
    values = torch.zeros(tokens * top_k, x.shape[1], dtype=torch.float32, device=x.device)
    values[pairs] = rows.float()
    kept = weights.masked_fill(ids == -1, 0.0)
    y = torch.bmm(kept.unsqueeze(1), values.view(tokens, top_k, x.shape[1])).squeeze(1).to(x.dtype)
    return y if out is None else out.copy_(y)


@kernel(moe.silu_mul, backend="torch")
def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = silu_and_multiply(gate_up)
    return y if out is None else out.copy_(y)


@kernel(moe.sigmoid_mul, backend="torch")
def sigmoid_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = (x.float() * gate.float().sigmoid()).to(x.dtype)
    return y if out is None else out.copy_(y)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """silu of the first half of each row times the second, in float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _split(groups: list[tuple[int, int]], *matrices: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows of each group, for each matrix."""
    counts = [count for _, count in groups]
    return [torch.split(matrix, counts) for matrix in matrices]
