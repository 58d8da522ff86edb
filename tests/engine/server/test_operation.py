"""What an operator can set: a key, how much at once, how long."""

import asyncio
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

from tests.engine.server.running import MODEL, RunningServer, wait_until
from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.control import SamplingParams
from tokenspeed_engine.llm import EngineOptions
from tokenspeed_engine.server.errors import ApiError
from tokenspeed_engine.server.formats import CompletionFormat
from tokenspeed_engine.server.load import Load
from tokenspeed_engine.server.metrics import Metrics
from tokenspeed_engine.server.options import ServerOptions
from tokenspeed_engine.server.respond import GenerationResponse

SMALL = EngineOptions(max_batch=2, max_step_tokens=32, max_context=128)
LONG: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 100, "ignore_eos": True}


def test_a_key_is_asked_for_on_every_route_of_the_api() -> None:
    running = RunningServer(AsyncLLM(None, SMALL), ServerOptions(api_key="secret"))
    try:
        for key in ("", "wrong", "secre", "secret2"):
            status, answer = running.post_with_key("/v1/completions", LONG | {"max_tokens": 1}, key)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), key
        assert running.get("/v1/models")[0] == 401
        for header, wanted in (("secret", 401), ("Basic secret", 401), ("bearer secret", 200)):
            request = urllib.request.Request(f"{running.url}/v1/models", headers={"authorization": header})
            try:
                status = urllib.request.urlopen(request, timeout=60).status
            except urllib.error.HTTPError as error:
                status = error.code
            assert status == wanted, header
        assert running.get("/health")[0] == running.get("/metrics")[0] == 200
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="secret", max_retries=0) as client:
            assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices
    finally:
        running.close()


def test_what_is_too_much_at_once_is_refused_and_the_rest_is_served() -> None:
    running = RunningServer(AsyncLLM(None, SMALL), ServerOptions(max_requests=3))
    try:
        with running.gate.held():
            answers: list[tuple[int, Any]] = []
            threads = [
                threading.Thread(target=lambda: answers.append(running.post("/v1/completions", LONG))) for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            wait_until(lambda: running.gate.plans != [])
            wait_until(lambda: running.engine.stats.num_running + running.engine.stats.num_waiting >= 1)
            deadline = time.monotonic() + 20
            while (found := running.post("/v1/completions", LONG | {"n": 3}))[0] != 503:
                assert time.monotonic() < deadline
            assert found[1]["error"]["code"] == "overloaded"
        for thread in threads:
            thread.join(60)
        assert [status for status, _ in answers] == [200, 200, 200]
        assert running.post("/v1/completions", LONG | {"n": 5, "max_tokens": 1})[0] == 200, "alone it is never too much"
    finally:
        running.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_given_up_at_its_timeout(stream: bool) -> None:
    running = RunningServer(AsyncLLM(None, SMALL), ServerOptions(timeout=60.0))
    try:
        with running.gate.held():
            body = LONG | {"timeout": 0.3, "stream": stream}
            if stream:
                assert '"code":"timeout"' in running.events("/v1/completions", body)[-2]
            else:
                status, answer = running.post("/v1/completions", body)
                assert (status, answer["error"]["code"]) == (504, "timeout")
        wait_until(running.is_free)
        assert running.metric('tokenspeed_requests_total{outcome="timeout"}') == 1
    finally:
        running.close()


def test_a_client_that_does_not_read_holds_nothing_past_its_timeout() -> None:
    async def answer() -> None:
        async with AsyncLLM(None, SMALL) as engine:
            load, format = Load(1), CompletionFormat(MODEL, engine.tokenizer, False, False)
            params = SamplingParams(max_new_tokens=100, ignore_eos=True)
            response = GenerationResponse(
                engine, Metrics(engine), [([5], params)], 1, format, True, time.perf_counter(), load, timeout=0.3
            )
            stuck, gone = asyncio.Event(), asyncio.Event()

            async def send(message: Any) -> None:
                if message["type"] == "http.response.body":
                    stuck.set()
                    await asyncio.Event().wait()

            async def receive() -> Any:
                await gone.wait()
                return {"type": "http.disconnect"}

            answering = asyncio.ensure_future(response({"type": "http"}, receive, send))
            await asyncio.wait_for(stuck.wait(), 20)
            with pytest.raises(ApiError):
                load.check(1)
            async with asyncio.timeout(20):
                while load._held or engine.stats.num_running:
                    await asyncio.sleep(0.01)
            assert not answering.done()
            gone.set()
            await answering

    asyncio.run(answer())


def test_time_spent_before_the_engine_counts_towards_the_timeout() -> None:
    async def deadline() -> float:
        async with AsyncLLM(None, SMALL) as engine:
            format = CompletionFormat(MODEL, engine.tokenizer, False, False)
            started = time.perf_counter() - 5
            response = GenerationResponse(
                engine, Metrics(engine), [([5], SamplingParams())], 1, format, True, started, Load(None), timeout=60
            )
            assert response._deadline is not None
            return response._deadline - asyncio.get_running_loop().time()

    assert 54 < asyncio.run(deadline()) <= 55


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="max_requests: expected more than 0, got 0"):
        ServerOptions(max_requests=0)
    with pytest.raises(ValueError, match="reasoning: expected qwen3, got 'r1'"):
        ServerOptions(reasoning="r1")  # type: ignore[arg-type]
