"""Recurrent-state slots: a fixed pool, one slot a running request."""

from tokenspeed_engine.control.errors import LeaseError


class StatePool:
    """Slots 0 to num_slots - 1. A slot is handed over as it is: the plan says when its content counts as zero."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lease(self) -> "StateLease | None":
        """A lease on one slot, or None where all are taken."""
        return StateLease(self, self._free.pop()) if self._free else None

    def _give(self, slot: int) -> None:
        self._free.append(slot)


class StateLease:
    """One slot, given back once; any use after that raises `LeaseError`."""

    __slots__ = ("_pool", "_released", "_slot")

    def __init__(self, pool: StatePool, slot: int) -> None:
        self._pool = pool
        self._slot = slot
        self._released = False

    @property
    def slot(self) -> int:
        self._check()
        return self._slot

    def release(self) -> None:
        """Give the slot back."""
        self._check()
        self._released = True
        self._pool._give(self._slot)

    def _check(self) -> None:
        if self._released:
            raise LeaseError("this state lease was released")
