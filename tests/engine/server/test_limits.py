"""A model folder without a tokenizer, in a pool of pages smaller than the context."""

import http.client
import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.server.running import MODEL, RunningServer, wait_until
from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.llm import EMBEDDED_MODEL, EngineOptions
from tokenspeed_engine.server.options import ServerOptions

ROOM = 4 * 16 + 1
"""Tokens of a request in 4 pages of 16: the last one needs no place."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("model") / "bare"
    shutil.copytree(EMBEDDED_MODEL, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    running = RunningServer(
        AsyncLLM(folder, EngineOptions(max_batch=2, num_pages=4)), ServerOptions(max_body_bytes=10_000)
    )
    yield running
    running.close()


def test_token_ids_are_served_and_text_is_refused(bare: RunningServer) -> None:
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    status, answer = bare.post("/v1/completions", body)
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["text"] == ""
    assert all(text.removeprefix("token_id:").isdigit() for text in choice["logprobs"]["tokens"])
    assert len(choice["logprobs"]["tokens"]) == 3
    status, answer = bare.post("/v1/completions", body | {"prompt": "a"})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
    status, answer = bare.post("/v1/chat/completions", chat)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "tokenizer" in answer["error"]["message"]


def test_the_pool_limits_a_request_as_the_context_does(bare: RunningServer) -> None:
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True}
    status, answer = bare.post("/v1/completions", body | {"prompt": [5] * (ROOM + 1)})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert f"{ROOM} tokens" in answer["error"]["message"]
    status, answer = bare.post("/v1/completions", body | {"prompt": [5] * 60, "max_tokens": ROOM - 60 + 1})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    status, answer = bare.post("/v1/completions", body | {"prompt": [5] * 60, "max_tokens": ROOM - 60})
    assert status == 200
    assert answer["usage"]["total_tokens"] == ROOM
    wait_until(bare.is_free)


def test_a_server_that_stops_cuts_what_does_not_finish_in_time_and_frees_it() -> None:
    engine = AsyncLLM(None, EngineOptions(max_batch=2))
    running = RunningServer(engine, ServerOptions(max_body_bytes=10_000), drain_seconds=1)
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{running.url}/v1/completions", data=data)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.readline().startswith(b"data: ")
        assert not running.is_free()
        running.close()
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
    assert running.is_free()
    assert not engine.healthy
