"""A state is used once; what it holds comes back when a request leaves it."""

from collections.abc import Callable
from functools import partial

import pytest

from tokenspeed_engine.control import SamplingParams, StateReusedError
from tokenspeed_engine.control.lifecycle import Decoding, Prefilling, Waiting
from tokenspeed_engine.control.pages import PageLease, PagePool
from tokenspeed_engine.control.request import Request
from tokenspeed_engine.control.slots import StateLease, StatePool


class Pools:
    def __init__(self) -> None:
        self.pages = PagePool(num_pages=8, page_size=2)
        self.slots = StatePool(2)

    def leases(self) -> tuple[PageLease, StateLease]:
        pages, slot = self.pages.lease(6), self.slots.lease()
        assert pages is not None
        assert slot is not None
        return pages, slot

    @property
    def free(self) -> tuple[int, int]:
        return self.pages.num_free, self.slots.num_free


@pytest.fixture
def pools() -> Pools:
    return Pools()


def waiting() -> Waiting:
    return Waiting.new(Request("r", 0, (5, 6, 7), SamplingParams(), seed=0, max_tokens=10))


def prefilling(pools: Pools) -> Prefilling:
    return waiting().admit(*pools.leases())


def decoding(pools: Pools) -> Decoding:
    return prefilling(pools).advance(2).complete(8, drafts=(9, 10))


def test_a_life_with_a_preemption(pools: Pools) -> None:
    state = decoding(pools)
    assert (state.computed, state.drafts, state.tokens.span(0, 9)) == (3, (9, 10), (5, 6, 7, 8))
    state = state.accept((9, 11))
    assert (state.computed, state.drafts, state.tokens.num_generated) == (5, (), 3)
    assert pools.free == (5, 1)
    again = state.preempt()
    assert pools.free == (8, 2)
    assert (waiting().was_admitted, again.was_admitted) == (False, True)
    resumed = again.admit(*pools.leases())
    assert (resumed.computed, len(resumed.tokens)) == (0, 6)
    end = resumed.advance(5).complete(12).finish("length")
    assert (end.reason, end.error, end.tokens.span(3, 99)) == ("length", None, (8, 9, 11, 12))
    assert pools.free == (8, 2)


def test_a_prefix_hit_starts_behind_what_is_reused(pools: Pools) -> None:
    state = waiting().admit(*pools.leases(), reused=2)
    assert (state.reused, state.computed) == (2, 2)
    assert state.complete(8).computed == 3


def test_what_was_reused_is_not_what_was_run(pools: Pools) -> None:
    state = waiting().admit(*pools.leases(), reused=1).advance(1)
    assert (state.reused, state.computed) == (1, 2)


def test_a_prefill_elsewhere_arrives_or_is_taken_back(pools: Pools) -> None:
    away = waiting().send(*pools.leases())
    assert away.arrive(8).tokens.span(0, 9) == (5, 6, 7, 8)
    with pytest.raises(StateReusedError):
        away.preempt()
    lost = waiting().send(*pools.leases())
    assert len(lost.preempt().tokens) == 3
    assert pools.free == (5, 1)


USES: dict[str, Callable[[Pools], Callable[[], object]]] = {
    "admit": lambda pools: partial(waiting().admit, *pools.leases()),
    "send": lambda pools: partial(waiting().send, *pools.leases()),
    "finish waiting": lambda pools: partial(waiting().finish, "abort"),
    "advance": lambda pools: partial(prefilling(pools).advance, 1),
    "complete": lambda pools: partial(prefilling(pools).complete, 8),
    "preempt prefilling": lambda pools: prefilling(pools).preempt,
    "finish prefilling": lambda pools: partial(prefilling(pools).finish, "abort"),
    "accept": lambda pools: partial(decoding(pools).accept, (9,)),
    "preempt decoding": lambda pools: decoding(pools).preempt,
    "finish decoding": lambda pools: partial(decoding(pools).finish, "stop"),
}


@pytest.mark.parametrize("make", USES.values(), ids=USES.keys())
def test_a_second_use_raises_and_changes_nothing(pools: Pools, make: Callable[[Pools], Callable[[], object]]) -> None:
    use = make(pools)
    use()
    free = pools.free
    with pytest.raises(StateReusedError, match=r"request 'r': .* of generation .* was consumed before"):
        use()
    assert pools.free == free


def test_a_stale_state_cannot_touch_its_successor(pools: Pools) -> None:
    state = prefilling(pools)
    following = state.advance(1)
    with pytest.raises(StateReusedError):
        state.finish("abort")
    assert pools.free == (5, 1)
    assert following.complete(8).tokens.num_generated == 1


@pytest.mark.parametrize("reused", [-1, 3])
def test_a_prefix_hit_leaves_the_last_token_to_run(pools: Pools, reused: int) -> None:
    with pytest.raises(ValueError, match="reused: expected 0 to 2"):
        waiting().admit(*pools.leases(), reused=reused)


@pytest.mark.parametrize("count", [0, 3])
def test_a_chunk_stays_inside_the_known_tokens(pools: Pools, count: int) -> None:
    with pytest.raises(ValueError, match="count: expected 1 to 2"):
        prefilling(pools).advance(count)


def test_a_step_yields_a_token(pools: Pools) -> None:
    with pytest.raises(ValueError, match="tokens: expected at least one"):
        decoding(pools).accept(())
