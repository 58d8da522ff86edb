"""KV pages: a fixed pool, and leases on it that grow with their request."""

from collections.abc import Sequence

from tokenspeed_engine.control.errors import LeaseError
from tokenspeed_engine.control.pool import Pool


class PagePool(Pool):
    """Pages 0 to num_pages - 1 of page_size tokens each.

    Leases may share a page. Only one of its holders writes to it, behind all that the others read: a page is shared
    when it is full, or up to the tokens that were in it at that time.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages)
        self.page_size = page_size

    @property
    def num_pages(self) -> int:
        return self.size

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold num_tokens."""
        return -(-num_tokens // self.page_size)

    def lease(self, num_tokens: int, shared: Sequence[int] = ()) -> "PageLease | None":
        """A lease on pages for num_tokens, the first of them `shared`, or None where too few are free."""
        lease = PageLease(self, shared)
        if lease.grow(num_tokens):
            return lease
        lease.release()
        return None


class PageLease:
    """The pages of one request, in the order of the positions they hold.

    Made by `PagePool.lease`. It is given back once; any use after that raises `LeaseError`.
    """

    __slots__ = ("_pages", "_pool", "_released")

    def __init__(self, pool: PagePool, shared: Sequence[int]) -> None:
        self._pool = pool
        self._pages = tuple(shared)
        self._released = False
        pool._share(self._pages)

    @property
    def pages(self) -> tuple[int, ...]:
        """Page ids; position p lies in pages[p // page_size] at offset p % page_size."""
        self._check()
        return self._pages

    @property
    def capacity(self) -> int:
        """Tokens the pages held now have room for."""
        return len(self.pages) * self._pool.page_size

    def grow(self, num_tokens: int) -> bool:
        """Take pages until num_tokens fit. Where too few are free, takes none and says False. Never shrinks."""
        self._check()
        missing = self._pool.pages_for(num_tokens) - len(self._pages)
        if missing <= 0:
            return True
        taken = self._pool._take(missing)
        if taken is None:
            return False
        self._pages = (*self._pages, *taken)
        return True

    def release(self) -> None:
        """Give every page back."""
        self._check()
        self._released = True
        self._pool._give(self._pages)
        self._pages = ()

    def _check(self) -> None:
        if self._released:
            raise LeaseError("this page lease was released")
