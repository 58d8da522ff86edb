"""The JSON objects of completions and chat completions, whole or in chunks."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed_engine.control import RequestOutput, TokenLogprobs
from tokenspeed_engine.server.answer import AnswerParser, message
from tokenspeed_engine.server.logprobs import chat_logprobs, completion_logprobs
from tokenspeed_engine.tokenizer import Tokenizer


class Format(ABC):
    """One answer's objects. `include_usage`: chunks carry a usage field, null in all but the last one."""

    prefix: str
    whole_object: str
    chunk_object: str
    _empty: Mapping[str, Any]
    """What a choice of a chunk says that has no text."""

    def __init__(self, model: str, tokenizer: Tokenizer | None, logprobs: bool, include_usage: bool) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._include_usage = include_usage

    def whole(self, outputs: Sequence[Sequence[RequestOutput]], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that does not stream; all outputs of each choice."""
        choices = []
        for index, parts in enumerate(outputs):
            entries = [entry for part in parts for entry in part.logprobs]
            content = self._content(index, "".join(part.text for part in parts))
            finish = {"finish_reason": self._finish(index, parts[-1].finish_reason)}
            choices.append({"index": index} | content | self._details(index, entries) | finish)
        return self._object(self.whole_object, choices) | {"usage": usage}

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Chunks before any output."""
        return []

    def chunk(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        """The chunk of one output; None where it has nothing to say yet."""
        content = self._delta(index, output.text, last=output.finish_reason is not None)
        if content is None and not (self._logprobs and output.logprobs) and output.finish_reason is None:
            return None
        finish = self._finish(index, output.finish_reason)
        return self._chunk(index, content or self._empty, output.logprobs, finish)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any] | None:
        """The last chunk, where usage is asked for."""
        return self._object(self.chunk_object, []) | {"usage": usage} if self._include_usage else None

    def _chunk(
        self, index: int, content: Mapping[str, Any], entries: Sequence[TokenLogprobs], finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index} | dict(content) | self._details(index, entries) | {"finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return self._object(self.chunk_object, [choice]) | usage

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _details(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"logprobs": self._describe(index, entries) if self._logprobs else None}

    def _finish(self, index: int, reason: str | None) -> str | None:
        """The finish reason as the client is told."""
        return reason

    @abstractmethod
    def _content(self, index: int, text: str) -> dict[str, Any]:
        """What a choice of a whole answer says."""

    @abstractmethod
    def _delta(self, index: int, text: str, last: bool) -> dict[str, Any] | None:
        """What a choice of a chunk says, or None where nothing is new; `last`: no text follows."""

    @abstractmethod
    def _describe(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The log-probabilities of the next tokens of a choice."""


class CompletionFormat(Format):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    _empty = {"text": ""}  # noqa: RUF012  the base class promises that nobody changes it

    def __init__(self, model: str, tokenizer: Tokenizer | None, logprobs: bool, include_usage: bool) -> None:
        super().__init__(model, tokenizer, logprobs, include_usage)
        self._offsets: dict[int, int] = {}

    def _content(self, index: int, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, index: int, text: str, last: bool) -> dict[str, Any] | None:
        return {"text": text} if text else None

    def _describe(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        answer, self._offsets[index] = completion_logprobs(entries, self._tokenizer, self._offsets.get(index, 0))
        return answer


class ChatFormat(Format):
    """`parsers`: one a choice."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _empty = {"delta": {}}  # noqa: RUF012  the base class promises that nobody changes it

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer | None,
        logprobs: bool,
        include_usage: bool,
        parsers: Sequence[AnswerParser],
    ) -> None:
        super().__init__(model, tokenizer, logprobs, include_usage)
        self._parsers = parsers

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        start = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(index, start, (), None) for index in range(num_choices)]

    def _content(self, index: int, text: str) -> dict[str, Any]:
        return {"message": message([self._parsers[index].push(text, last=True)])}

    def _delta(self, index: int, text: str, last: bool) -> dict[str, Any] | None:
        delta = self._parsers[index].push(text, last)
        return {"delta": delta} if delta else None

    def _finish(self, index: int, reason: str | None) -> str | None:
        return self._parsers[index].finish_reason(reason)

    def _describe(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(entries, self._tokenizer)
