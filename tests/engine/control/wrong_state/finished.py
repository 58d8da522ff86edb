"""Nothing follows the end, and it holds nothing to free or to run."""

from tokenspeed_engine.control.lifecycle import Finished
from tokenspeed_engine.control.pages import PageLease
from tokenspeed_engine.control.slots import StateLease


def run(state: Finished, pages: PageLease, slot: StateLease) -> None:
    state.admit(pages, slot)  # type: ignore[attr-defined]
    state.advance(1)  # type: ignore[attr-defined]
    state.accept((1,))  # type: ignore[attr-defined]
    state.preempt()  # type: ignore[attr-defined]
    state.finish("abort")  # type: ignore[attr-defined]
    state.pages.release()  # type: ignore[attr-defined]
    state.slot.release()  # type: ignore[attr-defined]
