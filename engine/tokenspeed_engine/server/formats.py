"""The JSON objects of completions and chat completions, whole or in chunks."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from tokenspeed_engine.control import RequestOutput, TokenLogprobs
from tokenspeed_engine.server.logprobs import chat_logprobs, completion_logprobs
from tokenspeed_engine.tokenizer import Tokenizer


class Format(ABC):
    """One answer's objects. `include_usage`: chunks carry a usage field, null in all but the last one."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, tokenizer: Tokenizer | None, logprobs: bool, include_usage: bool) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._include_usage = include_usage

    def whole(self, outputs: Sequence[Sequence[RequestOutput]], usage: dict[str, int]) -> dict[str, Any]:
        """The answer to a request that does not stream; all outputs of each choice."""
        choices = []
        for index, parts in enumerate(outputs):
            text = "".join(part.text for part in parts)
            entries = [entry for part in parts for entry in part.logprobs]
            finish = {"finish_reason": parts[-1].finish_reason}
            choices.append({"index": index} | self._content(text) | self._details(index, entries) | finish)
        return self._object(self.whole_object, choices) | {"usage": usage}

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Chunks before any output."""
        return []

    def chunk(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        """The chunk of one output; None where it has nothing to say yet."""
        if not output.text and not (self._logprobs and output.logprobs) and output.finish_reason is None:
            return None
        return self._chunk(index, self._delta(output.text), output.logprobs, output.finish_reason)

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any] | None:
        """The last chunk, where usage is asked for."""
        return self._object(self.chunk_object, []) | {"usage": usage} if self._include_usage else None

    def _chunk(
        self, index: int, content: dict[str, Any], entries: Sequence[TokenLogprobs], finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index} | content | self._details(index, entries) | {"finish_reason": finish_reason}
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

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """What a choice of a whole answer says."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """What a choice of a chunk says."""

    @abstractmethod
    def _describe(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The log-probabilities of the next tokens of a choice."""


class CompletionFormat(Format):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer | None, logprobs: bool, include_usage: bool) -> None:
        super().__init__(model, tokenizer, logprobs, include_usage)
        self._offsets: dict[int, int] = {}

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _delta = _content

    def _describe(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        answer, self._offsets[index] = completion_logprobs(entries, self._tokenizer, self._offsets.get(index, 0))
        return answer


class ChatFormat(Format):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        start = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(index, start, (), None) for index in range(num_choices)]

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _describe(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(entries, self._tokenizer)
