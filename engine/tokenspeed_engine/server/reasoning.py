"""Reasoning apart from the answer, in a stream of text: the format `qwen3`.

Reasoning stands between `<think>` and `</think>`. The template mostly opens it in the prompt, so an answer
begins inside of it. The result does not depend on how the text is cut into pieces.
"""

from typing import Literal, NamedTuple

OPEN, CLOSE, CALL = "<think>", "</think>", "<tool_call>"

Kind = Literal["reasoning", "content"]


class Piece(NamedTuple):
    """New text of one kind; never empty."""

    kind: Kind
    text: str


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt leaves reasoning open, so that the answer starts inside of it."""
    # The template's own tag is its last word; one that a user wrote stands before the end of a message.
    return prompt.rstrip().endswith(OPEN)


class ReasoningParser:
    """Takes an answer's text, gives it back by kind.

    A second `<think>` inside of reasoning and a second `</think>` in the answer are dropped; `<tool_call>` ends
    reasoning that was not closed. Newlines next to the tags are dropped too, being the template's.
    """

    def __init__(self, inside: bool) -> None:
        """`inside`: the text starts in reasoning, as `opens_reasoning` says of the prompt."""
        self._kind: Kind = "reasoning" if inside else "content"
        self._at_start = inside  # leading newlines are dropped
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """What may go out now."""
        self._held += text
        pieces: list[Piece] = []
        while (found := self._next_tag()) is not None:
            at, tag = found
            self._let_out(pieces, self._held[:at].rstrip("\n"))
            self._held = self._held[at:] if tag == CALL else self._held[at + len(tag) :]
            self._turn(tag)
        keep = self._kept()
        self._let_out(pieces, self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return pieces

    def flush(self) -> list[Piece]:
        """What was held back as the possible start of a tag; no text follows."""
        pieces: list[Piece] = []
        self._let_out(pieces, self._held)
        self._held = ""
        return pieces

    def _tags(self) -> tuple[str, ...]:
        return (OPEN, CLOSE, CALL) if self._kind == "reasoning" else (OPEN, CLOSE)

    def _next_tag(self) -> tuple[int, str] | None:
        return min(((at, tag) for tag in self._tags() if (at := self._held.find(tag)) >= 0), default=None)

    def _turn(self, tag: str) -> None:
        kind: Kind = "reasoning" if tag == OPEN else "content"
        if kind != self._kind:
            self._kind, self._at_start = kind, tag != CALL

    def _let_out(self, pieces: list[Piece], text: str) -> None:
        if self._at_start:
            text = text.lstrip("\n")
        if text:
            self._at_start = False
            pieces.append(Piece(self._kind, text))

    def _kept(self) -> int:
        """Characters at the end that may turn out to belong to a tag, or to stand before one."""
        text = self._held
        partial = max(
            (n for tag in self._tags() for n in range(1, len(tag)) if text.endswith(tag[:n])),
            default=0,
        )
        before = text[: len(text) - partial]
        return partial + len(before) - len(before.rstrip("\n"))
