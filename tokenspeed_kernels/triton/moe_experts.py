"""Experts in three launches: gate and up projection and what joins them, down projection, sum over a token's experts.

Before them, pairs of a token and an expert are brought in the order of experts (`moe_align`), so that every weight is
read once for a block of pairs.
"""

import torch
from torch import Tensor

from tokenspeed_kernels.triton.moe_align import align
from tokenspeed_kernels.triton.moe_choices import pairs_a_block
from tokenspeed_kernels.triton.moe_down import add_up, project_out
from tokenspeed_kernels.triton.moe_gate_up import project_in
from tokenspeed_kernels.triton.moe_products import Matrices


def sum_of_experts(
    x: Tensor, weights: Tensor, ids: Tensor, first_expert: int, w: Matrices, out: Tensor | None
) -> Tensor:
    """What `moe_experts` returns."""
    (tokens, hidden), top_k = x.shape, ids.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    pairs = tokens * top_k
    if not (pairs and hidden and w.experts and w.inter):
        return y.zero_()
    blocks = align(ids, first_expert, w.experts, pairs_a_block(w.format, pairs, w.experts, x.device))
    inner = torch.empty(pairs, w.inter, dtype=x.dtype, device=x.device)
    project_in(x, blocks, w, inner)
    parts = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    project_out(inner, weights, blocks, w, parts)
    add_up(parts, blocks, y)
    return y
