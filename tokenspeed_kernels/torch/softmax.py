"""Softmax attention on dense, batched tensors: what the attention kernels have in common after gathering keys."""

import torch
from torch import Tensor

QUERY_BLOCK = 128
"""Queries of a sequence whose scores an attention kernel holds at once."""


def softmax_attention(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of `queries` [..., rows, qk] over the first `visible` [..., rows] of `keys` [..., count, qk].

    All in float32; leading dims broadcast. Returns outputs [..., rows, dim] for `values` [..., count, dim] and natural
    log-sum-exps [..., rows]: zeros and −inf where nothing is visible. Keys and values must be finite even where no
    row sees them.
    """
    scores = torch.matmul(queries, keys.transpose(-1, -2)) * scale
    hidden = torch.arange(keys.shape[-2], device=keys.device) >= visible.unsqueeze(-1)
    scores = scores.masked_fill_(hidden, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    # Subtracting −inf from −inf would give NaN where a row sees nothing.
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
    return torch.matmul(weights, values), lse
