"""Multi-head latent attention in plain torch."""

import torch
from tokenspeed_registry import copy_into, kernel
from torch import Tensor

from tokenspeed_kernels import mla


@kernel(mla.merge_states, backend="torch")
def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    merged_lse = torch.logaddexp(lse_a, lse_b)
    # Both sides empty: −inf − −inf is NaN, and the weights must be zero.
    weight_a = (lse_a - merged_lse).exp().nan_to_num(0.0).unsqueeze(-1)
    weight_b = (lse_b - merged_lse).exp().nan_to_num(0.0).unsqueeze(-1)
    merged = (weight_a * out_a.float() + weight_b * out_b.float()).to(out_a.dtype)
    return (merged, merged_lse) if out is None else copy_into(out, (merged, merged_lse))
