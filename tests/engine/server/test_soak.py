"""A server under clients of every kind for a while: whoever stays is answered, and afterwards everything is free."""

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.engine.server.process import MODEL, Answer, Leaving, ServerProcess, ask, exchange, free_port, serving
from tests.engine.whole import NEAR_TIE, document
from tokenspeed_engine import LLM, EngineOptions, SamplingParams
from tokenspeed_engine.server.load import RETRY_SECONDS

OPTIONS = (
    *("--max-context", "256", "--max-batch", "6", "--max-step-tokens", "64", "--num-drafts", "2"),
    *("--state-interval", "48", "--num-snapshots", "4", "--num-host-snapshots", "4"),
    *("--max-requests", "12", "--timeout", "60", "--cache-gib", "0.0044"),
)
CLIENTS = 16
"""More than `--max-requests` of them at once."""
MOST_TOKENS = 12
PATIENCE = 120
"""Seconds for a request; one that takes longer is taken for lost."""
HALF = 1000
"""Requests of the long soak, after which memory is looked at; twice."""

MALFORMED: Sequence[tuple[bytes, int]] = (
    (b"", 400),
    (b"{", 400),
    (b"[1, 2]", 400),
    (b"\xff\xfe", 400),
    (b"[" * 100_000, 400),
    (json.dumps({"model": MODEL}).encode(), 400),
    (json.dumps({"model": "another", "prompt": "a"}).encode(), 404),
    (json.dumps({"model": MODEL, "prompt": [5] * 300}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": [10**9]}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": "a", "temperature": -1}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 0}).encode(), 400),
)


@dataclass
class Steady:
    """A prompt and the text of its greedy answer, token by token up to the first near-tie."""

    prompt: list[int]
    texts: list[str]

    def check(self, text: str, count: int) -> None:
        """The text of an answer of `count` tokens."""
        known = "".join(self.texts[:count])
        assert (text if count <= len(self.texts) else text[: len(known)]) == known


def steady_prompts(count: int) -> list[Steady]:
    """Of lengths that cross pages, chunks and snapshots; several begin alike."""
    llm = LLM(None, EngineOptions(max_context=256, max_batch=8))
    assert llm.tokenizer is not None
    prompts = [document(number % 5, 3 + 11 * number) for number in range(count)]
    params = SamplingParams(temperature=0, max_new_tokens=MOST_TOKENS, ignore_eos=True, logprobs=2)
    steady = []
    for prompt, generation in zip(prompts, llm.generate(prompts, params), strict=True):
        margins = [entry.top[0][1] - entry.top[1][1] for entry in generation.logprobs]
        count = next((place for place, margin in enumerate(margins) if margin < NEAR_TIE), len(margins))
        texts = [llm.tokenizer.decode([token]) for token in generation.token_ids[:count]]
        assert "".join(texts).isascii()  # so that a token's text does not depend on those beside it
        steady.append(Steady(prompt, texts))
    return steady


@dataclass
class Load:
    """Clients of one server. `counts`: how often each kind of them came to which end."""

    port: int
    steady: list[Steady]
    draw: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    async def run(self, requests: int) -> None:
        todo = iter(range(requests))

        async def client() -> None:
            for _ in todo:
                await self._one()

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client())

    async def _one(self) -> None:
        kinds: dict[Callable[[], Any], int] = {
            self._whole: 4,
            self._stream: 4,
            self._chat: 2,
            self._leave: 5,
            self._malformed: 2,
            self._hurry: 1,
        }
        (kind,) = self.draw.choices(list(kinds), list(kinds.values()))
        await kind()

    def _body(self, chosen: Steady, **changes: Any) -> dict[str, Any]:
        tokens = self.draw.randint(1, MOST_TOKENS)
        body = {"model": MODEL, "prompt": chosen.prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return body | changes

    async def _ask(self, path: str, body: bytes | dict[str, Any], leaving: Leaving | None = None) -> Answer:
        async with asyncio.timeout(PATIENCE):
            return await ask(self.port, path, body, leaving)

    async def _patient(self, path: str, body: bytes | dict[str, Any]) -> Answer:
        """The answer of a client that comes again while the server is busy."""
        while True:
            answer = await self._ask(path, body)
            assert answer.finished, answer
            if answer.status != 503:
                return answer
            assert answer.json["error"]["code"] == "overloaded"
            self.counts["busy"] += 1
            await asyncio.sleep(RETRY_SECONDS)

    async def _served(self, path: str, body: dict[str, Any]) -> Answer:
        answer = await self._patient(path, body)
        assert answer.status == 200, answer
        return answer

    async def _whole(self) -> None:
        chosen = self.draw.choice(self.steady)
        n = self.draw.choice((1, 1, 3))
        body = self._body(chosen, n=n)
        answer = (await self._served("/v1/completions", body)).json
        assert answer["usage"]["completion_tokens"] == n * body["max_tokens"]
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "length"
            chosen.check(choice["text"], body["max_tokens"])
        self.counts["whole"] += 1

    async def _stream(self) -> None:
        chosen = self.draw.choice(self.steady)
        body = self._body(chosen, stream=True, stream_options={"include_usage": True})
        *events, usage, done = (await self._served("/v1/completions", body)).events
        assert done == "[DONE]"
        assert json.loads(usage)["usage"]["completion_tokens"] == body["max_tokens"]
        choices = [json.loads(event)["choices"][0] for event in events]
        assert choices[-1]["finish_reason"] == "length"
        chosen.check("".join(choice["text"] for choice in choices), body["max_tokens"])
        self.counts["stream"] += 1

    async def _chat(self) -> None:
        messages = [{"role": "user", "content": self.draw.choice(("hello", "a queue", "def pop(self):"))}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": self.draw.choice((0, 1))}
        (choice,) = (await self._served("/v1/chat/completions", body)).json["choices"]
        assert choice["finish_reason"] in ("length", "stop")
        self.counts["chat"] += 1

    async def _leave(self) -> None:
        leaving = self.draw.choice(get_args(Leaving))
        body = self._body(self.draw.choice(self.steady), stream=True, max_tokens=self.draw.randint(4, 60))
        answer = await self._ask("/v1/completions", body, leaving)
        assert not answer.finished
        self.counts[leaving] += 1

    async def _malformed(self) -> None:
        if self.draw.random() < 0.2:
            answer = await exchange(self.port, b"GET /health HTTP/9.9\r\nHost\r\n\r\n")
            assert answer.status == 400
        else:
            body, status = self.draw.choice(MALFORMED)
            answer = await self._patient("/v1/completions", body)
            assert (answer.status, "error" in answer.json) == (status, True), (body[:100], answer)
        self.counts["malformed"] += 1

    async def _hurry(self) -> None:
        stream = self.draw.random() < 0.5
        body = self._body(self.draw.choice(self.steady), max_tokens=100, timeout=0.02, stream=stream)
        answer = await self._ask("/v1/completions", body)
        assert answer.finished
        if answer.status == 503:
            self.counts["busy"] += 1
            return
        if stream:
            assert '"code":"timeout"' in answer.events[-2]
        else:
            assert (answer.status, answer.json["error"]["code"]) == (504, "timeout")
        self.counts["hurry"] += 1


def assert_drains(server: ServerProcess, prompt: list[int]) -> None:
    """At SIGTERM streams that run and requests that wait are finished, nobody else is let in, and the process ends."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "stream": True}

    async def drain() -> list[Answer]:
        asked = [asyncio.create_task(ask(server.port, "/v1/completions", body)) for _ in range(8)]
        while (await asyncio.to_thread(server.metrics))["tokenspeed_num_waiting"] == 0:
            await asyncio.sleep(0.02)
        server.send(signal.SIGTERM)
        return await asyncio.gather(*asked)

    for answer in asyncio.run(drain()):
        assert (answer.status, answer.finished) == (200, True)
        assert answer.events[-1] == "[DONE]"
        assert '"finish_reason":"length"' in answer.events[-2]
    assert server.wait() in (0, -signal.SIGTERM)
    assert "Traceback" not in server.log


def test_a_hundred_requests(tmp_path: Path) -> None:
    steady = steady_prompts(8)
    with serving(free_port(), OPTIONS, tmp_path / "log") as server:
        load = Load(server.port, steady, random.Random(1))
        asyncio.run(load.run(100))
        totals = server.wait_until_free()
        assert totals['requests_total{outcome="abort"}'] > 0
        assert totals['requests_total{outcome="error"}'] == 0
        assert {"whole", "stream", "chat", "malformed", "hurry", "busy", *get_args(Leaving)} <= set(load.counts)
        assert_drains(server, steady[0].prompt)


@pytest.mark.slow
def test_two_thousand_requests(tmp_path: Path) -> None:
    steady = steady_prompts(20)
    with serving(free_port(), OPTIONS, tmp_path / "log") as server:
        load = Load(server.port, steady, random.Random(2))
        sizes = []
        for _ in range(2):
            asyncio.run(load.run(HALF))
            totals = server.wait_until_free()
            sizes.append(server.resident_bytes())
        assert sizes[1] - sizes[0] < 16 * 1024**2, sizes
        assert totals['requests_total{outcome="error"}'] == 0
        assert totals["preemptions_total"] > 0
        assert totals['cached_tokens_total{state="host"}'] > 0
        assert load.counts["busy"] > 0
        assert_drains(server, steady[0].prompt)


@pytest.mark.slow
def test_a_server_that_is_killed_serves_again(tmp_path: Path) -> None:
    """On the same port; whoever was there is cut off, not left waiting."""
    steady = steady_prompts(8)
    body = {"model": MODEL, "prompt": steady[3].prompt, "max_tokens": 150, "ignore_eos": True, "stream": True}
    port, generated = free_port(), "tokenspeed_generated_tokens_total"

    async def cut_off(server: ServerProcess) -> list[Answer]:
        asked = [asyncio.create_task(ask(port, "/v1/completions", body)) for _ in range(10)]
        before = (await asyncio.to_thread(server.metrics))[generated]
        while (await asyncio.to_thread(server.metrics))[generated] < before + 20:
            await asyncio.sleep(0.02)
        server.kill()
        return await asyncio.gather(*asked)

    with serving(port, OPTIONS, tmp_path / "first") as server:
        asyncio.run(Load(port, steady, random.Random(3)).run(30))
        assert not any(answer.finished for answer in asyncio.run(cut_off(server)))
    with serving(port, OPTIONS, tmp_path / "second") as server:
        asyncio.run(Load(port, steady, random.Random(4)).run(60))
        server.wait_until_free()
        assert_drains(server, steady[0].prompt)
