"""From logits to tokens: the plan's sampling parameters as tensors, seeded random numbers, log-probabilities."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_engine.control import Accepted, Failed, RowResult, Sample, TokenLogprobs
from tokenspeed_engine.splitmix64 import splitmix64
from tokenspeed_kernels.sampling import logprobs, sample


def sample_rows(logits: Tensor, samples: Sequence[Sample]) -> list[RowResult]:
    """One result a row of `logits` (Float32 [R, vocab]). A row that is not finite fails alone."""
    if not samples:
        return []
    device, vocab = logits.device, logits.shape[1]
    # A top_k above the vocabulary keeps all of it, and may be above int32 too.
    top_k = [min(s.params.top_k, vocab) for s in samples]
    ids = sample(
        logits,
        torch.tensor([s.params.temperature for s in samples], dtype=torch.float32, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor([s.params.top_p for s in samples], dtype=torch.float32, device=device),
        torch.tensor([uniform(s.seed, s.index) for s in samples], dtype=torch.float32, device=device),
    )
    finite = logits.isfinite().all(dim=1)
    # The one wait for the device in a step: what it sampled, and whether it could.
    tokens, good = torch.stack([ids, finite.long()]).tolist()
    wanting = [row for row, s in enumerate(samples) if s.params.logprobs is not None and good[row]]
    details = _logprobs(logits, ids, samples, wanting)
    return [
        Accepted((token,), (details[row],) if row in details else ())
        if good[row]
        else Failed("the model's logits are not finite")
        for row, token in enumerate(tokens)
    ]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: splitmix64 of both, its upper 24 bits.

    24 bits are what float32 holds exactly, so the number never rounds up to 1.
    """
    return (splitmix64(splitmix64(seed) ^ index) >> 40) / (1 << 24)


def _logprobs(logits: Tensor, ids: Tensor, samples: Sequence[Sample], rows: list[int]) -> dict[int, TokenLogprobs]:
    if not rows:
        return {}
    counts = [samples[row].params.logprobs or 0 for row in rows]
    chosen, values, tokens = logprobs(logits[rows], ids[rows], top=max(1, min(max(counts), logits.shape[1])))
    table = zip(rows, counts, ids[rows].tolist(), chosen.tolist(), values.tolist(), tokens.tolist(), strict=True)
    return {
        row: TokenLogprobs(token, logprob, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
        for row, count, token, logprob, top_values, top_ids in table
    }
