"""Leases and results are not mistaken for each other."""

from tokenspeed_engine.control.lifecycle import Waiting
from tokenspeed_engine.control.pages import PageLease
from tokenspeed_engine.control.plan import Accepted, Executor, Failed, Settle, StepPlan, StepResult
from tokenspeed_engine.control.prefix_cache import PrefixCache
from tokenspeed_engine.control.slots import StateLease


def swap(state: Waiting, pages: PageLease, slot: StateLease) -> None:
    state.admit(slot, pages)  # type: ignore[arg-type]


def unchecked(result: StepResult) -> tuple[int, ...]:
    return result.rows[0].tokens  # type: ignore[union-attr]


def unwaited(executor: Executor, plan: StepPlan) -> StepResult:
    executor.submit(plan).rows  # type: ignore[attr-defined]  # noqa: B018
    return executor.submit(plan)  # type: ignore[return-value]


def publish(cache: PrefixCache, pages: PageLease, slot: StateLease) -> None:
    cache.publish((1,), slot, pages)  # type: ignore[arg-type]
    cache.publish((1,), pages.pages, slot.slot)  # type: ignore[arg-type]


def changed(accepted: Accepted, failed: Failed, settle: Settle) -> None:
    settle.length = 3  # type: ignore[misc]
    accepted.tokens = ()  # type: ignore[misc]
    failed.message = ""  # type: ignore[misc]
