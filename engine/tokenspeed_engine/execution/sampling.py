"""From what a step left on the device to the results of its rows."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_engine.control import Accepted, Failed, RowResult, StepPlan, StepResult, TokenLogprobs
from tokenspeed_engine.execution.upload import int64, upload
from tokenspeed_engine.execution.verify import Verified
from tokenspeed_kernels.sampling import logprobs

Detail = tuple[int, float, list[float], list[int]]
"""Of one row of logits: the chosen id, its log-probability, and those of the best ids, with these."""


@dataclass(frozen=True)
class Outcome:
    """A step on the device. logits: Float32 [L, vocab]. drafts: Int64 [R, num_drafts], None without a draft head."""

    logits: Tensor
    verified: Verified
    drafts: Tensor | None


class Download:
    """A step's results on their way to the host."""

    def __init__(self, plan: StepPlan, outcome: Outcome) -> None:
        """Begins to copy, without waiting; a later step may then overwrite `outcome`."""
        self._plan = plan
        verified, q_len = outcome.verified, outcome.verified.tokens.shape[1]
        # Rows of decodes that only pad a bucket are left out.
        prefills = sum(row.sample is not None for row in plan.rows[plan.num_decodes :])
        bucket = verified.counts.shape[0] - prefills
        self._rows = [*range(plan.num_decodes), *range(bucket, bucket + prefills)]
        columns = [verified.tokens, verified.counts[:, None], verified.finite[:, None].long()]
        table = torch.cat([*columns, *([] if outcome.drafts is None else [outcome.drafts])], dim=1)
        self._q_len = q_len
        self._wanted, most = _wanted_logprobs(plan, bucket, q_len)
        details: tuple[Tensor, ...] = ()
        if self._wanted:
            places = upload({"places": int64(self._wanted)}, outcome.logits.device)["places"]
            most = max(1, min(most, outcome.logits.shape[1]))
            chosen = verified.ids[places]
            details = (chosen, *logprobs(outcome.logits[places], chosen, top=most))
        self._tensors = [_to_host(tensor) for tensor in (table, *details)]
        self._event = None
        if table.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def result(self) -> StepResult:
        """Waits for the copies: the one wait for the device in a step."""
        if self._event is not None:
            self._event.synchronize()
        table, *details = (tensor.tolist() for tensor in self._tensors)
        found = dict(zip(self._wanted, zip(*details, strict=True), strict=True)) if details else {}
        return StepResult(tuple(self._results(table, found)))

    def _results(self, table: list[list[int]], details: dict[int, Detail]) -> Iterator[RowResult]:
        remaining = iter(self._rows)
        first_prefill = len(table) - (len(self._rows) - self._plan.num_decodes)
        for row in self._plan.rows:
            if row.sample is None:
                yield Accepted()
                continue
            i = next(remaining)
            tokens, (count, finite, *drafts) = table[i][: self._q_len], table[i][self._q_len :]
            if not finite:
                yield Failed("the model's logits are not finite")
                continue
            entries: list[TokenLogprobs] = []
            if row.sample.params.logprobs is not None:
                place = _place(i, first_prefill, self._q_len)
                entries = [_entry(details[place + j], row.sample.params.logprobs) for j in range(count)]
            yield Accepted(tuple(tokens[:count]), tuple(entries), tuple(drafts))


def _wanted_logprobs(plan: StepPlan, bucket: int, q_len: int) -> tuple[list[int], int]:
    """The rows of logits whose log-probabilities are asked for, and the most alternatives that any of them wants."""
    places: list[int] = []
    most = 0
    sampling = [row for row in plan.rows if row.sample is not None]
    for i, row in enumerate(sampling):
        assert row.sample is not None
        if row.sample.params.logprobs is None:
            continue
        most = max(most, row.sample.params.logprobs)
        place = _place(i if row.decode else bucket + i - plan.num_decodes, bucket, q_len)
        places += range(place, place + (q_len if row.decode else 1))
    return places, most


def _place(i: int, decodes: int, q_len: int) -> int:
    """The first row of logits of sampling row i."""
    return i * q_len if i < decodes else decodes * q_len + i - decodes


def _entry(detail: Detail, count: int) -> TokenLogprobs:
    token, logprob, values, tokens = detail
    return TokenLogprobs(token, logprob, tuple(zip(tokens[:count], values[:count], strict=True)))


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
