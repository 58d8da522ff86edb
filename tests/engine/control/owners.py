"""Who holds each page, slot and host snapshot: counted from its holders and compared with the pools' own counts."""

from collections import Counter
from collections.abc import Iterator

from tokenspeed_engine.control.pool import Pool
from tokenspeed_engine.control.radix import Node
from tokenspeed_engine.control.scheduler import Scheduler


def check_owners(scheduler: Scheduler) -> None:
    cache, config = scheduler.cache, scheduler._config
    running = list(scheduler._running.values())
    nodes = list(_below(cache._tree.root))
    snapshots = [node.snapshot for node in nodes if node.snapshot is not None]

    _check_pool(
        scheduler.pages,
        leased=Counter(page for state in running for page in state.pages.pages),
        kept=Counter(node.page for node in nodes),
    )
    _check_pool(
        scheduler.slots,
        leased=Counter(state.slot.slot for state in running),
        kept=Counter(snapshot.slot for snapshot in snapshots if snapshot.slot is not None),
    )
    assert max([0, *scheduler.slots._leases, *scheduler.slots._keeps]) <= 1
    hosts = [snapshot.host for snapshot in snapshots if snapshot.host is not None]
    assert sorted([*hosts, *cache.snapshots._free_hosts]) == list(range(config.num_host_snapshots))

    assert set(cache._tree.leaves) == {node for node in nodes if not node.children}
    for node in nodes:
        assert len(node.tokens) == config.page_size or not node.children
        assert node.num_tails == sum(len(child.tokens) < config.page_size for child in node.children.values())
    for snapshot in snapshots:
        assert config.has_state
        assert (snapshot.slot, snapshot.host) != (None, None)
    if config.has_state:
        assert all(leaf.snapshot is not None for leaf in cache._tree.leaves)
    arrivals = [state.request.arrival for state in scheduler._waiting]
    assert arrivals == sorted(arrivals)
    if not config.prefix_cache:
        assert not nodes
        # Nobody overtakes: those that run are the oldest.
        assert not arrivals or all(state.request.arrival < arrivals[0] for state in running)


def _check_pool(pool: Pool, leased: Counter[int], kept: Counter[int]) -> None:
    assert pool._leases == [leased[unit] for unit in range(pool.size)]
    assert pool._keeps == [kept[unit] for unit in range(pool.size)]
    assert sorted(pool._unused) == [unit for unit in range(pool.size) if not leased[unit] and not kept[unit]]
    assert pool.num_free == sum(not leased[unit] for unit in range(pool.size))


def _below(node: Node) -> Iterator[Node]:
    for child in node.children.values():
        yield child
        yield from _below(child)
