"""What finished, preempted and running requests computed, for those that begin with the same tokens.

A sequence is published up to a position that its request has certainly reached: every token is committed, and the slot
is settled there first. What was run beyond it as a guess lies in a page behind the published tokens, where nobody
reads. It is published where the request ends, is preempted, and during prefill at every `state_interval` tokens.

A hit shares the whole pages of the sequence, copies the page it ends in (its request goes on writing there), and copies
the state into the request's own slot. The snapshot stays, for others that begin the same.

Transfers are noted in the order of the decisions and all run before the rows of the next plan. So a page or slot may be
given away as soon as the transfer that reads it is noted, and nothing needs to be held until a step is over.

Pages and slots only the cache keeps are evicted where a request wants them. The leaf of least worth goes first (see
`snapshots`), among those whose page no request holds, since only they free one. A leaf whose page is held can still
stand below nodes whose pages are not: another request published the same beginning before. It goes last.
"""

from collections.abc import Sequence

from tokenspeed_engine.control.config import ControlConfig
from tokenspeed_engine.control.pages import PageLease, PagePool
from tokenspeed_engine.control.plan import CopyPage, CopySlot, Fetch, Settle, Transfer
from tokenspeed_engine.control.radix import Match, Node, RadixTree
from tokenspeed_engine.control.slots import StateLease, StatePool
from tokenspeed_engine.control.snapshots import Snapshot, SnapshotStore


class PrefixCache:
    """Finds and publishes sequences. Switched off, it finds nothing and keeps nothing."""

    def __init__(self, config: ControlConfig, pages: PagePool, slots: StatePool) -> None:
        self._enabled = config.prefix_cache
        self._stateful = config.has_state
        self._pages = pages
        self._slots = slots
        self._tree = RadixTree(config.page_size, config.has_state, pages.keep, pages.drop)
        self._transfers: list[Transfer] = []
        self.snapshots = SnapshotStore(slots, config.num_host_snapshots, self._transfers.append, self._tree.prune)
        self._clock = 0
        self.num_published = 0
        pages.evict_with(self._evict_pages)

    def find(self, tokens: Sequence[int], *, whole_pages: bool = False) -> Match | None:
        """The longest beginning of tokens that can be reused; it counts as used now."""
        match = self._tree.match(tokens, whole_pages=whole_pages) if self._enabled else None
        if match is not None:
            self._touch(match.node)
        return match

    def lease(self, num_tokens: int, match: Match | None, reserve: int) -> tuple[PageLease, StateLease] | None:
        """Pages for num_tokens and a slot, with what `find` just found in place before the next plan's rows.

        None where fewer than `reserve` pages would be left. A slot must be free.
        """
        if match is None:
            if self._pages.num_free < self._pages.pages_for(num_tokens) + reserve:
                return None
            return self._take(num_tokens, ()), self._slot(None)
        # What is copied must not be evicted for its own copy, so it is held until the copy is noted.
        source = PageLease(self._pages, match.pages if match.tail is None else (*match.pages, match.tail))
        if self._pages.num_free < self._pages.pages_for(num_tokens) - len(match.pages) + reserve:
            source.release()
            return None
        slot = self._slot(match)
        pages = self._take(num_tokens, match.pages)
        if match.tail is not None:
            self._transfers.append(CopyPage(match.tail, pages.pages[len(match.pages)]))
        source.release()
        return pages, slot

    def publish(self, tokens: Sequence[int], pages: PageLease, slot: StateLease) -> None:
        """Keep what a request holds that is about to let go of it; its pages and slot are as after these tokens."""
        if not self._enabled or not tokens:
            return
        node = self._insert(tokens, pages)
        if not self._stateful:
            return
        node.snapshot = node.snapshot or Snapshot(node)
        node.snapshot.is_proven = True
        if node.snapshot.slot is None:
            self._transfers.append(Settle(slot.slot, len(tokens)))
            self.snapshots.put(node.snapshot, slot.slot)

    def checkpoint(self, tokens: Sequence[int], pages: PageLease, slot: StateLease) -> None:
        """Keep what a running request has computed so far, and a copy of its state."""
        if not self._enabled:
            return
        node = self._insert(tokens, pages)
        if not self._stateful or node.snapshot is not None:
            return
        # Noted before there is a slot for it: making room prunes nodes that have no snapshot.
        node.snapshot = Snapshot(node)
        copy = self._slot(None)
        self._transfers += (Settle(slot.slot, len(tokens)), CopySlot(slot.slot, copy.slot))
        self.snapshots.put(node.snapshot, copy.slot)
        copy.release()

    def forget(self, tokens: Sequence[int]) -> None:
        """Drop what is known along a sequence that came to nothing: a request that goes on from it may fail as well.

        Pages that other sequences begin with too stay for them.
        """
        for node in reversed(list(self._tree.along(tokens))):
            if node in self._tree.leaves:
                self._evict(node)
            elif node.snapshot is not None:
                self.snapshots.lose(node.snapshot)

    def take_transfers(self) -> tuple[Transfer, ...]:
        """What must run before the rows of the plan that is being made."""
        transfers = tuple(self._transfers)
        self._transfers.clear()
        return transfers

    def clear(self) -> None:
        """Forget everything, and the transfers noted with it."""
        while self._tree.leaves:
            self._evict(next(iter(self._tree.leaves)))
        self._transfers.clear()

    def is_on_host(self, match: Match) -> bool:
        """Whether the state of what matches must come from host memory."""
        return match.node.snapshot is not None and match.node.snapshot.slot is None

    def _take(self, num_tokens: int, shared: Sequence[int]) -> PageLease:
        pages = self._pages.lease(num_tokens, shared)
        assert pages is not None
        return pages

    def _slot(self, match: Match | None) -> StateLease:
        """A slot that requests do not hold, with the state of what matches."""
        snapshot = match.node.snapshot if match else None
        if snapshot is not None:
            # It was found just now, so this makes it the one of most worth: room is not made at its expense.
            snapshot.is_proven = True
        if self._stateful:
            self.snapshots.make_room()
        slot = self._slots.lease()
        assert slot is not None
        if snapshot is not None:
            if snapshot.slot is not None:
                self._transfers.append(CopySlot(snapshot.slot, slot.slot))
            else:
                assert snapshot.host is not None
                self._transfers.append(Fetch(snapshot.host, slot.slot))
        return slot

    def _insert(self, tokens: Sequence[int], pages: PageLease) -> Node:
        self.num_published += 1
        node = self._tree.insert(tokens, pages.pages)
        self._touch(node)
        return node

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock

    def _evict_pages(self, count: int) -> None:
        goal = self._pages.num_unused + count
        while self._pages.num_unused < goal:
            self._evict(min(self._tree.leaves, key=self._worth))

    def _worth(self, leaf: Node) -> tuple[bool, bool, int]:
        is_proven = leaf.snapshot is None or leaf.snapshot.is_proven
        return self._pages.is_leased(leaf.page), is_proven, leaf.used

    def _evict(self, leaf: Node) -> None:
        if leaf.snapshot is not None:
            self.snapshots.lose(leaf.snapshot)
        self._tree.remove(leaf)
