"""Sampling and log-probabilities in plain torch."""

import torch
from torch import Tensor

from tokenspeed_kernels import sampling
from tokenspeed_kernels.torch.topk import largest
from tokenspeed_registry import copy_into, kernel


@kernel(sampling.sample, backend="torch")
def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor, *, out: Tensor | None = None
) -> Tensor:
    vocab = logits.shape[1]
    temperature, top_k, top_p, uniform = (t.unsqueeze(1) for t in (temperature, top_k, top_p, uniform))
    values, order = _without_nan(logits).sort(dim=1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    greedy = temperature <= 0
    # A greedy row keeps one token, which any uniform number then draws.
    kept = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k).masked_fill(greedy, 1)
    dropped = (rank >= kept) | (values == -torch.inf)
    # inf − inf is NaN: the difference of equal values is 0 by definition here.
    below = torch.where(values == values[:, :1], 0.0, values - values[:, :1])
    weights = (below / temperature.masked_fill(greedy, 1.0)).exp().masked_fill(dropped, 0.0)
    cumulative = weights.cumsum(1)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    # The first token at which the mass reaches top_p is still in. A top_p of 0 leaves none.
    nucleus = (before < top_p * cumulative[:, -1:]) | (top_p >= 1)
    weights = weights.masked_fill(~nucleus, 0.0)
    mass = cumulative.masked_fill(~nucleus, 0.0).amax(1, keepdim=True)
    # Rounding can lift uniform · mass to the mass itself: the last token with any weight then takes it, and where no
    # token is left, the first.
    last = (weights > 0).sum(1, keepdim=True) - 1
    chosen = (cumulative <= uniform * mass).sum(1, keepdim=True).minimum(last).clamp_min(0)
    ids = order.gather(1, chosen).squeeze(1)
    return ids if out is None else copy_into(out, ids)


@kernel(sampling.logprobs, backend="torch")
def logprobs(
    logits: Tensor, ids: Tensor, *, top: int, out: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    values = _without_nan(logits)
    logs = values.log_softmax(1).masked_fill(values == -torch.inf, -torch.inf)
    padding = (ids == -1).unsqueeze(1)
    logprob = logs.gather(1, ids.clamp_min(0).unsqueeze(1)).masked_fill(padding, 0.0).squeeze(1)
    top_ids = largest(values, top)
    top_logprobs = logs.gather(1, top_ids).masked_fill(padding, 0.0)
    results = logprob, top_logprobs, top_ids.masked_fill(padding, 0)
    return results if out is None else copy_into(out, results)


def _without_nan(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits.isnan(), -torch.inf)
