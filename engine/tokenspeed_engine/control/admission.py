"""What is checked before a request may wait: everything that could keep it from ever being served."""

import hashlib
from collections.abc import Sequence

from tokenspeed_engine.control.config import ControlConfig
from tokenspeed_engine.control.errors import RequestRefusedError
from tokenspeed_engine.control.request import Request
from tokenspeed_engine.control.sampling import SamplingParams


class Admission:
    """Turns what a caller asks into a `Request`, or refuses it."""

    def __init__(self, config: ControlConfig, vocab_size: int, has_tokenizer: bool) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._has_tokenizer = has_tokenizer
        self._arrivals = 0

    def request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> Request:
        """The request, numbered in order of arrival.

        Raises:
            RequestRefusedError: the prompt is empty, holds an id outside the vocabulary, is longer than the context, or
                needs more pages than the pool has; or stop strings are asked for and there is no tokenizer.
        """
        config = self._config
        if not prompt:
            raise RequestRefusedError("prompt: expected at least one token, got none")
        # A look at each token alone would take milliseconds where there are tens of thousands.
        if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= self._vocab_size:
            self._refuse_tokens(prompt)
        if len(prompt) > config.max_context:
            raise RequestRefusedError(
                f"prompt: {len(prompt)} tokens are more than the context of {config.max_context} tokens"
            )
        if params.stop and not self._has_tokenizer:
            raise RequestRefusedError("stop: stop strings need a tokenizer, and this model has none")
        max_tokens = min(len(prompt) + params.max_new_tokens, config.max_context)
        # The last token generated is not run, so it needs no place in a page.
        most_run = max(len(prompt), max_tokens - 1)
        capacity = config.num_pages * config.page_size
        if most_run > capacity:
            raise RequestRefusedError(
                f"max_new_tokens: prompt and generated tokens need KV pages for {most_run} tokens, "
                f"the whole pool has room for {capacity}"
            )
        arrival = self._arrivals
        self._arrivals += 1
        return Request(request_id, arrival, tuple(prompt), params, self._seed(params, arrival), max_tokens)

    def _refuse_tokens(self, prompt: Sequence[int]) -> None:
        for position, token in enumerate(prompt):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocab_size:
                raise RequestRefusedError(
                    f"prompt[{position}]: expected a token id from 0 to {self._vocab_size - 1}, got {token!r}"
                )

    def _seed(self, params: SamplingParams, arrival: int) -> int:
        if params.seed is not None:
            return params.seed % (1 << 64)
        digest = hashlib.blake2b(f"{self._config.seed}:{arrival}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")
