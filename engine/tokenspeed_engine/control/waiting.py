"""The order in which waiting requests are admitted.

By arrival, except that a request that continues a cached sequence may go before older ones: most of its prompt is
there, so it costs a step little, and an agent between two turns waits for nothing else. No request is overtaken more
than `MAX_OVERTAKEN` times, in its prefill as little as while it waits: whoever would have to go before one that has
been keeps its place. So each request is admitted and prefilled after those that are older and at most that many others.
"""

from collections.abc import Iterable, Iterator

from tokenspeed_engine.control.lifecycle import Waiting

MAX_OVERTAKEN = 16


class WaitingQueue:
    """Waiting requests in order of arrival, and how often each unfinished request was overtaken."""

    def __init__(self) -> None:
        self._states: dict[str, Waiting] = {}
        self._continuing: set[str] = set()
        self._overtaken: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._states.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def add(self, state: Waiting, continues: bool) -> None:
        """Let a new or preempted request wait; `continues`: whether most of its tokens are cached."""
        self._states[state.request.id] = state
        if continues:
            self._continuing.add(state.request.id)
        if state.was_admitted:
            self._states = dict(sorted(self._states.items(), key=lambda item: item[1].request.arrival))

    def remove(self, request_id: str) -> Waiting:
        """Take out one that is admitted or ends."""
        self._continuing.discard(request_id)
        return self._states.pop(request_id)

    def forget(self, request_id: str) -> None:
        """It has ended."""
        self._overtaken.pop(request_id, None)

    def oldest(self) -> Waiting | None:
        return next(iter(self._states.values()), None)

    def continuing(self, prefills: Iterable[tuple[str, int]]) -> Waiting | None:
        """The oldest that continues a cached sequence, if it may overtake all older ones.

        `prefills`: id and arrival of running requests whose prefill it would go before.
        """
        for request_id, state in self._states.items():
            if request_id in self._continuing:
                ahead = self.older(state, prefills)
                return state if all(self._overtaken.get(other, 0) < MAX_OVERTAKEN for other in ahead) else None
        return None

    def does_not_continue(self, state: Waiting) -> None:
        """What it would have continued is gone."""
        self._continuing.discard(state.request.id)

    def older(self, state: Waiting, prefills: Iterable[tuple[str, int]]) -> list[str]:
        """Those that came before it, of the waiting ones and of the prefills."""
        arrival = state.request.arrival
        waiting = ((other.request.id, other.request.arrival) for other in self._states.values())
        return [other for other, arrived in (*waiting, *prefills) if arrived < arrival]

    def overtake(self, overtaken: Iterable[str]) -> None:
        """Count a request that goes before these."""
        for request_id in overtaken:
            self._overtaken[request_id] = self._overtaken.get(request_id, 0) + 1
