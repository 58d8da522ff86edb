"""From logits to tokens, on the device: every token is sampled, and a draft counts if it is the one that was.

A draft is one token, not a distribution, so this is rejection sampling, exactly: a draft d passes with probability
p(d), and where it does not, what was sampled is distributed as p without d. Moreover a token depends on its own random
number alone, so that a request has the same tokens however many drafts are tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed_engine.control import Row, Sample, StepPlan
from tokenspeed_engine.execution.batch import Batch
from tokenspeed_engine.execution.layout import Shape
from tokenspeed_engine.execution.upload import Tensors
from tokenspeed_engine.splitmix64 import splitmix64
from tokenspeed_kernels.sampling import sample


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of each row of logits, [L] each: Float32 but for top_k, Int32."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor


@dataclass(frozen=True)
class Verified:
    """What R rows yield. ids: Int64 [L], sampled after each row of logits. tokens: Int64 [R, q_len], −1 past `counts`.

    counts: Int64 [R]. finite: Bool [R], whether all logits that a row's tokens come from are.
    """

    ids: Tensor
    tokens: Tensor
    counts: Tensor
    finite: Tensor


def lay_out_sampling(plan: StepPlan, shape: Shape, vocab: int) -> dict[str, NDArray[Any]]:
    """The arrays of `Sampling`, in the order of `Batch.sampled`; padding is greedy."""
    wanted: list[tuple[Sample, int] | None] = []
    for row in plan.rows[: plan.num_decodes]:
        wanted += [(_sample(row), j) for j in range(shape.q_len)]
    wanted += [None] * ((shape.decodes - plan.num_decodes) * shape.q_len)
    wanted += [(row.sample, 0) for row in plan.rows[plan.num_decodes :] if row.sample]
    # A top_k above the vocabulary keeps all of it, and may be above int32 too.
    return {
        "sampling.temperature": _floats([0.0 if one is None else one[0].params.temperature for one in wanted]),
        "sampling.top_k": np.array([0 if one is None else min(one[0].params.top_k, vocab) for one in wanted], np.int32),
        "sampling.top_p": _floats([1.0 if one is None else one[0].params.top_p for one in wanted]),
        "sampling.uniform": _floats(
            [0.0 if one is None else uniform(one[0].seed, one[0].index + one[1]) for one in wanted]
        ),
    }


def as_sampling(tensors: Tensors) -> Sampling:
    """The tensors of `lay_out_sampling`'s arrays."""
    return Sampling(*(tensors[f"sampling.{name}"] for name in ("temperature", "top_k", "top_p", "uniform")))


def verify(logits: Tensor, sampling: Sampling, batch: Batch) -> Verified:
    """Samples after every row of `logits` Float32 [L, vocab], those of `batch.sampled`, and compares."""
    ids = sample(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.uniform)
    finite = logits.isfinite().all(dim=1)
    decodes, q_len = batch.num_decodes, batch.q_len
    after = ids[: decodes * q_len].view(decodes, q_len)
    drafts = batch.ids[: decodes * q_len].view(decodes, q_len)[:, 1:]  # −1 where there is none, which no sample is
    counts = 1 + (after[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)
    past = torch.arange(q_len, device=ids.device) >= counts[:, None]
    prefills = ids[decodes * q_len :]
    unused = prefills.new_full((prefills.shape[0], q_len - 1), -1)
    return Verified(
        ids=ids,
        tokens=torch.cat([after.masked_fill(past, -1), torch.cat([prefills[:, None], unused], dim=1)]),
        counts=torch.cat([counts, torch.ones_like(prefills)]),
        finite=torch.cat(
            [(finite[: decodes * q_len].view(decodes, q_len) | past).all(dim=1), finite[decodes * q_len :]]
        ),
    )


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: splitmix64 of both, its upper 24 bits.

    24 bits are what float32 holds exactly, so the number never rounds up to 1.
    """
    return (splitmix64(splitmix64(seed) ^ index) >> 40) / (1 << 24)


def _sample(row: Row) -> Sample:
    if row.sample is None:
        raise ValueError(f"a decode row must sample, that of {row.request_id!r} does not")
    return row.sample


def _floats(values: Sequence[float]) -> NDArray[np.float32]:
    return np.array(values, np.float32)
