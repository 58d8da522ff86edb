"""What one step runs and what comes of it: plain data between the control plane and an executor."""

import math
from dataclasses import dataclass
from typing import Protocol

from tokenspeed_engine.control.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample after a row's last token, or after each of its tokens where they are drafts to verify.

    The j-th token that the row yields (from 0) is drawn with randomness that depends on `(seed, index + j)` alone, so
    that a request has the same tokens alone, in a batch, and after a preemption.

    Args:
        params: the request's parameters.
        seed: an unsigned 64-bit integer.
        index: tokens the request had generated before this step.
    """

    params: SamplingParams
    seed: int
    index: int


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step.

    Args:
        request_id: whose row it is.
        tokens: ids to run: a chunk of known tokens, or the last token followed by drafts.
        start: position of tokens[0] in the sequence. Everything before it is in the pages and the slot.
        pages: pages of the sequence in order, enough for the positions of all of tokens.
        slot: the recurrent-state slot.
        fresh: the sequence starts here, and the slot counts as zero whatever it holds.
        context: the tokens before start, nearest last, as many as the configuration asks for and there are.
        sample: None where more known tokens follow in a later step.
        decode: whether tokens are the last token and drafts.
        following: the known token after tokens[-1], where more known tokens follow; None where it is to be sampled.

    A slot whose row before began at s, and whose row now starts at s', had s' - s tokens of that row accepted.
    """

    request_id: str
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    slot: int
    fresh: bool
    context: tuple[int, ...]
    sample: Sample | None
    decode: bool
    following: int | None = None


@dataclass(frozen=True, slots=True)
class Settle:
    """Bring a slot into plain form, as after exactly `length` tokens of its sequence: what was kept is folded in, what
    was rejected is dropped.

    `length` lies within what the slot's last row ran: start + 1 to start + len(tokens) of it.
    """

    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class CopySlot:
    """Copy a settled slot to another one of the pool, which counts as settled at the source's length."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Copy a KV page of all layers."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy a settled slot to a host snapshot."""

    slot: int
    host: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copy a host snapshot to a slot, which counts as settled at the snapshot's length."""

    host: int
    slot: int


Transfer = Settle | CopySlot | CopyPage | Offload | Fetch


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the transfers, one after the other in their order, and then the rows.

    Args:
        rows: decodes first.
        num_decodes: how many of the rows are decodes.
        transfers: a slot or page that one of them overwrites may be another's source before it, and a row's after it.
    """

    rows: tuple[Row, ...]
    num_decodes: int
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the model, at one generated token.

    Args:
        token: the chosen id.
        logprob: its log-probability.
        top: the most probable ids with theirs, most probable first, as many as the request asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A row that went well.

    Args:
        tokens: the tokens it yields. Without `Row.sample` none; else one, or with m accepted drafts m + 1. After a
            decode, pages and slot are as if the row had run its first len(tokens) tokens only.
        logprobs: one entry a token where the request asked for them, else empty.
        drafts: guesses at the tokens that follow, for the next step; at most `ControlConfig.num_drafts`.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A row that could not be computed (logits that are not finite, say); other rows are untouched by it."""

    message: str


RowResult = Accepted | Failed


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result a row of the plan, in its order."""

    rows: tuple[RowResult, ...]


class PendingStep(Protocol):
    """A step that was handed to the device."""

    def result(self) -> StepResult:
        """Wait for the step. An exception ends the requests of all rows, and what is cached is forgotten."""
        ...


class Executor(Protocol):
    """The execution plane as the control plane sees it."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Begin a step, without waiting where the device is asynchronous. An exception counts as the result's."""
        ...


def row_fault(row: Row, result: Accepted) -> str | None:
    """What makes a result unusable for its row, or None."""
    most = 0 if row.sample is None else len(row.tokens) if row.decode else 1
    least = min(most, 1)
    if not least <= len(result.tokens) <= most:
        return f"the executor yielded {len(result.tokens)} tokens for a row that can yield {least} to {most}"
    if any(token < 0 for token in (*result.tokens, *result.drafts)):
        return f"the executor yielded a negative token id: {result.tokens}, drafts {result.drafts}"
    wanted = row.sample is not None and row.sample.params.logprobs is not None
    if tuple(entry.token for entry in result.logprobs) != (result.tokens if wanted else ()):
        return f"the executor yielded {len(result.logprobs)} log-probabilities that do not go with {result.tokens}"
    if any(math.isnan(entry.logprob) for entry in result.logprobs):
        return "a log-probability is not a number"
    return None
