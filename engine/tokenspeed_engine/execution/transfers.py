"""What a plan moves between slots, pages and host snapshots before its rows run."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from tokenspeed_engine.control import CopyPage, CopySlot, Fetch, Offload, Settle
from tokenspeed_engine.control.plan import Transfer
from tokenspeed_engine.execution.batch import Settling
from tokenspeed_engine.execution.ledger import Ledger, Undo
from tokenspeed_engine.execution.upload import int32, upload
from tokenspeed_engine.models.families import Caches, Model

Work = Callable[[], None]
"""Something to do on the device, in the order in which it was planned."""


class Mover:
    """Moves states of a model. `ledger` is None for a model that keeps nothing by slot; then only pages move.

    Host snapshots lie in pinned memory where there is a device. All copies are asynchronous and ordered by the stream.
    """

    def __init__(
        self, model: Model, caches: Caches, ledger: Ledger | None, num_host_snapshots: int, device: torch.device
    ) -> None:
        self._model = model
        self._caches = caches
        self._ledger = ledger
        self._device = device
        self._host = [
            torch.empty(
                (num_host_snapshots, pool.shape[0], *pool.shape[2:]), dtype=pool.dtype, pin_memory=device.type == "cuda"
            )
            for pool in (caches.slot_pools if ledger is not None and num_host_snapshots else ())
        ]
        self._host_lengths: dict[int, int] = {}

    def plan(self, transfers: Sequence[Transfer]) -> list[Work]:
        """The work of all transfers, in order. Raises RuntimeError for a slot whose state cannot be had."""
        work: list[Work] = []
        for kind, group in groupby(transfers, type):
            if kind is Settle:
                work += self.settle((one.slot, one.length) for one in group if isinstance(one, Settle))
            else:
                for transfer in group:
                    work += self._one(transfer)
        return work

    def settle(self, slots: Iterable[tuple[int, int]]) -> list[Work]:
        """The work that brings (slot, length) pairs into plain form; none where they have it already."""
        if self._ledger is None:
            return []
        undos: dict[int, Undo] = {}
        work: list[Work] = []
        for slot, length in slots:
            undo = self._ledger.undo(slot, length)
            if not undo.is_nothing(slot):
                undos[slot] = undo
            self._ledger.settled(slot, length)
        if undos:
            work.append(partial(self._settle, undos))
        return work

    def _settle(self, undos: dict[int, Undo]) -> None:
        arrays = {
            "slots": int32(list(undos)),
            "dropped": int32([undo.dropped for undo in undos.values()]),
            "kept": int32([undo.kept for undo in undos.values()]),
            "initial": int32([undo.initial for undo in undos.values()]),
        }
        self._model.settle(Settling(**upload(arrays, self._device)), self._caches)

    def _one(self, transfer: Transfer) -> list[Work]:
        ledger = self._ledger
        match transfer:
            case CopyPage(source, target):
                return [partial(_copy, self._caches.page_pools, source, target)]
            case _ if ledger is None:
                return []
            case CopySlot(source, target):
                ledger.settled(target, ledger.length(source))
                return [partial(_copy, self._caches.slot_pools, source, target)]
            case Offload(slot, host):
                self._host_lengths[host] = ledger.length(slot)
                return [partial(self._offload, slot, host)]
            case Fetch(host, slot):
                ledger.settled(slot, self._host_lengths[host])
                return [partial(self._fetch, host, slot)]
            case Settle(slot, length):
                return self.settle([(slot, length)])

    def _offload(self, slot: int, host: int) -> None:
        for pool, snapshots in zip(self._caches.slot_pools, self._host, strict=True):
            snapshots[host].copy_(pool[:, slot], non_blocking=True)

    def _fetch(self, host: int, slot: int) -> None:
        for pool, snapshots in zip(self._caches.slot_pools, self._host, strict=True):
            pool[:, slot].copy_(snapshots[host], non_blocking=True)


def _copy(pools: Sequence[Tensor], source: int, target: int) -> None:
    for pool in pools:
        pool[:, target].copy_(pool[:, source])
