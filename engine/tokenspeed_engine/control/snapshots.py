"""Copies of recurrent states at positions of the radix tree, in slots of the state pool or in host memory.

A snapshot is a slot of the same pool that requests use. So the slot of a request that ends becomes a snapshot as it is,
and the pool is divided by need. Where a slot is wanted, the snapshot that is worth least goes: to host memory if there
is room, or something worth less there; else away.

Worth is by two classes, and in each by last use. Snapshots of ends, and those that were hit once, are worth more than
those that a prefill left on its way and nobody used yet: a long prompt leaves many of them, and by last use alone they
would push out the ends of all other conversations, which are nearly certain to be continued.
"""

from collections.abc import Callable

from tokenspeed_engine.control.plan import Offload, Transfer
from tokenspeed_engine.control.radix import Node
from tokenspeed_engine.control.slots import StatePool


class Snapshot:
    """The state after a node's tokens: in a slot, in host memory, or in both."""

    __slots__ = ("host", "is_proven", "node", "slot")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.is_proven = False
        self.slot: int | None = None
        self.host: int | None = None

    @property
    def worth(self) -> tuple[bool, int]:
        return self.is_proven, self.node.used


class SnapshotStore:
    """All snapshots.

    Args:
        slots: the pool. Whenever a slot is asked for here, requests hold at least one fewer than there are, and at
            least two fewer if a snapshot is to be copied to it.
        num_host: how many fit in host memory.
        emit: takes the transfers of the next plan in their order.
        forget: called with the node of each snapshot that is lost.
    """

    def __init__(
        self, slots: StatePool, num_host: int, emit: Callable[[Transfer], None], forget: Callable[[Node], None]
    ) -> None:
        self._slots = slots
        self._free_hosts = list(range(num_host - 1, -1, -1))
        self._emit = emit
        self._forget = forget
        self._on_device: dict[Snapshot, None] = {}
        self._on_host: dict[Snapshot, None] = {}
        self.num_saved = 0
        self.num_offloaded = 0

    def put(self, snapshot: Snapshot, slot: int) -> None:
        """Keep a slot, which a lease still holds, as a state that is not yet on the device."""
        assert snapshot.slot is None
        snapshot.slot = slot
        self._slots.keep(slot)
        self._on_device[snapshot] = None
        self.num_saved += 1

    def make_room(self) -> None:
        """See to it that a slot is unused. The snapshot of most worth stays, and stays where it is."""
        if not self._slots.num_unused:
            self._leave_device(min(self._on_device, key=_worth))

    def lose(self, snapshot: Snapshot) -> None:
        """Drop a snapshot wherever it is; what becomes of its node is the caller's affair."""
        if snapshot.slot is not None:
            self._drop_slot(snapshot)
        if snapshot.host is not None:
            self._drop_host(snapshot)
        snapshot.node.snapshot = None

    def _leave_device(self, snapshot: Snapshot) -> None:
        if snapshot.host is None:
            self._offload(snapshot)
        self._drop_slot(snapshot)
        self._forget_if_gone(snapshot)

    def _offload(self, snapshot: Snapshot) -> None:
        """Move it to host memory, where there is room or something worth less."""
        if not self._free_hosts:
            other = min(self._on_host, key=_worth, default=None)
            if other is None or other.worth > snapshot.worth:
                return
            self._drop_host(other)
            self._forget_if_gone(other)
        assert snapshot.slot is not None
        snapshot.host = self._free_hosts.pop()
        self._on_host[snapshot] = None
        self._emit(Offload(snapshot.slot, snapshot.host))
        self.num_offloaded += 1

    def _forget_if_gone(self, snapshot: Snapshot) -> None:
        if snapshot.slot is None and snapshot.host is None:
            snapshot.node.snapshot = None
            self._forget(snapshot.node)

    def _drop_slot(self, snapshot: Snapshot) -> None:
        assert snapshot.slot is not None
        del self._on_device[snapshot]
        self._slots.drop(snapshot.slot)
        snapshot.slot = None

    def _drop_host(self, snapshot: Snapshot) -> None:
        assert snapshot.host is not None
        del self._on_host[snapshot]
        self._free_hosts.append(snapshot.host)
        snapshot.host = None


def _worth(snapshot: Snapshot) -> tuple[bool, int]:
    return snapshot.worth
