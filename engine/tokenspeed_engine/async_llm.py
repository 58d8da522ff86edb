"""The engine for asyncio: `async for output in AsyncLLM(folder).stream(prompt)`."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokenspeed_engine.chat_template import ChatTemplateError
from tokenspeed_engine.control import RequestOutput, RequestRefusedError, SamplingParams
from tokenspeed_engine.engine_thread import Admitted, EngineStats, EngineThread, Event, NewRequest
from tokenspeed_engine.llm import LLM, EngineOptions, Prompt


class AsyncLLM:
    """A model folder loaded as `LLM` does, its steps run in one thread of their own; any number of tasks may stream.

    Raises as `LLM`. Used as an async context manager, it is closed at the end.
    """

    def __init__(self, model: str | Path | None = None, options: EngineOptions | None = None) -> None:
        options = options or EngineOptions()
        self._llm = LLM(model, options)
        self.tokenizer = self._llm.tokenizer
        self.vocab_size = self._llm.description.config.vocab_size
        self.max_context = options.max_context or self._llm.description.config.max_position_embeddings
        # The last token generated is not run, so it needs no place in a page.
        self.max_request_tokens = min(self.max_context, self._llm.num_pages * options.page_size + 1)
        self._thread = EngineThread(self._llm.core)
        self._numbers = itertools.count()

    @property
    def stats(self) -> EngineStats:
        """Requests, pages and slots, as they were last counted between two steps."""
        return self._thread.stats

    @property
    def healthy(self) -> bool:
        """Whether requests are served."""
        return self._thread.healthy

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """One prompt's outputs as they come; a task that leaves or is cancelled aborts the request.

        Raises `RequestRefusedError` for a request that can never be served, `EngineStepError` where the engine failed
        in the middle, `EngineClosedError`.
        """
        async with self.submit([(await self.encode(prompt), params or SamplingParams())]) as group:
            async for _, output in group:
                yield output

    async def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, off the event loop, since a long text takes a while. Raises as `LLM.encode`."""
        return await asyncio.to_thread(self._llm.encode, prompt)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> str:
        """A chat as the model's template writes it, up to where the assistant's answer begins.

        `variables` go to the template. Raises `ChatTemplateError` where it refuses the messages or there is none, and
        `RequestRefusedError` for text that is no Unicode.
        """
        if self.tokenizer is None:
            raise ChatTemplateError("this model has no tokenizer, so it takes token ids only")
        text = self.tokenizer.render_chat(messages, tools, **variables)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestRefusedError(f"messages: {error.reason}") from error
        return text

    async def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered chat, which holds its special tokens, off the event loop."""
        assert self.tokenizer is not None
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=False)

    def submit(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> "RequestGroup":
        """Several requests, admitted and left together: `async with submit(...) as group: async for ... in group`."""
        return RequestGroup(self._thread, [NewRequest(str(next(self._numbers)), *each) for each in requests])

    async def close(self) -> None:
        """Abort what is there, end the engine's thread and all ranks."""
        await asyncio.to_thread(self._thread.close)
        await asyncio.to_thread(self._llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class RequestGroup:
    """Requests that live as long as the `async with` block: entering admits all or raises, leaving aborts the rest.

    Iterating gives (index of the request, output) until every request has its finish reason.
    """

    def __init__(self, thread: EngineThread, requests: Sequence[NewRequest]) -> None:
        self._thread = thread
        self._requests = requests
        self._index = {request.id: index for index, request in enumerate(requests)}
        self._unfinished = set(self._index)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._thread.submit(self._requests, self._receive)
        try:
            first = await self._events.get()
        except BaseException:
            self._abort()
            raise
        if isinstance(first, Exception):
            self._unfinished.clear()
            raise first
        assert isinstance(first, Admitted)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if not self._unfinished:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, Exception):
            self._unfinished.clear()
            raise event
        assert isinstance(event, RequestOutput)
        if event.finish_reason is not None:
            self._unfinished.discard(event.request_id)
        return self._index[event.request_id], event

    def _abort(self) -> None:
        if self._unfinished:
            self._thread.abort(list(self._unfinished))

    def _receive(self, events: Sequence[Event]) -> None:
        """In the engine's thread."""
        self._loop.call_soon_threadsafe(self._put, events)

    def _put(self, events: Sequence[Event]) -> None:
        for event in events:
            self._events.put_nowait(event)
