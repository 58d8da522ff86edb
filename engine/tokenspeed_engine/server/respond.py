"""Runs a request's choices and sends what comes of them, for as long as the client is there."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tokenspeed_engine.async_llm import AsyncLLM, RequestGroup
from tokenspeed_engine.control import RequestOutput
from tokenspeed_engine.server.errors import as_api_error, server_error
from tokenspeed_engine.server.formats import Format
from tokenspeed_engine.server.load import Load
from tokenspeed_engine.server.metrics import Metrics, Tracker
from tokenspeed_engine.server.prompts import EngineRequest

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class GenerationResponse(Response):
    """Submits its requests when it is sent, and aborts them when the client disconnects.

    Raises what the engine refuses before anything is sent, so that it is answered by an ordinary error. A failure in
    the middle of a stream is the stream's last event.

    Args:
        requests: n for each prompt, those of one prompt together.
        num_per_prompt: n.
        format: of the endpoint; made for this response.
        stream: server-sent events rather than one JSON object.
        started: time.perf_counter() when the whole body had arrived.
        load: counts the requests, and refuses what is too much.
        timeout: seconds from `started` until they are given up.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        metrics: Metrics,
        requests: Sequence[EngineRequest],
        num_per_prompt: int,
        format: Format,
        stream: bool,
        started: float,
        load: Load,
        timeout: float | None,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._metrics = metrics
        self._requests = requests
        self._num_per_prompt = num_per_prompt
        self._num_prompt_tokens = sum(len(ids) for ids, _ in requests[::num_per_prompt])
        self._format = format
        self._stream = stream
        self._started = started
        self._load = load
        spent = time.perf_counter() - started
        self._deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout - spent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: dict[str, Any] = {}
        failure: Exception | None = None
        with self._load.holding(len(self._requests)):
            async with self._engine.submit(self._requests) as group:
                tracker = self._metrics.track(len(self._requests), self._num_prompt_tokens, self._started)
                try:
                    if self._stream:
                        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    async with asyncio.timeout_at(self._deadline):
                        if self._stream:
                            await self._send_chunks(group, tracker, send)
                        else:
                            answer = await self._collect(group, tracker)
                except Exception as error:
                    tracker.end(_outcome(error))
                    if not self._stream:
                        raise
                    if not isinstance(error, TimeoutError):
                        logger.exception("a stream failed")
                    failure = error
                finally:
                    tracker.end("abort")
        # From here on a client that does not read keeps nothing waiting but itself.
        if not self._stream:
            await JSONResponse(answer)(scope, receive, send)
            return
        if failure is not None:
            await _send_event(send, as_api_error(failure).body())
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _collect(self, group: RequestGroup, tracker: Tracker) -> dict[str, Any]:
        outputs: list[list[RequestOutput]] = [[] for _ in self._requests]
        async for index, output in _checked(group, tracker):
            outputs[index].append(output)
        usage = self._usage([parts[-1] for parts in outputs])
        return self._format.whole(outputs, usage)

    async def _send_chunks(self, group: RequestGroup, tracker: Tracker, send: Send) -> None:
        for chunk in self._format.opening(len(self._requests)):
            await _send_event(send, chunk)
        last: dict[int, RequestOutput] = {}
        async for index, output in _checked(group, tracker):
            last[index] = output
            if (following := self._format.chunk(index, output)) is not None:
                await _send_event(send, following)
        if (usage := self._format.usage_chunk(self._usage([last[index] for index in sorted(last)]))) is not None:
            await _send_event(send, usage)

    def _usage(self, last: Sequence[RequestOutput]) -> dict[str, Any]:
        """Counted as OpenAI does: a prompt once, whatever n."""
        generated = sum(output.usage.completion_tokens for output in last)
        cached = sum(output.usage.cached_tokens for output in last[:: self._num_per_prompt])
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._num_prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _outcome(error: Exception) -> str:
    return "timeout" if isinstance(error, TimeoutError) else "error"


async def _checked(group: RequestGroup, tracker: Tracker) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs, counted; raises for one that failed."""
    async for index, output in group:
        tracker.observe(index, output)
        if output.finish_reason == "error":
            raise server_error(500, f"The engine failed: {output.error}.")
        yield index, output


async def _send_event(send: Send, data: dict[str, Any]) -> None:
    event = b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": event, "more_body": True})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; cancels it when the client disconnects, and raises what it raises."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
