"""Rows of the n-gram tables, fetched while the layers before them run.

They depend on token ids alone, so a step asks for them first of all. Where the tables lie in host memory, what a token
needs crosses the bus on a stream of its own, and the block that takes it in waits for it on the device only.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Lookups:
    """Embeddings that a step asked for, by layer: [T, width] each."""

    def __init__(self, embedded: Mapping[int, Tensor], arrived: torch.cuda.Event | None) -> None:
        self._embedded = embedded
        self._arrived = arrived

    def take(self, layer: int) -> Tensor:
        """Those of a layer, for work that is queued from now on."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        return self._embedded[layer]


class LookupStream:
    """Runs lookups: where they read host memory from a device beside other work, else at once."""

    def __init__(self, host_tables: bool, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if host_tables and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, embedded: Mapping[int, Tensor], look_up: Callable[[], None]) -> Lookups:
        """Begins `look_up`, which fills `embedded`. These are the caller's, so they outlive the work on this stream."""
        if self._stream is None:
            look_up()
            return Lookups(embedded, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            look_up()
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return Lookups(embedded, arrived)
