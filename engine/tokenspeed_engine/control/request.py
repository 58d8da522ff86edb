"""A request as it was admitted, and the tokens it has so far."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_engine.control.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, fixed from arrival to end.

    Args:
        id: the caller's name for it, unique among live requests.
        arrival: its number in order of arrival.
        prompt: token ids, at least one.
        params: sampling parameters.
        seed: an unsigned 64-bit integer.
        max_tokens: prompt and generated tokens together, at most.
    """

    id: str
    arrival: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int


class TokenLog:
    """Prompt and generated tokens of a request: appended to, never changed, and kept across a preemption."""

    __slots__ = ("_num_prompt", "_tokens")

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = list(prompt)
        self._num_prompt = len(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def num_generated(self) -> int:
        return len(self._tokens) - self._num_prompt

    def span(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens at positions start to stop - 1; a negative start counts as 0."""
        return tuple(self._tokens[max(start, 0) : stop])

    def append(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)
