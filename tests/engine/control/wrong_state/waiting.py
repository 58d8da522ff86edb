"""What waits holds nothing and has nothing running."""

from tokenspeed_engine.control.lifecycle import Decoding, Waiting
from tokenspeed_engine.control.pages import PageLease


def run(state: Waiting, pages: PageLease) -> None:
    state.advance(1)  # type: ignore[attr-defined]
    state.complete(1)  # type: ignore[attr-defined]
    state.accept((1,))  # type: ignore[attr-defined]
    state.preempt()  # type: ignore[attr-defined]
    state.pages.release()  # type: ignore[attr-defined]
    state.reused  # type: ignore[attr-defined]  # noqa: B018
    state.admit(pages)  # type: ignore[call-arg]


def skip_prefill(state: Waiting) -> Decoding:
    return state  # type: ignore[return-value]
