"""The life of a request as a finite-state machine of frozen states that own what they hold.

    Waiting --admit--> Prefilling --complete--> Decoding --finish--> Finished
       ^  \\--send--> PrefillingElsewhere --arrive--^  |
       +------------------- preempt ------------------+

Every live state can finish, and every one that holds something can be preempted.

A transition consumes its state and returns the next one. A call that a state has no right to is a type error, since the
method is not there; a state used a second time, which Python's types cannot see, raises `StateReusedError`. Leases are
released by the transition that leaves the holding states, so a request holds pages and a slot exactly as long as it is
in one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenspeed_engine.control.errors import StateReusedError
from tokenspeed_engine.control.pages import PageLease
from tokenspeed_engine.control.request import Request, TokenLog
from tokenspeed_engine.control.slots import StateLease

FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop` and `length` as in OpenAI's API; `abort` was asked for; `error` has a message beside it."""


class _Life:
    """The generation that is current for one request; shared by all its states."""

    __slots__ = ("generation",)

    def __init__(self) -> None:
        self.generation = 0


@dataclass(frozen=True, slots=True)
class _State:
    request: Request
    tokens: TokenLog
    _life: _Life = field(repr=False)
    _generation: int


@dataclass(frozen=True, slots=True)
class _Live(_State):
    """A state that transitions leave."""

    def _consume(self) -> tuple[Request, TokenLog, _Life, int]:
        """The common fields of the next state; this one is used up."""
        life = self._life
        if life.generation != self._generation:
            raise StateReusedError(
                f"request {self.request.id!r}: {type(self).__name__} of generation {self._generation} was consumed "
                f"before; the request is at generation {life.generation}"
            )
        life.generation += 1
        return self.request, self.tokens, life, life.generation


@dataclass(frozen=True, slots=True)
class Waiting(_Live):
    """Holds nothing: new, or preempted with the tokens it had generated."""

    was_admitted: bool = False

    @staticmethod
    def new(request: Request) -> "Waiting":
        return Waiting(request, TokenLog(request.prompt), _Life(), 0)

    def admit(self, pages: PageLease, slot: StateLease, *, reused: int = 0) -> "Prefilling":
        """Start to prefill.

        Args:
            pages: takes over the lease.
            slot: takes over the lease.
            reused: tokens whose KV the pages and whose recurrent state the slot already hold (a prefix hit). Less than
                all tokens, since the last one must run to be sampled from.
        """
        _expect(0 <= reused < len(self.tokens), f"reused: expected 0 to {len(self.tokens) - 1}, got {reused}")
        return Prefilling(*self._consume(), pages, slot, reused, reused)

    def send(self, pages: PageLease, slot: StateLease) -> "PrefillingElsewhere":
        """Let another engine prefill into the pages and the slot."""
        return PrefillingElsewhere(*self._consume(), pages, slot)

    def finish(self, reason: FinishReason, error: str | None = None) -> "Finished":
        return Finished(*self._consume(), reason, error)


@dataclass(frozen=True, slots=True)
class _Holding(_Live):
    """A state that owns pages and a slot."""

    pages: PageLease
    slot: StateLease

    def preempt(self) -> Waiting:
        """Give pages and slot back; the tokens stay, to be run again."""
        following = Waiting(*self._consume(), was_admitted=True)
        self._release()
        return following

    def finish(self, reason: FinishReason, error: str | None = None) -> "Finished":
        """Give pages and slot back and end."""
        following = Finished(*self._consume(), reason, error)
        self._release()
        return following

    def _release(self) -> None:
        self.pages.release()
        self.slot.release()


@dataclass(frozen=True, slots=True)
class Prefilling(_Holding):
    """Known tokens are being run, chunk by chunk; the first `computed` of them have been, or were `reused`."""

    reused: int
    computed: int

    def advance(self, count: int) -> "Prefilling":
        """A chunk of count tokens ran and at least one token is left."""
        left = len(self.tokens) - self.computed
        _expect(0 < count < left, f"count: expected 1 to {left - 1}, got {count}")
        return Prefilling(*self._consume(), self.pages, self.slot, self.reused, self.computed + count)

    def complete(self, token: int, drafts: Sequence[int] = ()) -> "Decoding":
        """The last chunk ran and token was sampled after it."""
        return _decoding(self, (token,), drafts)


@dataclass(frozen=True, slots=True)
class PrefillingElsewhere(_Holding):
    """Another engine runs the known tokens; their KV and state arrive in what is held here."""

    def arrive(self, token: int, drafts: Sequence[int] = ()) -> "Decoding":
        """Everything is here, and with it the first token."""
        return _decoding(self, (token,), drafts)


@dataclass(frozen=True, slots=True)
class Decoding(_Holding):
    """All tokens but the last have been run, at least one of them by this request.

    `drafts` are guesses at the tokens to come. A step runs the last token and as many drafts as it has room for, and
    pages and slot are afterwards as if only the accepted ones had been run.
    """

    drafts: tuple[int, ...]

    @property
    def computed(self) -> int:
        """Tokens whose KV the pages hold."""
        return len(self.tokens) - 1

    def accept(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> "Decoding":
        """A step ran and yielded these tokens: the accepted drafts and one more."""
        _expect(len(tokens) > 0, "tokens: expected at least one")
        return _decoding(self, tokens, drafts)


@dataclass(frozen=True, slots=True)
class Finished(_State):
    """The end: owns nothing and leads nowhere."""

    reason: FinishReason
    error: str | None


Running = Prefilling | Decoding


def _decoding(
    state: Prefilling | PrefillingElsewhere | Decoding, tokens: Sequence[int], drafts: Sequence[int]
) -> Decoding:
    following = Decoding(*state._consume(), state.pages, state.slot, tuple(drafts))
    state.tokens.append(tokens)
    return following


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
