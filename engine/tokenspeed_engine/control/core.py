"""The engine's loop: requests in, steps of an executor, outputs out."""

import logging
from collections.abc import Iterable, Sequence

from tokenspeed_engine.control.admission import Admission
from tokenspeed_engine.control.config import ControlConfig
from tokenspeed_engine.control.detokenise import Tokenizer
from tokenspeed_engine.control.errors import RequestRefusedError
from tokenspeed_engine.control.lifecycle import FinishReason
from tokenspeed_engine.control.output import OutputStream, RequestOutput
from tokenspeed_engine.control.plan import Accepted, Executor, Failed, Row, RowResult, StepPlan, StepResult, row_fault
from tokenspeed_engine.control.sampling import SamplingParams
from tokenspeed_engine.control.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineCore:
    """Serves requests through an executor, deterministically: the same calls give the same plans.

    Not safe across threads; `add` and `abort` may be called while the executor runs, from the thread it runs in.

    Args:
        config: limits.
        executor: the execution plane.
        vocab_size: prompt ids are below it.
        eos_token_ids: tokens that end every request which does not ignore them.
        tokenizer: None serves token ids only.
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
        self._executor = executor
        self._admission = Admission(config, vocab_size, tokenizer is not None)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._streams: dict[str, OutputStream] = {}
        self._pending: list[RequestOutput] = []
        self._in_flight: frozenset[str] = frozenset()
        self._doomed: set[str] = set()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        return bool(self._streams or self._pending)

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Take a request in.

        Args:
            request_id: unique until the output with its finish reason has been handed out.
            prompt: token ids.
            params: sampling parameters.

        Raises:
            RequestRefusedError: it can never be served, and why. The engine is as before.
        """
        if request_id in self._streams or any(output.request_id == request_id for output in self._pending):
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
        if request_id not in self._streams:
            return False
        if request_id in self._in_flight:
            self._doomed.add(request_id)
        else:
            self._end(request_id, "abort")
        return True

    def step(self) -> list[RequestOutput]:
        """Run one step and return what is new, at most one output a request."""
        plan = self.scheduler.plan()
        if plan.rows:
            self._in_flight = frozenset(row.request_id for row in plan.rows)
            try:
                results = self._execute(plan)
            except BaseException:
                # Interrupted: nobody knows how far the rows' pages and slots have come.
                self._commit(plan, [Failed("the step was interrupted")] * len(plan.rows))
                raise
            self._commit(plan, results)
        outputs, self._pending = self._pending, []
        return outputs

    def _execute(self, plan: StepPlan) -> Sequence[RowResult]:
        try:
            result: StepResult = self._executor.execute(plan)
        except Exception as error:
            logger.exception("a step of %d rows failed", len(plan.rows))
            return [Failed(f"{type(error).__name__}: {error}")] * len(plan.rows)
        if len(result.rows) != len(plan.rows):
            message = f"the executor returned {len(result.rows)} results for {len(plan.rows)} rows"
            return [Failed(message)] * len(plan.rows)
        return result.rows

    def _commit(self, plan: StepPlan, results: Sequence[RowResult]) -> None:
        self._in_flight = frozenset()
        for row, result in zip(plan.rows, results, strict=True):
            if row.request_id in self._doomed:
                self._end(row.request_id, "abort")
            elif isinstance(result, Failed):
                self._end(row.request_id, "error", result.message)
            elif (fault := row_fault(row, result)) is not None:
                self._end(row.request_id, "error", fault)
            elif row.sample is None:
                self.scheduler.advance(row)
            else:
                self._accept(row, result)
        self._doomed.clear()

    def _accept(self, row: Row, result: Accepted) -> None:
        stream = self._streams[row.request_id]
        reason: FinishReason | None = None
        count = 0
        for token in result.tokens:
            reason = stream.push(token, result.logprobs[count] if result.logprobs else None)
            count += 1
            if reason is not None:
                break
        self.scheduler.accept(row, result.tokens[:count], result.drafts)
        if reason is None:
            self._pending.append(stream.take())
        else:
            self._end(row.request_id, reason)

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        self.scheduler.finish(request_id, reason, error)
        self._pending.append(self._streams.pop(request_id).take(reason, error))
