"""Which requests run in a step, and with which tokens: continuous batching with chunked prefill.

Where pages run out, the running request that arrived last gives way. So the oldest unfinished request is never
preempted for another once it runs. It is let in: `WaitingQueue` bounds how many go before it, what runs finishes one by
one, and admission has checked that the pool can hold it to its end. It finishes, then the next, and none waits for
ever. What a preempted request computed is published, so that it resumes from there while nobody needs the pages.
"""

from collections.abc import Sequence

from tokenspeed_engine.control.config import ControlConfig
from tokenspeed_engine.control.lifecycle import Decoding, Finished, FinishReason, Prefilling, Running, Waiting
from tokenspeed_engine.control.pages import PagePool
from tokenspeed_engine.control.plan import Row, StepPlan
from tokenspeed_engine.control.prefix_cache import PrefixCache
from tokenspeed_engine.control.request import Request
from tokenspeed_engine.control.rows import decode_row, prefill_row
from tokenspeed_engine.control.slots import StatePool
from tokenspeed_engine.control.waiting import WaitingQueue


class Scheduler:
    """Owns the pools, the prefix cache and every live request's state."""

    def __init__(self, config: ControlConfig) -> None:
        self.pages = PagePool(config.num_pages, config.page_size)
        self.slots = StatePool(config.pool_slots)
        self.cache = PrefixCache(config, self.pages, self.slots)
        self.num_prompt_tokens = self.num_cached_device = self.num_cached_host = self.num_preemptions = 0
        self._config = config
        self._waiting = WaitingQueue()
        self._running: dict[str, Running] = {}
        # Prefills that were let in because they continue a cached sequence, and for the same reason run before others.
        self._ahead: set[str] = set()
        # Requests of the last plan that did not go well, or not yet: nobody knows where their slots stand.
        self._in_flight: set[str] = set()
        self._admitted: dict[str, int] = {}
        # Free pages and published sequences when a request that waits was last found to need more: as long as neither
        # has grown, nothing needs to be looked up.
        self._refused: dict[str, tuple[int, int]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        """Whether it waits or runs."""
        return request_id in self._waiting or request_id in self._running

    def add(self, request: Request) -> None:
        """Let a request wait that `Admission` has passed."""
        self._wait(Waiting.new(request))

    def plan(self) -> StepPlan:
        """Decide on the next step. Its outcome is told by `advance`, `accept` and `finish` before the next plan."""
        self._make_room()
        decodes = [state for state in self._by_arrival() if isinstance(state, Decoding)]
        budget = self._config.max_step_tokens - len(decodes)
        self._admit(budget)
        prefills = self._prefills()

        # Drafts must not hold up a prefill for ever: one token of each step stays for it.
        spare = budget - 1 if prefills else budget
        rows = []
        for decode in decodes:
            row = decode_row(decode, self._take_drafts(decode, spare), self._config.context_tokens)
            spare -= len(row.tokens) - 1
            budget -= len(row.tokens) - 1
            rows.append(row)
        for prefill in prefills:
            if budget == 0:
                break
            count = min(budget, self._chunk(prefill))
            rows.append(prefill_row(prefill, count, self._config.context_tokens))
            budget -= count
        self._in_flight = {row.request_id for row in rows}
        # Without rows no plan is carried out, and the transfers wait for one.
        return StepPlan(tuple(rows), len(decodes), self.cache.take_transfers() if rows else ())

    def take_admitted(self) -> dict[str, int]:
        """Requests let in for the first time since the last call: how many of their tokens were cached."""
        admitted, self._admitted = self._admitted, {}
        return admitted

    def advance(self, row: Row) -> None:
        """A row ran that ends before its request's last known token."""
        state = self._running[row.request_id]
        assert isinstance(state, Prefilling)
        state = self._running[row.request_id] = state.advance(len(row.tokens))
        self._in_flight.discard(row.request_id)
        self._checkpoint(state)

    def accept(self, row: Row, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """A row yielded tokens, and drafts of those to come."""
        match self._running[row.request_id]:
            case Prefilling() as state:
                (token,) = tokens
                decoding = self._running[row.request_id] = state.complete(token, drafts)
                self._in_flight.discard(row.request_id)
                self._ahead.discard(row.request_id)
                self._checkpoint(decoding)
            case Decoding() as state:
                self._running[row.request_id] = state.accept(tokens, drafts)
                self._in_flight.discard(row.request_id)

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> Finished:
        """End a request, whatever it is doing; what it holds is free at once."""
        self._waiting.forget(request_id)
        self._refused.pop(request_id, None)
        self._admitted.pop(request_id, None)
        if request_id in self._waiting:
            return self._waiting.remove(request_id).finish(reason, error)
        state = self._running.pop(request_id)
        self._ahead.discard(request_id)
        if reason == "error":
            self.cache.forget(state.tokens.span(0, state.computed))
        else:
            self._publish(state)
        self._in_flight.discard(request_id)
        return state.finish(reason, error)

    def lose_step(self) -> None:
        """A step failed as a whole, and its requests have ended: what its transfers were to do may not be done.

        So nothing cached is trusted, nor what was copied for requests that have not run yet; these wait again.
        """
        self.cache.clear()
        for request_id, state in list(self._running.items()):
            if isinstance(state, Prefilling) and state.computed == state.reused > 0:
                self._preempt(request_id)

    def _by_arrival(self) -> list[Running]:
        return sorted(self._running.values(), key=_arrival)

    def _prefills(self) -> list[Prefilling]:
        prefills = [state for state in self._by_arrival() if isinstance(state, Prefilling)]
        return sorted(prefills, key=lambda state: state.request.id not in self._ahead)

    def _make_room(self) -> None:
        """Give each decode, oldest first, the page of its next token, at the expense of the youngest."""
        for state in self._by_arrival():
            if isinstance(state, Decoding):
                while state.request.id in self._running and not state.pages.grow(len(state.tokens)):
                    self._preempt(max(self._running.values(), key=_arrival).request.id)

    def _preempt(self, request_id: str) -> None:
        state = self._running.pop(request_id)
        self._ahead.discard(request_id)
        self._publish(state)
        self._wait(state.preempt())
        self.num_preemptions += 1

    def _wait(self, state: Waiting) -> None:
        tokens = state.tokens.span(0, len(state.tokens))
        match = self.cache.find(tokens)
        self._waiting.add(state, continues=match is not None and 2 * match.length > len(tokens))

    def _admit(self, budget: int) -> None:
        """Let waiting requests in while this step has tokens left for them."""
        most = min(self._config.max_batch, self._config.num_slots)
        while self._waiting and len(self._running) < most:
            prefills = self._prefills()
            left = budget - sum(map(_missing, prefills))
            left_ahead = budget - sum(_missing(state) for state in prefills if state.request.id in self._ahead)
            behind = [(s.request.id, s.request.arrival) for s in prefills if s.request.id not in self._ahead]
            continuing = self._waiting.continuing(behind) if left_ahead > 0 else None
            if continuing is not None:
                overtaken = self._waiting.older(continuing, behind)
                if self._try_to_admit(continuing, must_continue=True):
                    self._waiting.overtake(overtaken)
                    self._ahead.add(continuing.request.id)
                    continue
            oldest = self._waiting.oldest()
            if left <= 0 or oldest is None or not self._try_to_admit(oldest):
                break

    def _try_to_admit(self, waiting: Waiting, *, must_continue: bool = False) -> bool:
        """Give a request pages for all its tokens and a slot, if there are enough pages."""
        # A page for each running request that will want another one: admitting into the last pages would only mean to
        # be preempted at the next step.
        reserve = sum(self._will_grow(state) for state in self._running.values())
        request_id, circumstances = waiting.request.id, (self.pages.num_free - reserve, self.cache.num_published)
        if request_id in self._refused and _no_better(circumstances, self._refused[request_id]):
            return False
        tokens = waiting.tokens.span(0, len(waiting.tokens))
        match = self.cache.find(tokens)
        if must_continue and (match is None or 2 * match.length <= len(tokens)):
            self._waiting.does_not_continue(waiting)
            return False
        on_host = match is not None and self.cache.is_on_host(match)
        leases = self.cache.lease(len(tokens), match, reserve)
        if leases is None and match is not None and match.tail is not None:
            # The page to be copied may be the one that is missing.
            match = self.cache.find(tokens, whole_pages=True)
            on_host = match is not None and self.cache.is_on_host(match)
            leases = self.cache.lease(len(tokens), match, reserve)
        if leases is None:
            self._refused[request_id] = circumstances
            return False
        self._refused.pop(request_id, None)
        self._waiting.remove(request_id)
        reused = 0 if match is None else match.length
        self._running[request_id] = waiting.admit(*leases, reused=reused)
        if not waiting.was_admitted:
            self._admitted[request_id] = reused
            self.num_prompt_tokens += len(tokens)
            self.num_cached_host += reused * on_host
            self.num_cached_device += reused * (not on_host)
        return True

    def _will_grow(self, state: Running) -> bool:
        return state.pages.capacity < state.request.max_tokens - 1

    def _take_drafts(self, state: Decoding, spare: int) -> tuple[int, ...]:
        """As many drafts as tokens, pages and what is left of the request's length allow; none costs another a page."""
        known = len(state.tokens)
        count = min(len(state.drafts), spare, state.request.max_tokens - known - 1)
        if not state.pages.grow(known + count):
            count = min(count, state.pages.capacity - known)
        return state.drafts[:count]

    def _chunk(self, state: Prefilling) -> int:
        """Tokens up to the next one after which a snapshot is due, or to the last."""
        missing, interval = _missing(state), self._interval
        return min(missing, interval - state.computed % interval) if interval else missing

    @property
    def _interval(self) -> int:
        return self._config.state_interval if self._config.prefix_cache else 0

    def _checkpoint(self, state: Running) -> None:
        if self._interval and state.computed % self._interval == 0:
            self.cache.checkpoint(state.tokens.span(0, state.computed), state.pages, state.slot)

    def _publish(self, state: Running) -> None:
        """Leave what a request computed to the cache, if it is known where its slot stands."""
        if state.request.id not in self._in_flight and not (
            isinstance(state, Prefilling) and state.computed == state.reused
        ):
            self.cache.publish(state.tokens.span(0, state.computed), state.pages, state.slot)


def _arrival(state: Running) -> int:
    return state.request.arrival


def _no_better(circumstances: tuple[int, int], before: tuple[int, int]) -> bool:
    return circumstances[0] <= before[0] and circumstances[1] == before[1]


def _missing(state: Running) -> int:
    return len(state.tokens) - state.computed
