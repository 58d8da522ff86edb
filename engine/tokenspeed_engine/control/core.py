"""The engine's loop: requests in, steps of an executor, outputs out.

A step's tokens are taken in two parts. The *commit* is short: ids, ends by id or length, pages and slots; the next plan
needs it. The *text* is slow: characters, stop strings, outputs. With overlap, the next step is submitted between the
two, so that text is made, outputs are delivered and requests come in while the device runs. The plan is exact all the
same, but for one thing: a stop string is found when the next step with its request runs already. That row is *doomed*:
the request's last output is out, what the row yields is dropped, and pages and slot are free when it is over.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokenspeed_engine.control.admission import Admission
from tokenspeed_engine.control.config import ControlConfig
from tokenspeed_engine.control.counters import Counters
from tokenspeed_engine.control.detokenise import Tokenizer
from tokenspeed_engine.control.errors import ExecutorLostError, RequestRefusedError
from tokenspeed_engine.control.lifecycle import FinishReason
from tokenspeed_engine.control.output import OutputStream, RequestOutput
from tokenspeed_engine.control.plan import (
    Accepted,
    Executor,
    Failed,
    PendingStep,
    Row,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
    row_fault,
)
from tokenspeed_engine.control.sampling import SamplingParams
from tokenspeed_engine.control.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was submitted, or what kept it from it."""

    plan: StepPlan
    step: PendingStep | Exception


class EngineCore:
    """Serves requests through an executor, deterministically: the same calls give the same plans.

    Not safe across threads; `add` and `abort` may be called while the executor runs, from the thread it runs in.

    Args:
        config: limits.
        executor: the execution plane.
        vocab_size: prompt ids are below it.
        eos_token_ids: tokens that end every request which does not ignore them.
        tokenizer: None serves token ids only.

    `executor_lost`: whether the executor said that it has failed for good, with which every request will fail too.
    """

    def __init__(
        self,
        config: ControlConfig,
        executor: Executor,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.executor_lost = False
        self._executor = executor
        self._overlap = config.overlap
        self._admission = Admission(config, vocab_size, tokenizer is not None)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._streams: dict[str, OutputStream] = {}
        self._pending: list[RequestOutput] = []
        self._flight: _Flight | None = None
        self._in_flight: frozenset[str] = frozenset()
        self._doomed: dict[str, FinishReason] = {}
        # Committed results whose text is to be made.
        self._untold: list[tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...]]] = []
        self._num_steps = self._num_generated = 0
        self._num_draft_steps = self._num_proposed = self._num_accepted = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        return bool(self._streams or self._pending or self._in_flight)

    @property
    def counters(self) -> Counters:
        scheduler = self.scheduler
        return Counters(
            steps=self._num_steps,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_tokens_device=scheduler.num_cached_device,
            cached_tokens_host=scheduler.num_cached_host,
            generated_tokens=self._num_generated,
            draft_steps=self._num_draft_steps,
            drafts_proposed=self._num_proposed,
            drafts_accepted=self._num_accepted,
            preemptions=scheduler.num_preemptions,
            snapshots_saved=scheduler.cache.snapshots.num_saved,
            snapshots_offloaded=scheduler.cache.snapshots.num_offloaded,
        )

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Take a request in.

        Args:
            request_id: unique until the output with its finish reason has been handed out, and the step over that runs
                the request.
            prompt: token ids.
            params: sampling parameters.

        Raises:
            RequestRefusedError: it can never be served, and why. The engine is as before.
        """
        live = request_id in self._streams or request_id in self._in_flight
        if live or any(output.request_id == request_id for output in self._pending):
            raise RequestRefusedError(f"request_id: {request_id!r} is in use")
        request = self._admission.request(request_id, prompt, params)
        stream = OutputStream(request, self._eos_token_ids, self._tokenizer)
        if len(prompt) == request.max_tokens:
            # The prompt fills the context: cut before the first token.
            self._pending.append(stream.take("length"))
            return
        self._streams[request_id] = stream
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; its pages and slot are free at once, or after the step that is running it.

        Returns whether there was such a request. Its last output, with finish reason "abort", comes with the next step.
        """
        self._tell()  # from inside a step, before whose text it may have ended
        if request_id not in self._streams:
            return False
        if request_id in self._in_flight:
            self._doomed.setdefault(request_id, "abort")
        else:
            self._end(request_id, "abort")
        return True

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[RequestOutput]:
        """Run one step and return what is new. With overlap, the next one runs when this returns.

        `meanwhile` is called between two steps where both are part of the call: what was asked for while the first one
        ran, `add` and `abort`, holds for the second.
        """
        if self._flight is None:
            self._submit()
        self._collect()
        if self._overlap:
            if meanwhile is not None:
                meanwhile()
            self._submit()
        self._tell()
        outputs, self._pending = self._pending, []
        return outputs

    def drain(self) -> None:
        """Wait for a step that runs and take what it yields, which the next `step` returns; begin no other."""
        self._collect()
        self._tell()

    def _submit(self) -> None:
        plan = self.scheduler.plan()
        for request_id, cached in self.scheduler.take_admitted().items():
            self._streams[request_id].cached_tokens = cached
        if not plan.rows:
            return
        self._num_steps += 1
        drafts = [len(row.tokens) - 1 for row in plan.rows if row.decode and len(row.tokens) > 1]
        self._num_draft_steps += len(drafts)
        self._num_proposed += sum(drafts)
        self._in_flight = frozenset(row.request_id for row in plan.rows)
        try:
            self._flight = _Flight(plan, self._executor.submit(plan))
        except Exception as error:
            self._flight = _Flight(plan, error)
        except BaseException:
            self._lose(plan, "the step was interrupted")
            raise

    def _collect(self) -> None:
        """Wait for the step that runs, and commit it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        plan = flight.plan
        try:
            if isinstance(flight.step, Exception):
                raise flight.step
            result: StepResult = flight.step.result()
        except Exception as error:
            logger.exception("a step of %d rows failed", len(plan.rows))
            self.executor_lost = self.executor_lost or isinstance(error, ExecutorLostError)
            self._lose(plan, f"{type(error).__name__}: {error}")
        except BaseException:
            self._lose(plan, "the step was interrupted")
            raise
        else:
            if len(result.rows) == len(plan.rows):
                self._commit(plan.rows, result.rows)
            else:
                self._lose(plan, f"the executor returned {len(result.rows)} results for {len(plan.rows)} rows")

    def _lose(self, plan: StepPlan, message: str) -> None:
        """End the requests of a step of which nobody knows how far it came."""
        self._tell()
        self._commit(plan.rows, [Failed(message)] * len(plan.rows))
        self.scheduler.lose_step()

    def _commit(self, rows: Sequence[Row], results: Sequence[RowResult]) -> None:
        self._in_flight = frozenset()
        doomed, self._doomed = self._doomed, {}
        for row, result in zip(rows, results, strict=True):
            reason = doomed.get(row.request_id)
            if isinstance(result, Accepted) and (fault := row_fault(row, result)) is not None:
                result = Failed(fault)
            if isinstance(result, Accepted):
                self._accept(row, result, reason)
            elif reason is not None:
                self._end(row.request_id, reason)
            else:
                self._end(row.request_id, "error", result.message)

    def _accept(self, row: Row, result: Accepted, doomed: FinishReason | None) -> None:
        if row.decode:
            self._num_accepted += len(result.tokens) - 1
        if row.sample is None:
            self.scheduler.advance(row)
        elif doomed is not None:
            # One token as after a plain step: the sequence that is kept ends with what the client has.
            self.scheduler.accept(row, result.tokens[:1], ())
        else:
            count, reason = self._streams[row.request_id].cut(result.tokens)
            self._num_generated += count
            self.scheduler.accept(row, result.tokens[:count], result.drafts)
            if reason is not None:
                self.scheduler.finish(row.request_id, reason)
            self._untold.append((row.request_id, result.tokens[:count], result.logprobs))
        if doomed is not None:
            self._end(row.request_id, doomed)

    def _tell(self) -> None:
        """Make the text of what was committed, and the outputs."""
        while self._untold:
            request_id, tokens, logprobs = self._untold.pop(0)
            stream = self._streams[request_id]
            reason: FinishReason | None = None
            for index, token in enumerate(tokens):
                reason = stream.push(token, logprobs[index] if logprobs else None)
                if reason is not None:
                    break
            if reason is None:
                self._pending.append(stream.take())
            elif request_id in self._in_flight:
                self._doomed[request_id] = reason
                self._pending.append(self._streams.pop(request_id).take(reason))
            else:
                self._end(request_id, reason)

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End a request as far as it has not ended: for the scheduler, and with its last output."""
        if request_id in self.scheduler:
            self.scheduler.finish(request_id, reason, error)
        if request_id in self._streams:
            self._pending.append(self._streams.pop(request_id).take(reason, error))
