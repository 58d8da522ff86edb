"""Numbered units of device memory that requests lease and the prefix cache keeps."""

from collections.abc import Callable, Sequence


class Pool:
    """Units 0 to size - 1, each free, leased by any number of requests, kept by the cache, or both of the last two.

    A unit that only the cache keeps counts as free: it is evicted where a request wants it. So what is cached never
    keeps a request out, and `num_free` means what requests can have.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # A stack: deterministic, lowest ids first in a fresh pool, and what was freed last is taken first.
        self._unused = list(range(size - 1, -1, -1))
        self._leases = [0] * size
        self._keeps = [0] * size
        self._num_evictable = 0
        self._evict: Callable[[int], None] | None = None

    @property
    def num_free(self) -> int:
        """Units that no request holds."""
        return len(self._unused) + self._num_evictable

    @property
    def num_unused(self) -> int:
        """Units that neither a request nor the cache holds."""
        return len(self._unused)

    def is_leased(self, unit: int) -> bool:
        return self._leases[unit] > 0

    def evict_with(self, evict: Callable[[int], None]) -> None:
        """Call `evict(count)` where count more units must be dropped than are unused; there are that many."""
        self._evict = evict

    def keep(self, unit: int) -> None:
        """The cache keeps a unit that a request holds, once more."""
        assert self._leases[unit]
        self._keeps[unit] += 1

    def drop(self, unit: int) -> None:
        """The cache keeps it once less."""
        self._keeps[unit] -= 1
        assert self._keeps[unit] >= 0
        if not self._keeps[unit] and not self._leases[unit]:
            self._num_evictable -= 1
            self._unused.append(unit)

    def _take(self, count: int) -> list[int] | None:
        """Lease count units, or none where too few are free."""
        if count > self.num_free:
            return None
        if count > len(self._unused):
            assert self._evict is not None
            self._evict(count - len(self._unused))
        taken = [self._unused.pop() for _ in range(count)]
        for unit in taken:
            self._leases[unit] = 1
        return taken

    def _share(self, units: Sequence[int]) -> None:
        """Lease units once more that are leased or kept."""
        for unit in units:
            assert self._leases[unit] or self._keeps[unit]
            self._num_evictable -= not self._leases[unit]
            self._leases[unit] += 1

    def _give(self, units: Sequence[int]) -> None:
        """End one lease of each unit."""
        for unit in reversed(units):
            self._leases[unit] -= 1
            assert self._leases[unit] >= 0
            if self._leases[unit]:
                continue
            if self._keeps[unit]:
                self._num_evictable += 1
            else:
                self._unused.append(unit)
