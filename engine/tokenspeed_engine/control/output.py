"""What a request has to say after a step, and the stream that says it."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from tokenspeed_engine.control.detokenise import Detokenizer, Tokenizer
from tokenspeed_engine.control.lifecycle import FinishReason
from tokenspeed_engine.control.plan import TokenLogprobs
from tokenspeed_engine.control.request import Request
from tokenspeed_engine.control.stop import StopStrings


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted as OpenAI's API does: a token that ends the request counts.

    `cached_tokens`: prompt tokens that the prefix cache had when the request was given its pages.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What is new about one request.

    Over all outputs of a request, the token ids (the one that ended it included) are as many as its log-probabilities,
    if asked for, and as usage counts; the text is theirs, without that of an end-of-sequence or stop token, and up to
    the stop string if one ended it. Text may come later than its tokens, while it might still belong to a stop string.

    Args:
        request_id: whose output it is.
        token_ids: new tokens.
        text: new text; always empty without a tokenizer.
        logprobs: one entry a new token, or empty where none were asked for.
        finish_reason: None while more is to come.
        error: the message where finish_reason is "error".
        usage: counts so far.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    error: str | None
    usage: Usage


class OutputStream:
    """Takes a request's tokens one by one, decides which of them ends it, and hands out what is new.

    Ends by id or length are known from the tokens alone (`cut`), an end by a stop string only from the text (`push`).
    `cached_tokens` is for the usage, and set when it is known.
    """

    def __init__(self, request: Request, eos_token_ids: Set[int], tokenizer: Tokenizer | None) -> None:
        params = request.params
        self._request = request
        self._end_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(params.stop)
        self.cached_tokens = 0
        self._num_tokens = 0
        self._new_tokens: list[int] = []
        self._new_logprobs: list[TokenLogprobs] = []
        self._new_text: list[str] = []

    def cut(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of the next tokens count, and the reason if the last of those ends the request by id or length.

        Takes none of them and makes no text.
        """
        for index, token in enumerate(tokens):
            if (reason := self._end(token, self._num_tokens + index + 1)) is not None:
                return index + 1, reason
        return len(tokens), None

    def push(self, token: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        """Take the next token; says whether it ends the request. If it does, none may follow."""
        self._num_tokens += 1
        self._new_tokens.append(token)
        if logprobs is not None:
            self._new_logprobs.append(logprobs)
        reason = self._end(token, self._num_tokens)
        if reason == "stop":
            self._close()
            return "stop"
        if self._detokenizer is not None and self._let_out(self._detokenizer.push(token)):
            return "stop"
        if reason == "length":
            return "stop" if self._close() else "length"
        return None

    def take(self, reason: FinishReason | None = None, error: str | None = None) -> RequestOutput:
        """What is new since the last call. With reason "abort" or "error", text held back goes out with it."""
        if reason in ("abort", "error"):
            self._close()
        output = RequestOutput(
            request_id=self._request.id,
            token_ids=tuple(self._new_tokens),
            text="".join(self._new_text),
            logprobs=tuple(self._new_logprobs),
            finish_reason=reason,
            error=error,
            usage=Usage(len(self._request.prompt), self._num_tokens, self.cached_tokens),
        )
        self._new_tokens.clear()
        self._new_logprobs.clear()
        self._new_text.clear()
        return output

    def _end(self, token: int, num_tokens: int) -> FinishReason | None:
        """What the token, the request's num_tokens-th, ends it with by id or length."""
        if token in self._end_ids:
            return "stop"
        return "length" if len(self._request.prompt) + num_tokens == self._request.max_tokens else None

    def _let_out(self, text: str) -> bool:
        """Pass text on as far as stop strings allow; whether one ended it."""
        text, stopped = self._stops.push(text)
        self._new_text.append(text)
        return stopped

    def _close(self) -> bool:
        """Let out what was held back; whether a stop string completed in it."""
        if self._detokenizer is not None and self._let_out(self._detokenizer.flush()):
            return True
        self._new_text.append(self._stops.flush())
        return False
