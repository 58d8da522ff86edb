"""How far each slot's states have come: what the next step has to take back of the drafts that the last one ran.

A row of drafts leaves a slot ahead of its sequence, and the next row's start tells how many of them were accepted. What
layers then need to know differs. Histories of convolutions drop their newest rows. The delta rule either replays the
accepted tokens, which were kept (`replay`), or starts from the state that was stored after the last of them (`states`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenspeed_engine.models.families import Verify


@dataclass(frozen=True)
class Undo:
    """What to take back of one slot; plain integers of `Rollback` and `Settling`."""

    dropped: int
    kept: int
    initial: int

    def is_nothing(self, slot: int) -> bool:
        return self.dropped == self.kept == 0 and self.initial == slot


@dataclass(frozen=True)
class _Tail:
    """A slot's last row: it began at `start` with `tokens` tokens, of which any number from 1 on may be accepted.

    taken: tokens that histories took in, padding too. first: where kept tokens of the row begin, after earlier ones.
    places: where the states after its tokens are. A settled slot has no tokens, and its `start` is its length.
    """

    start: int
    tokens: int = 0
    taken: int = 0
    first: int = 0
    places: tuple[int, ...] = ()


class Ledger:
    """Of all slots of a pool. Calls come in the order in which the device does the work.

    Args:
        capacity: tokens that the delta rule keeps of a slot (`replay`).
        scratch: first places of groups of `num_drafts` places, for states beside a slot's own (`states`). A slot has
            one from its first drafts on until it is settled, started anew, or overwritten; where all are taken, that of
            the slot longest without a row goes, which was freed with its drafts unsettled.
    """

    def __init__(self, verify: Verify, num_drafts: int, capacity: int, scratch: Sequence[int]) -> None:
        self._replay = verify == "replay"
        self._num_drafts = num_drafts
        self._capacity = capacity
        self._tails: dict[int, _Tail] = {}
        self._free = list(scratch)
        self._groups: dict[int, int] = {}  # by slot, longest without a row first

    def undo(self, slot: int, length: int) -> Undo:
        """What separates the slot from its sequence's first `length` tokens. Raises RuntimeError if it never had them.

        A slot that nothing was heard of cannot be continued either.
        """
        tail = self._tails.get(slot)
        if tail is None:
            raise RuntimeError(f"slot {slot} holds no state that could be continued at {length} tokens")
        accepted = length - tail.start
        if not min(tail.tokens, 1) <= accepted <= tail.tokens:
            raise RuntimeError(f"slot {slot} ran {tail.tokens} tokens from {tail.start} on: it cannot be at {length}")
        if tail.tokens == 0:
            return Undo(0, 0, slot)
        initial = tail.places[accepted - 1] if tail.places else slot
        return Undo(tail.taken - accepted, tail.first + accepted if self._replay else 0, initial)

    def running(self, slots: Iterable[int]) -> None:
        """These slots have rows in the step that comes: none of them counts as freed."""
        for slot in slots:
            if slot in self._groups:
                self._groups[slot] = self._groups.pop(slot)

    def decode(self, slot: int, undo: Undo, start: int, tokens: int, q_len: int) -> tuple[int, ...]:
        """Notes a row of `tokens` tokens padded to `q_len`, run after `undo`; returns its `Rollback.targets`."""
        if self._replay:
            first = 0 if undo.kept + q_len > self._capacity else undo.kept  # the op folds where there is no room
            self._tails[slot] = _Tail(start, tokens, q_len, first)
            return (-1,) * q_len
        places = (slot, *self._group(slot))
        self._tails[slot] = _Tail(start, tokens, q_len, 0, places[:tokens])
        return (*places[:tokens], *[-1] * (q_len - tokens))

    def settled(self, slot: int, length: int) -> None:
        """The slot's own place holds the state after `length` tokens, and nothing is ahead of it."""
        self._tails[slot] = _Tail(length)
        if slot in self._groups:
            self._free.append(self._groups.pop(slot))

    def length(self, slot: int) -> int:
        """Tokens of a settled slot. Raises RuntimeError for any other."""
        tail = self._tails.get(slot)
        if tail is None or tail.tokens:
            raise RuntimeError(f"slot {slot} is not settled")
        return tail.start

    def _group(self, slot: int) -> range:
        group = self._groups.pop(slot, None)
        if group is None and not self._free:
            freed = next(iter(self._groups))
            del self._tails[freed]
            self._free.append(self._groups.pop(freed))
        first = self._free.pop() if group is None else group
        self._groups[slot] = first
        return range(first, first + self._num_drafts)
