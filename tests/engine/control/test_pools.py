"""Pages and slots have one holder at a time and come back once."""

import pytest

from tokenspeed_engine.control import LeaseError
from tokenspeed_engine.control.pages import PagePool
from tokenspeed_engine.control.slots import StatePool


def test_a_lease_grows_by_whole_pages_and_keeps_their_order() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    lease = pool.lease(4)
    assert lease is not None
    assert (lease.pages, lease.capacity) == ((0,), 4)
    assert lease.grow(5)
    assert lease.grow(8)
    assert lease.pages == (0, 1)
    assert lease.grow(2)
    assert (lease.pages, pool.num_free) == ((0, 1), 2)


def test_too_large_a_wish_takes_nothing() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    lease = pool.lease(4)
    assert lease is not None
    assert not lease.grow(13)
    assert (lease.pages, pool.num_free) == ((0,), 2)
    assert pool.lease(9) is None
    assert pool.num_free == 2
    assert lease.grow(12)
    assert pool.num_free == 0


def test_a_page_lease_is_released_once_and_unusable_after() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    lease = pool.lease(8)
    assert lease is not None
    lease.release()
    assert pool.num_free == 3
    with pytest.raises(LeaseError):
        lease.release()
    with pytest.raises(LeaseError):
        lease.grow(1)
    with pytest.raises(LeaseError):
        _ = lease.pages
    assert pool.num_free == 3


def test_a_slot_is_released_once_and_unusable_after() -> None:
    pool = StatePool(2)
    first, second = pool.lease(), pool.lease()
    assert first is not None
    assert second is not None
    assert (first.slot, second.slot) == (0, 1)
    assert pool.lease() is None
    first.release()
    with pytest.raises(LeaseError):
        first.release()
    with pytest.raises(LeaseError):
        _ = first.slot
    assert pool.num_free == 1


def test_a_shared_page_is_free_when_its_last_holder_gives_it_back() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    first = pool.lease(8)
    assert first is not None
    second = pool.lease(9, shared=first.pages[:1])
    assert second is None
    assert (pool.num_free, first.pages) == (1, (0, 1))
    second = pool.lease(8, shared=first.pages[:1])
    assert second is not None
    assert (second.pages, pool.num_free) == ((0, 2), 0)
    first.release()
    assert pool.num_free == 1
    second.release()
    assert pool.num_free == 3


def test_what_only_the_cache_keeps_is_free_and_evicted_on_demand() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    lease = pool.lease(8)
    assert lease is not None
    for page in lease.pages:
        pool.keep(page)
    assert (pool.num_free, pool.num_unused) == (1, 1)
    lease.release()
    assert (pool.num_free, pool.num_unused) == (3, 1)

    evicted: list[int] = []

    def evict(count: int) -> None:
        evicted.append(count)
        pool.drop(0)

    pool.evict_with(evict)
    lease = pool.lease(8)
    assert lease is not None
    assert (evicted, set(lease.pages), pool.num_free) == ([1], {0, 2}, 1)
    again = pool.lease(4, shared=(1,))
    assert again is not None
    pool.drop(1)
    assert pool.num_free == 0
    again.release()
    assert pool.num_free == pool.num_unused == 1
