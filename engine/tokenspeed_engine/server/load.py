"""How much a server takes on at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenspeed_engine.server.errors import ApiError, server_error

RETRY_SECONDS = 1


class Load:
    """Requests that are in the server, up to a most: beyond it is said at once, before memory and patience run out."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._held = 0

    def check(self, count: int) -> None:
        """Raises ApiError 503 where `count` more requests are too many; never, where nothing else runs."""
        if self._most is not None and self._held and self._held + count > self._most:
            raise busy(self._held)

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Counts `count` requests inside. Raises as `check`.

        For one event loop: nothing comes between the question and the count.
        """
        self.check(count)
        self._held += count
        try:
            yield
        finally:
            self._held -= count


def busy(held: int) -> ApiError:
    error = server_error(503, f"The server is busy with {held} requests. Please retry later.")
    error.code = "overloaded"
    error.headers = {"retry-after": str(RETRY_SECONDS)}
    return error
