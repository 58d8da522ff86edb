"""How the tokens of one request are chosen and when it stops, checked once when it is made."""

import math
from dataclasses import dataclass

MAX_LOGPROBS = 20
"""Most alternatives a token's log-probabilities may list, as in OpenAI's API."""

_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request.

    Args:
        temperature: >= 0; 0 takes the most probable token.
        top_k: sample among the k most probable tokens; 0 keeps all. May exceed the vocabulary.
        top_p: in [0, 1]; sample among the fewest most probable tokens whose probabilities reach it. 0 leaves one token.
        seed: a signed 64-bit integer; None derives one from the engine's own seed and the request's arrival number.
        max_new_tokens: at least 1. A request also ends where its length reaches the context.
        stop: strings that end the text, themselves not part of it.
        stop_token_ids: tokens that end the request; kept in its ids, not in its text.
        ignore_eos: keep going after the model's end-of-sequence tokens.
        logprobs: None for none, else how many of the most probable tokens to list beside the chosen one, 0 to 20.

    Raises:
        TypeError, ValueError: a field has the wrong type or range; the message begins with the field's name.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _real("temperature", self.temperature, 0.0, math.inf)
        _integer("top_k", self.top_k, 0, None)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -_INT64, _INT64 - 1)
        _integer("max_new_tokens", self.max_new_tokens, 1, None)
        _tuple("stop", self.stop)
        for i, text in enumerate(self.stop):
            if not isinstance(text, str):
                raise TypeError(f"stop[{i}]: expected a string, got {text!r}")
            if not text:
                raise ValueError(f"stop[{i}]: expected a string of at least one character, got an empty one")
        _tuple("stop_token_ids", self.stop_token_ids)
        for i, token in enumerate(self.stop_token_ids):
            _integer(f"stop_token_ids[{i}]", token, 0, None)
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos: expected a bool, got {self.ignore_eos!r}")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    # bool is an int to Python; `top_k=True` is a mistake all the same.
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: expected {bound}, got {value}")


def _real(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        finite = False
    if not finite or not low <= value <= high:
        bound = f"finite and at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise ValueError(f"{name}: expected {bound}, got {value}")


def _tuple(name: str, value: object) -> None:
    # A bare string would pass for a sequence of one-letter stops.
    if not isinstance(value, tuple):
        raise TypeError(f"{name}: expected a tuple, got {value!r}")
