"""The engine's loop in a thread of its own: requests in from any thread, what comes of them out to their receivers."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tokenspeed_engine.control import Counters, EngineCore, RequestOutput, RequestRefusedError, SamplingParams

logger = logging.getLogger(__name__)


class EngineClosedError(RuntimeError):
    """The engine serves no requests: it was closed, or a failure left it in a state that nobody knows."""


class EngineStepError(RuntimeError):
    """The step failed as a whole, and with it every request there was."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What `EngineCore.add` takes; `id` is never used twice."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Admitted:
    """All requests of a call to `submit` were taken in; outputs follow."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine holds between two steps, and what it has done since its start."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_free_slots: int
    num_slots: int
    counters: Counters


Event = Admitted | RequestOutput | Exception
Receiver = Callable[[Sequence[Event]], None]
"""Called in the engine's thread with what is new. It must not block; one that raises loses its requests."""


class EngineThread:
    """Owns a core: after the start nobody else may touch it.

    Whatever crosses into the thread is a command in one queue, taken between steps. So a command waits for one step at
    most, and commands of one thread keep their order.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._receivers: dict[str, Receiver] = {}
        self._gate = threading.Lock()
        self._closed = False
        self._stopping = False
        self._broken = False
        self._stats = self._count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def healthy(self) -> bool:
        """Whether requests are served."""
        return not self._closed and not self._broken

    def submit(self, requests: Sequence[NewRequest], receive: Receiver) -> None:
        """Take requests in, all or none.

        `receive` gets `Admitted` or an exception first: `RequestRefusedError` for a request that can never be served,
        `EngineClosedError`. Then come the outputs of all requests, or an `EngineStepError` that ends them all.
        """
        with self._gate:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            self._commands.put(partial(self._add, requests, receive))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests, wherever they are, before the next step; nothing of them is received any more.

        Ids that are unknown, or finished, are ignored.
        """
        self._commands.put(partial(self._abort, request_ids))

    def close(self) -> None:
        """Abort what is there, whose receivers get `EngineClosedError`, and end the thread; waits for its last step."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._commands.put(self._stop)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            if not self._core.has_work or self._broken:
                self._commands.get()()
            self._take_commands()
            self._stats = self._count()
            if self._broken:
                self._fail_all(EngineClosedError("the engine is broken by a failure"))
            else:
                self._step()
            self._stats = self._count()

    def _take_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _add(self, requests: Sequence[NewRequest], receive: Receiver) -> None:
        added: list[str] = []
        try:
            if self._broken:
                raise EngineClosedError("the engine is broken by a failure")
            for request in requests:
                self._core.add(request.id, request.prompt, request.params)
                added.append(request.id)
        except Exception as error:
            if not isinstance(error, (RequestRefusedError, EngineClosedError)):
                logger.exception("a request could not be taken in")
            self._abort(added)
            self._deliver(receive, [error])
            return
        self._receivers |= dict.fromkeys(added, receive)
        self._deliver(receive, [Admitted()])

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._receivers.pop(request_id, None)
            try:
                self._core.abort(request_id)
            except BaseException:
                logger.exception("request %s could not be ended; its pages and slot are lost", request_id)
                self._broken = True

    def _step(self) -> None:
        try:
            outputs = self._core.step(self._take_commands)
        except BaseException as error:
            # The executor's own failures end as outputs. This is one of the control plane: the requests are given up,
            # and with them all that they hold, which leaves a core that works. A panic in a library's Rust, a
            # tokenizer's say, is no `Exception`; it must not end the thread, or nobody would be answered any more.
            logger.exception("a step failed outside the executor")
            self._broken = not self._receivers  # nothing left to give up, and yet it fails
            self._fail_all(EngineStepError(f"{type(error).__name__}: {error}"))
            return
        events: dict[Receiver, list[Event]] = {}
        for output in outputs:
            if (receive := self._receivers.get(output.request_id)) is not None:
                events.setdefault(receive, []).append(output)
            if output.finish_reason is not None:
                self._receivers.pop(output.request_id, None)
        for receive, new in events.items():
            self._deliver(receive, new)
        if self._core.executor_lost:
            self._broken = True
            self._fail_all(EngineClosedError("the engine is broken by a failure"))

    def _deliver(self, receive: Receiver, events: Sequence[Event]) -> None:
        try:
            receive(events)
        except Exception:  # its event loop was closed, say
            logger.warning("a receiver is gone; its requests are aborted", exc_info=True)
            self._abort([request for request, other in self._receivers.items() if other is receive])

    def _fail_all(self, error: Exception) -> None:
        receivers = set(self._receivers.values())
        self._abort(list(self._receivers))
        for receive in receivers:
            self._deliver(receive, [error])

    def _stop(self) -> None:
        self._stopping = True
        self._fail_all(EngineClosedError("the engine was closed"))

    def _count(self) -> EngineStats:
        scheduler = self._core.scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_pages=scheduler.pages.num_free,
            num_pages=scheduler.pages.num_pages,
            num_free_slots=scheduler.slots.num_free,
            num_slots=scheduler.slots.num_slots,
            counters=self._core.counters,
        )
