"""Which requests run in a step, and with which tokens: continuous batching with chunked prefill.

Requests are admitted in order of arrival, and where pages run out the youngest running one gives way. So the running
requests are at all times the oldest unfinished ones. The oldest of all is never preempted for another, and admission
has checked that the pool can hold it to its end: it finishes, then the next, and no request waits for ever.
"""

from collections import OrderedDict
from collections.abc import Sequence

from tokenspeed_engine.control.config import ControlConfig
from tokenspeed_engine.control.lifecycle import Decoding, Finished, FinishReason, Prefilling, Running, Waiting
from tokenspeed_engine.control.pages import PagePool
from tokenspeed_engine.control.plan import Row, Sample, StepPlan
from tokenspeed_engine.control.request import Request
from tokenspeed_engine.control.slots import StatePool


class Scheduler:
    """Owns the pools and every live request's state."""

    def __init__(self, config: ControlConfig) -> None:
        self.pages = PagePool(config.num_pages, config.page_size)
        self.slots = StatePool(config.num_slots)
        self._config = config
        # Both in order of arrival: a new request joins the end of waiting, a preempted one its front.
        self._waiting: OrderedDict[str, Waiting] = OrderedDict()
        self._running: dict[str, Running] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        """Let a request wait that `Admission` has passed."""
        self._waiting[request.id] = Waiting.new(request)

    def plan(self) -> StepPlan:
        """Decide on the next step. Its outcome is told by `advance`, `accept` and `finish` before the next plan."""
        self._make_room()
        decodes = [state for state in self._running.values() if isinstance(state, Decoding)]
        budget = self._config.max_step_tokens - len(decodes)
        self._admit(budget)
        prefills = [state for state in self._running.values() if isinstance(state, Prefilling)]

        # Drafts must not hold up a prefill for ever: one token of each step stays for it.
        spare = budget - 1 if prefills else budget
        rows = []
        for decode in decodes:
            row = self._decode_row(decode, self._take_drafts(decode, spare))
            spare -= len(row.tokens) - 1
            budget -= len(row.tokens) - 1
            rows.append(row)
        for prefill in prefills:
            if budget == 0:
                break
            count = min(budget, len(prefill.tokens) - prefill.computed)
            rows.append(self._prefill_row(prefill, count))
            budget -= count
        return StepPlan(tuple(rows), len(decodes))

    def advance(self, row: Row) -> None:
        """A row ran that ends before its request's last known token."""
        state = self._running[row.request_id]
        assert isinstance(state, Prefilling)
        self._running[row.request_id] = state.advance(len(row.tokens))

    def accept(self, row: Row, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """A row yielded tokens, and drafts of those to come."""
        match self._running[row.request_id]:
            case Prefilling() as state:
                (token,) = tokens
                self._running[row.request_id] = state.complete(token, drafts)
            case Decoding() as state:
                self._running[row.request_id] = state.accept(tokens, drafts)

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> Finished:
        """End a request, whatever it is doing; what it holds is free at once."""
        if request_id in self._waiting:
            return self._waiting.pop(request_id).finish(reason, error)
        return self._running.pop(request_id).finish(reason, error)

    def _make_room(self) -> None:
        """Give each decode, oldest first, the page of its next token, at the expense of the youngest."""
        for request_id, state in list(self._running.items()):
            if isinstance(state, Decoding):
                while request_id in self._running and not state.pages.grow(len(state.tokens)):
                    self._preempt_youngest()

    def _preempt_youngest(self) -> None:
        request_id, state = self._running.popitem()
        self._waiting[request_id] = state.preempt()
        self._waiting.move_to_end(request_id, last=False)

    def _admit(self, budget: int) -> None:
        """Let waiting requests in, first come first served, while this step has tokens left for them."""
        running = self._running.values()
        budget -= sum(len(state.tokens) - state.computed for state in running if isinstance(state, Prefilling))
        # A page for each running request that will want another one: admitting into the last pages would only mean to
        # be preempted at the next step.
        reserve = sum(self._will_grow(state) for state in running)
        while self._waiting and budget > 0 and len(self._running) < self._config.max_batch and self.slots.num_free:
            request_id, waiting = next(iter(self._waiting.items()))
            num_tokens = len(waiting.tokens)
            if self.pages.num_free < self.pages.pages_for(num_tokens) + reserve:
                break
            pages, slot = self.pages.lease(num_tokens), self.slots.lease()
            assert pages is not None
            assert slot is not None
            del self._waiting[request_id]
            state = self._running[request_id] = waiting.admit(pages, slot)
            budget -= num_tokens
            reserve += self._will_grow(state)

    def _will_grow(self, state: Running) -> bool:
        return state.pages.capacity < state.request.max_tokens - 1

    def _take_drafts(self, state: Decoding, spare: int) -> tuple[int, ...]:
        """As many drafts as tokens, pages and what is left of the request's length allow; none costs another a page."""
        known = len(state.tokens)
        count = min(len(state.drafts), spare, state.request.max_tokens - known - 1)
        if not state.pages.grow(known + count):
            count = min(count, state.pages.capacity - known)
        return state.drafts[:count]

    def _decode_row(self, state: Decoding, drafts: tuple[int, ...]) -> Row:
        last = state.tokens.span(state.computed, state.computed + 1)
        return self._row(state, (*last, *drafts), sampled=True)

    def _prefill_row(self, state: Prefilling, count: int) -> Row:
        end = state.computed + count
        return self._row(state, state.tokens.span(state.computed, end), sampled=end == len(state.tokens))

    def _row(self, state: Running, tokens: tuple[int, ...], sampled: bool) -> Row:
        request, start = state.request, state.computed
        return Row(
            request_id=request.id,
            tokens=tokens,
            start=start,
            pages=state.pages.pages,
            slot=state.slot.slot,
            fresh=start == 0,
            context=state.tokens.span(start - self._config.context_tokens, start),
            sample=Sample(request.params, request.seed, state.tokens.num_generated) if sampled else None,
            decode=isinstance(state, Decoding),
        )
