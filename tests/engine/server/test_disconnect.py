"""A client that leaves: raw sockets closed at every point of a request's life, and what is free one step later."""

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.server.running import MODEL, RunningServer, wait_until

LONG_PROMPT = [5 + i % 50 for i in range(100)]
"""Four steps of prefill at 32 tokens a step."""


def _connect(server: RunningServer, body: dict[str, Any], num_sent: int | None = None) -> socket.socket:
    """A connection with a request on it, of which the first `num_sent` bytes of the body are sent."""
    data = json.dumps({"model": MODEL, "temperature": 0, "ignore_eos": True} | body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(head + data[:num_sent])
    return connection


def _leave(server: RunningServer, connection: socket.socket, hard: bool = False) -> None:
    """Close, and wait until the abort has reached the engine's thread, which is held in a step."""
    if hard:  # a reset instead of an end of stream
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    wait_until(lambda: not server.engine._thread._commands.empty())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "steps_before"),
    [(LONG_PROMPT, 50, 0), (LONG_PROMPT, 50, 2), (LONG_PROMPT, 50, 3), ([5, 6, 7], 50, 3), ([5, 6, 7], 4, 3)],
    ids=["first chunk", "mid-prefill", "last chunk", "mid-decode", "last token"],
)
def test_everything_is_free_after_the_step_that_ran(
    server: RunningServer, prompt: list[int], max_tokens: int, steps_before: int, stream: bool
) -> None:
    plans = len(server.gate.plans)
    with server.gate.held():
        connection = _connect(server, {"prompt": prompt, "max_tokens": max_tokens, "stream": stream})
        for _ in range(steps_before):
            server.gate.wait_for_step()
            server.gate.step()
        server.gate.wait_for_step()
        assert not server.is_free()
        _leave(server, connection, hard=stream)
        server.gate.step()
        wait_until(server.is_free)
    assert len(server.gate.plans) == plans + steps_before + 1


def test_a_request_left_before_it_runs_never_runs(server: RunningServer) -> None:
    plans = len(server.gate.plans)
    with server.gate.held():
        first = _connect(server, {"prompt": [5, 6, 7], "max_tokens": 2})
        server.gate.wait_for_step()
        second = _connect(server, {"prompt": LONG_PROMPT, "max_tokens": 50})
        wait_until(lambda: server.engine._thread._commands.qsize() == 1)
        second.close()
        wait_until(lambda: server.engine._thread._commands.qsize() == 2)
    assert b"200 OK" in first.recv(1000)
    first.close()
    wait_until(server.is_free)
    ran = server.gate.plans[plans:]
    assert [len(plan.rows) for plan in ran] == [1, 1]
    assert len({row.request_id for plan in ran for row in plan.rows}) == 1


def test_a_request_left_while_it_waits_for_a_slot_frees_its_place(server: RunningServer) -> None:
    bodies = [{"prompt": [5 + i], "max_tokens": 100} for i in range(4)]
    running = [_connect(server, body) for body in bodies]
    wait_until(lambda: server.engine.stats.num_running == 4)
    waiting = _connect(server, {"prompt": [9], "max_tokens": 100})
    wait_until(lambda: server.engine.stats.num_waiting == 1)
    waiting.close()
    wait_until(lambda: server.engine.stats.num_waiting == 0)
    for connection in running:
        connection.close()
    wait_until(server.is_free)


def test_all_choices_of_a_request_end_with_it(server: RunningServer) -> None:
    connection = _connect(server, {"prompt": [[5, 6], [7, 8]], "n": 3, "max_tokens": 200})
    wait_until(lambda: (server.engine.stats.num_running, server.engine.stats.num_waiting) == (4, 2))
    connection.close()
    wait_until(server.is_free)


@pytest.mark.parametrize("num_sent", [0, 10])
def test_leaving_in_the_middle_of_the_body_is_nothing(server: RunningServer, num_sent: int) -> None:
    plans = len(server.gate.plans)
    _connect(server, {"prompt": [5]}, num_sent).close()
    assert server.post("/v1/completions", {"model": MODEL, "prompt": [5], "max_tokens": 1})[0] == 200
    assert len(server.gate.plans) == plans + 1


def test_a_disconnect_counts_as_aborted(server: RunningServer) -> None:
    def aborted() -> float:
        return server.metric('tokenspeed_requests_total{outcome="abort"}')

    before = aborted()
    connection = _connect(server, {"prompt": [5, 6], "max_tokens": 200, "stream": True})
    received = connection.recv(4096)
    while b"data: " not in received:
        received += connection.recv(4096)
    connection.close()
    reached: Callable[[], bool] = lambda: aborted() == before + 1  # noqa: E731
    wait_until(reached)
    wait_until(server.is_free)
