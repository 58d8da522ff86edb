"""A prefill is not decoded, a decode is not admitted, a prefill elsewhere is not run here."""

from tokenspeed_engine.control.lifecycle import Decoding, Prefilling, PrefillingElsewhere, Running, Waiting
from tokenspeed_engine.control.pages import PageLease
from tokenspeed_engine.control.rows import decode_row, prefill_row
from tokenspeed_engine.control.scheduler import Scheduler
from tokenspeed_engine.control.slots import StateLease


def prefill(state: Prefilling, pages: PageLease, slot: StateLease) -> None:
    state.accept((1,))  # type: ignore[attr-defined]
    state.admit(pages, slot)  # type: ignore[attr-defined]
    state.drafts  # type: ignore[attr-defined]  # noqa: B018
    state.computed = 3  # type: ignore[misc]


def decode(state: Decoding, pages: PageLease, slot: StateLease) -> None:
    state.advance(1)  # type: ignore[attr-defined]
    state.complete(1)  # type: ignore[attr-defined]
    state.admit(pages, slot)  # type: ignore[attr-defined]
    state.finish("cancelled")  # type: ignore[arg-type]


def elsewhere(state: PrefillingElsewhere) -> Running:
    state.advance(1)  # type: ignore[attr-defined]
    return state  # type: ignore[return-value]


def schedule(prefilling: Prefilling, decoding: Decoding, waiting: Waiting) -> None:
    decode_row(prefilling, (), 0)  # type: ignore[arg-type]
    prefill_row(decoding, 1, 0)  # type: ignore[arg-type]
    prefill_row(waiting, 1, 0)  # type: ignore[arg-type]


def keep(scheduler: Scheduler, waiting: Waiting, away: PrefillingElsewhere) -> None:
    scheduler._publish(waiting)  # type: ignore[arg-type]
    scheduler._publish(away)  # type: ignore[arg-type]
