"""Choice of the next token: sampling from processed logits, and log-probabilities of what was chosen.

Sources: top-k sampling (arXiv:1805.04833), nucleus (top-p) sampling (arXiv:1904.09751), both drawn by inversion of
the cumulative distribution, so that one uniform number decides a token and a seed reproduces it.
"""

import itertools
import math

import torch
from jaxtyping import Float32, Int32, Int64
from torch import Tensor

from tokenspeed_registry import Cost, Indices, op, rounded_sum


@op(
    family="sampling",
    cases="tokenspeed_kernels.cases.sampling:sample",
    outputs=("ids",),
    static=("vocab",),
    where=("vocab >= 1",),
    cost=lambda s: Cost(
        flops=5 * s.numel("logits"), nbytes=s.nbytes("logits", "temperature", "top_k", "top_p", "uniform", "ids")
    ),
    # Not of an id but of the cumulative probabilities around it: a float32 sum over the vocabulary. See the case set.
    tolerance=lambda s, role: rounded_sum(torch.float32, terms=s["vocab"]),
)
def sample(
    logits: Float32[Tensor, "batch vocab"],
    temperature: Float32[Tensor, "batch"],
    top_k: Int32[Tensor, "batch"],
    top_p: Float32[Tensor, "batch"],
    uniform: Float32[Tensor, "batch"],
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Int64[Tensor, "batch"]:
    """One token id a row, drawn by inverting the cumulative distribution at `uniform`.

    `logits`: after penalties and masks, before the temperature. A NaN counts as −inf, a token at −inf is never drawn,
    tokens at +inf share all mass, and a row without any token left gives id 0.
    `temperature`: divides the logits; 0 or less takes the first token of the order below, whatever else is given.
    `top_k`: how many tokens are kept; 0 or less, or more than the vocabulary: all.
    `top_p`: of those, whose probabilities softmax(logits / temperature) add up to 1, the fewest whose mass reaches
    `top_p` are kept, at least one; 1 or more: all.
    `uniform`: a random number in [0, 1), drawn by the caller, who so owns the seed.

    Tokens are ordered by logit, largest first, equal ones by id. The id is the first whose cumulative probability,
    renormalised over what is kept, exceeds `uniform`. Rows do not affect one another. Returns int64 ids from 0 to
    vocab − 1. Raises `ArgumentError` for arguments that do not fit.

    Source: arXiv:1805.04833 (top-k) and arXiv:1904.09751 (top-p).
    """
    ids = []
    for row in range(logits.shape[0]):
        order, weights = kept_tokens(logits[row], float(temperature[row]), int(top_k[row]))
        ids.append(_invert(order, weights, float(top_p[row]), float(uniform[row])))
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def kept_tokens(logits: Tensor, temperature: float, top_k: int) -> tuple[list[int], list[float]]:
    """The tokens of one row that temperature and top-k leave, most probable first, and their probabilities.

    `logits` [vocab]. Computed in float64; both lists are empty where no token is left.
    """
    values = logits.double().tolist()
    order = [token for token, value in enumerate(values) if not math.isnan(value) and value > -math.inf]
    order.sort(key=lambda token: (-values[token], token))
    kept = 1 if temperature <= 0 else top_k if 0 < top_k < len(order) else len(order)
    order = order[:kept]
    best = values[order[0]] if order else 0.0
    weights = [1.0 if values[token] == best else math.exp((values[token] - best) / temperature) for token in order]
    total = math.fsum(weights)
    return order, [weight / total for weight in weights]


def _invert(order: list[int], probabilities: list[float], top_p: float, uniform: float) -> int:
    """The token at `uniform` of the fewest tokens whose mass reaches `top_p`."""
    if not order:
        return 0
    cumulative, kept = list(itertools.accumulate(probabilities)), len(order)
    if top_p < 1:
        kept = next((i + 1 for i, mass in enumerate(cumulative) if mass >= top_p), kept)
    target = uniform * cumulative[kept - 1]
    return next((order[i] for i in range(kept) if cumulative[i] > target), order[kept - 1])


@op(
    family="sampling",
    cases="tokenspeed_kernels.cases.sampling:logprobs",
    outputs=("logprob", "top_logprobs", "top_ids"),
    static=("vocab",),
    where=("vocab >= 1", "0 <= top <= vocab"),
    checks=(Indices("ids", below="vocab"),),
    cost=lambda s: Cost(
        flops=4 * s.numel("logits"), nbytes=s.nbytes("logits", "ids", "logprob", "top_logprobs", "top_ids")
    ),
    # A float32 sum over the vocabulary, then its logarithm. See the case set for how it is held to this.
    tolerance=lambda s, role: rounded_sum(torch.float32, terms=s["vocab"]),
)
def logprobs(
    logits: Float32[Tensor, "batch vocab"],
    ids: Int64[Tensor, "batch"],
    *,
    top: int,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float32[Tensor, "batch"], Float32[Tensor, "batch top"], Int64[Tensor, "batch top"]]:
    """Log-probabilities, natural, of the chosen ids and of the `top` most probable tokens of each row.

    `logits`: taken as they come: temperature, top-k and top-p are the caller's to apply. A NaN counts as −inf; in a row
    without any other every log-probability is −inf. +inf has no defined result.
    `ids`: the token chosen in each row; −1 marks padding, whose results are all zeros.
    `top`: how many of the most probable tokens to return, 0 to vocab.

    Log-probabilities are logit − log(sum(exp(logits))), in float32. The most probable come first, equal ones by id.
    Returns (logprob, top_logprobs, top_ids). Raises `ArgumentError` for arguments that do not fit, `ContentError` for
    an id outside the vocabulary where ids are checked (short CPU tensors, or debug mode).

    Source: the definition of log-softmax.
    """
    batch = logits.shape[0]
    logprob = torch.zeros(batch, dtype=torch.float64, device=logits.device)
    top_logprobs = torch.zeros(batch, top, dtype=torch.float64, device=logits.device)
    top_ids = torch.zeros(batch, top, dtype=torch.int64, device=logits.device)
    for row, token in enumerate(ids.tolist()):
        if token == -1:
            continue
        values = [-math.inf if math.isnan(value) else value for value in logits[row].double().tolist()]
        best = max(values)
        if best > -math.inf:
            total = best + math.log(math.fsum(math.exp(value - best) for value in values))
            values = [value - total for value in values]
        order = sorted(range(len(values)), key=lambda other: (-values[other], other))[:top]
        logprob[row] = values[token]
        top_logprobs[row] = torch.tensor([values[other] for other in order], dtype=torch.float64)
        top_ids[row] = torch.tensor(order, dtype=torch.int64)
    return logprob, top_logprobs, top_ids
