"""A radix tree over token ids whose edges are KV pages: which sequences the cache knows, and how far.

An edge is one page. Edges of several pages would save nodes, but they have to be split where sequences part, and a page
is the unit in which KV is shared and evicted anyway. The last page of a sequence may be partial. It becomes a *tail*: a
leaf of fewer tokens than a page. A longer sequence does not continue a tail; it has an edge of its own beside it (over
the same page, if it grew out of that request), since a tail's holder wrote only so far.

For a model with state, a position can be reused only where a snapshot of the state is. So a node below which there is
no snapshot is of no use, and is pruned with the last snapshot that gave it one: every leaf can be reused.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenspeed_engine.control.snapshots import Snapshot


class Node:
    """The end of one page of tokens; the path from the root is a sequence of `length` tokens."""

    __slots__ = ("children", "length", "num_tails", "page", "parent", "snapshot", "tokens", "used")

    def __init__(self, parent: "Node | None", tokens: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.length: int = len(tokens) + (parent.length if parent else 0)
        self.children: dict[tuple[int, ...], Node] = {}
        self.num_tails = 0
        self.snapshot: Snapshot | None = None
        self.used = 0
        """When a sequence that ends here was last published or found."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable beginning of a sequence.

    Args:
        length: its tokens.
        pages: the whole pages of it.
        tail: the page that begins with the rest of it, or None where there is no rest.
        node: where it ends, or within whose page.
    """

    length: int
    pages: tuple[int, ...]
    tail: int | None
    node: Node


class RadixTree:
    """Nodes under one root.

    Args:
        page_size: tokens of a page.
        stateful: whether a position is usable only where a snapshot is; else wherever KV is.
        keep: called with the page of each new node.
        drop: called with the page of each node that goes.
    """

    def __init__(
        self, page_size: int, stateful: bool, keep: Callable[[int], None], drop: Callable[[int], None]
    ) -> None:
        self._page_size = page_size
        self._stateful = stateful
        self._keep = keep
        self._drop = drop
        self.root = Node(None, (), -1)
        self.leaves: dict[Node, None] = {}

    def match(self, tokens: Sequence[int], *, whole_pages: bool = False) -> Match | None:
        """The longest usable beginning of tokens that leaves at least one of them to run.

        With `whole_pages`, the longest that ends with a page.
        """
        limit = len(tokens) - 1
        path = list(self._descend(tokens, limit))
        while path:
            node = path[-1]
            rest = tuple(tokens[node.length : min(limit, node.length + self._page_size)])
            if not whole_pages and (found := self._partial(node, rest)):
                child, shared = found
                return Match(node.length + shared, _pages(path), child.page, child)
            if self._is_usable(node):
                return Match(node.length, _pages(path), None, node)
            path.pop()
        return None

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> Node:
        """The node at the end of tokens, whose KV lies in pages; pages that are known already stay as they are."""
        node = self.root
        for index, start in enumerate(range(0, len(tokens), self._page_size)):
            key = tuple(tokens[start : start + self._page_size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, pages[index])
                node.num_tails += len(key) < self._page_size
                self._keep(child.page)
                self.leaves.pop(node, None)
                self.leaves[child] = None
            node = child
        return node

    def along(self, tokens: Sequence[int]) -> Iterator[Node]:
        """All nodes whose sequences tokens begin with, shortest first."""
        for node in self._descend(tokens, len(tokens)):
            if node.parent is not None:
                yield node
            if node.num_tails:
                rest = tuple(tokens[node.length : node.length + self._page_size - 1])
                tails = (node.children.get(rest[:length]) for length in range(1, len(rest) + 1))
                yield from (tail for tail in tails if tail is not None)

    def remove(self, leaf: Node) -> None:
        """Take a leaf away, and those above it that are of no use without it."""
        self._cut(leaf)
        self.prune(leaf.parent)

    def prune(self, node: Node | None) -> None:
        """Take a node away that leads nowhere usable, and those above it likewise."""
        while node is not None and node.parent is not None and not node.children and not self._is_usable(node):
            self._cut(node)
            node = node.parent

    def _cut(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        del parent.children[leaf.tokens], self.leaves[leaf]
        parent.num_tails -= len(leaf.tokens) < self._page_size
        if not parent.children and parent.parent is not None:
            self.leaves[parent] = None
        self._drop(leaf.page)

    def _is_usable(self, node: Node) -> bool:
        return node.parent is not None and (not self._stateful or node.snapshot is not None)

    def _descend(self, tokens: Sequence[int], limit: int) -> Iterator[Node]:
        """The root and the nodes of whole pages along tokens."""
        node = self.root
        yield node
        while node.length + self._page_size <= limit:
            child = node.children.get(tuple(tokens[node.length : node.length + self._page_size]))
            if child is None:
                return
            node = child
            yield node

    def _partial(self, node: Node, tokens: tuple[int, ...]) -> tuple[Node, int] | None:
        """The child whose page begins with most of tokens, less than a page of them, and with how many."""
        if self._stateful:
            # A snapshot holds after all tokens of its node, so the tail must match as a whole.
            longest = min(self._page_size - 1, len(tokens)) if node.num_tails else 0
            for length in range(longest, 0, -1):
                child = node.children.get(tokens[:length])
                if child is not None:
                    return child, length
            return None
        best, most = None, 0
        for child in node.children.values():
            shared = _common(child.tokens, tokens)
            if shared > most:
                best, most = child, shared
        return (best, most) if best else None


def _pages(path: Sequence[Node]) -> tuple[int, ...]:
    return tuple(node.page for node in path[1:])


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
