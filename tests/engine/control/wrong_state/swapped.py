"""Leases and results are not mistaken for each other."""

from tokenspeed_engine.control.lifecycle import Waiting
from tokenspeed_engine.control.pages import PageLease
from tokenspeed_engine.control.plan import Accepted, Failed, StepResult
from tokenspeed_engine.control.slots import StateLease


def swap(state: Waiting, pages: PageLease, slot: StateLease) -> None:
    state.admit(slot, pages)  # type: ignore[arg-type]


def unchecked(result: StepResult) -> tuple[int, ...]:
    return result.rows[0].tokens  # type: ignore[union-attr]


def changed(accepted: Accepted, failed: Failed) -> None:
    accepted.tokens = ()  # type: ignore[misc]
    failed.message = ""  # type: ignore[misc]
