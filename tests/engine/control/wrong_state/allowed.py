"""Every transition there is, in an order that types."""

from tokenspeed_engine.control.lifecycle import Decoding, Finished, Prefilling, PrefillingElsewhere, Waiting
from tokenspeed_engine.control.pages import PageLease
from tokenspeed_engine.control.slots import StateLease


def served(waiting: Waiting, pages: PageLease, slot: StateLease) -> Finished:
    prefilling: Prefilling = waiting.admit(pages, slot, reused=1).advance(2)
    decoding: Decoding = prefilling.complete(3, drafts=(4, 5)).accept((4, 5, 6))
    return decoding.finish("stop")


def preempted(decoding: Decoding, pages: PageLease, slot: StateLease) -> Prefilling:
    return decoding.preempt().admit(pages, slot)


def elsewhere(waiting: Waiting, pages: PageLease, slot: StateLease) -> Decoding:
    away: PrefillingElsewhere = waiting.send(pages, slot)
    return away.arrive(3)


def aborted(state: Waiting | Prefilling | PrefillingElsewhere | Decoding) -> Finished:
    return state.finish("abort")
