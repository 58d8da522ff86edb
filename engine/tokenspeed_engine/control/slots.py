"""Recurrent-state slots: a fixed pool for running requests and for snapshots."""

from tokenspeed_engine.control.errors import LeaseError
from tokenspeed_engine.control.pool import Pool


class StatePool(Pool):
    """Slots 0 to num_slots - 1. A slot is handed over as it is: the plan says when its content counts as zero."""

    @property
    def num_slots(self) -> int:
        return self.size

    def lease(self) -> "StateLease | None":
        """A lease on one slot, or None where requests hold all of them."""
        taken = self._take(1)
        return None if taken is None else StateLease(self, taken[0])


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
        self._pool._give((self._slot,))

    def _check(self) -> None:
        if self._released:
            raise LeaseError("this state lease was released")
