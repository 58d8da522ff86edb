"""Token ids to text, a token at a time, without ever cutting a character."""

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """What the control plane needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, spaces as they come; bytes that form no character become U+FFFD, special tokens may be empty."""
        ...


class Detokenizer:
    """Text of a growing sequence of tokens.

    The pieces that `push` returns, and the last one from `flush`, add up to `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoding everything at each token would be quadratic. A window starts at the token before the ones whose text
        # is still open: some decoders treat the first token of a text differently, so it needs one before it.
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""
        self._emitted = 0

    def push(self, token: int) -> str:
        """The text that is certain with this token and was not before."""
        self._window.append(token)
        text = self._text()
        # A character still open shows as U+FFFD at the end: one for all its bytes or one for each. What comes before
        # cannot change any more.
        certain = text.rstrip(_REPLACEMENT)
        piece = certain[self._emitted :]
        self._emitted += len(piece)
        if piece and len(certain) == len(text):
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._context_text = self._tokenizer.decode(self._window)
            self._emitted = 0
        elif not piece and len(certain) == len(text) and not self._tokenizer.decode([token, token]):
            # Says nothing anywhere, as special tokens do. A long run of them would be decoded anew at each.
            self._window.pop()
        return piece

    def flush(self) -> str:
        """What was held back; no token follows."""
        piece = self._text()[self._emitted :]
        self._emitted += len(piece)
        return piece

    def _text(self) -> str:
        """Text of the window after its context."""
        return self._tokenizer.decode(self._window)[len(self._context_text) :]
