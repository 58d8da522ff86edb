"""A server in a thread of the test's own process, whose engine can be held in the middle of a step."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.control import Executor, PendingStep, StepPlan
from tokenspeed_engine.server.app import create_app
from tokenspeed_engine.server.options import ServerOptions

MODEL = "small"
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


class Gate:
    """Between the core and its executor: records plans, and while held lets one step pass a `step()`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._changed = threading.Condition()
        self._held = self._waiting = self._may_pass = False
        self.plans: list[StepPlan] = []
        self.failure: Exception | None = None

    def submit(self, plan: StepPlan) -> PendingStep:
        self.plans.append(plan)
        with self._changed:
            self._waiting = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._may_pass or not self._held, timeout=30)
            self._waiting = self._may_pass = False
        if self.failure is not None:
            raise self.failure
        return self._executor.submit(plan)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, every step waits at its start."""
        self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def wait_for_step(self) -> None:
        """Until a step waits."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting and not self._may_pass, timeout=30)

    def step(self) -> None:
        """Let the step that waits pass."""
        with self._changed:
            self._may_pass = True
            self._changed.notify_all()


class RunningServer:
    """A served model: its address, its engine and the engine's gate."""

    def __init__(self, engine: AsyncLLM, options: ServerOptions, drain_seconds: int = 5) -> None:
        self.engine = engine
        self.gate = Gate(engine._llm.core._executor)
        engine._llm.core._executor = self.gate
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = create_app(engine, MODEL, options)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=drain_seconds))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        wait_until(lambda: self._server.started)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def get(self, path: str) -> tuple[int, str]:
        return _answer(urllib.request.Request(self.url + path))

    def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, text = _answer(urllib.request.Request(self.url + path, data=data))
        return status, json.loads(text)

    def post_with_key(self, path: str, body: dict[str, Any], key: str) -> tuple[int, Any]:
        """As `post`, with a bearer token."""
        headers = {"authorization": f"Bearer {key}"}
        status, text = _answer(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers))
        return status, json.loads(text)

    def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """Data of each server-sent event of an answer."""
        status, text = _answer(urllib.request.Request(self.url + path, data=json.dumps(body).encode()))
        assert status == 200, text
        assert text.endswith("\n\n")
        events = text.removesuffix("\n\n").split("\n\n")
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]

    def metric(self, sample: str) -> float:
        """A sample of /metrics by its name and labels."""
        lines = self.get("/metrics")[1].splitlines()
        return float(next(line for line in lines if line.startswith(sample + " ")).split()[-1])

    def is_free(self) -> bool:
        """Whether no request holds or waits for anything."""
        stats = self.engine.stats
        held = (stats.num_pages - stats.num_free_pages, stats.num_slots - stats.num_free_slots)
        return held == (0, 0) and (stats.num_running, stats.num_waiting) == (0, 0)


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _answer(request: urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
