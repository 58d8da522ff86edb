"""One chat turn against any server with OpenAI's API, with the time of every piece that arrives. Needs httpx2."""

import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request.

    Args:
        text, reasoning: the answer, and what the server sent apart from it as reasoning.
        started: time.perf_counter() when the request was sent.
        arrivals: time.perf_counter() of each piece that brought text.
        prompt_tokens, cached_tokens, output_tokens: as the server's usage says; cached_tokens is None where it says
            nothing of a cache.
        error: why there is no answer, else None.
    """

    text: str = ""
    reasoning: str = ""
    started: float = 0.0
    arrivals: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None

    @property
    def message(self) -> Message:
        """As a history holds it."""
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text} | reasoning


@dataclass(frozen=True)
class Endpoint:
    """A server. `url` ends before /chat/completions; `extra` joins every body (`ignore_eos`, say)."""

    url: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def client(self) -> httpx2.AsyncClient:
        """Connections to it, without limits of number or time."""
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx2.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=False)

    async def model_name(self, client: httpx2.AsyncClient) -> str:
        """`model`, or the first that the server lists where it is empty."""
        if self.model:
            return self.model
        listed = (await client.get(f"{self.url}/models")).raise_for_status().json()
        return str(listed["data"][0]["id"])

    async def chat(self, client: httpx2.AsyncClient, model: str, messages: Sequence[Message], most: int) -> Answer:
        """Streams an answer of at most `most` tokens. A failure comes back as the answer's error."""
        body = {
            "model": model,
            "messages": list(messages),
            "max_tokens": most,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        started = time.perf_counter()
        try:
            return await self._stream(client, body, started)
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            return Answer(started=started, error=f"{type(error).__name__}: {error}")

    async def _stream(self, client: httpx2.AsyncClient, body: dict[str, Any], started: float) -> Answer:
        texts: list[str] = []
        thoughts: list[str] = []
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        async with client.stream("POST", f"{self.url}/chat/completions", json=body) as response:
            if response.status_code != httpx2.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                return Answer(started=started, error=f"HTTP {response.status_code}: {text[:500]}")
            async for data in _events(response):
                now, event = time.perf_counter(), json.loads(data)
                if "error" in event:
                    return Answer(started=started, error=str(event["error"])[:500])
                usage = event.get("usage") or usage
                for delta in (choice["delta"] for choice in event["choices"]):
                    texts.append(delta.get("content") or "")
                    # Servers name reasoning in two ways.
                    thoughts.append(delta.get("reasoning_content") or delta.get("reasoning") or "")
                    if texts[-1] or thoughts[-1]:
                        arrivals.append(now)
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(texts),
            reasoning="".join(thoughts),
            started=started,
            arrivals=tuple(arrivals),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens"),
            output_tokens=usage["completion_tokens"],
        )


async def _events(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Data of each server-sent event but the last word, [DONE]. httpx's lines also end where a text has a U+2028."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            field, _, data = line.partition(b":")
            if field == b"data" and data.strip() != b"[DONE]":
                yield data
