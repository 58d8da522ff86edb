"""Other projects' kernels: found by their adapters, timed on our data, held to our answer, and absent without harm."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.kernels.benchmark_toys import accumulate_cases, accumulates, bench_of, cell_of, doubles
from tests.registry.toys import doubling
from tokenspeed_kernels.benchmark.peers import FOLDER, Adapter, Peer, PeerCall, find_peers
from tokenspeed_kernels.benchmark.rows import Row
from tokenspeed_registry import OnHost

GOOD = """
NAME = "good"
def available(): return None
def version(): return "1.2"
def adapters(): return {"double": lambda arguments: None}
"""


def doubled(factor: float = 2.0, name: str = "doubled") -> Adapter:
    def adapt(arguments: Mapping[str, Any]) -> PeerCall:
        x = arguments["x"].t().contiguous()  # a layout of its own
        return PeerCall(lambda: (x * factor, "more"), lambda returned: {name: returned[0].t()})

    return adapt


def row_beside(adapter: Adapter) -> Row:
    registry, op = doubles()
    bench = bench_of(registry, peers=[Peer("absent", "not installed"), Peer("toy", adapters={"double": adapter})])
    (row,) = bench.rows(cell_of(op), bench.kernels("double"))
    assert row.us is not None
    return row


def test_a_peer_is_timed_beside_ours() -> None:
    row = row_beside(doubled())
    assert row.peers.keys() == {"toy"}
    assert row.peers["toy"] > 0
    assert row.notes == ()


def test_a_peer_may_be_less_exact_and_says_so() -> None:
    row = row_beside(doubled(2 * (1 + 2e-6)))
    assert row.peers.keys() == {"toy"}
    assert "beyond our tolerance" in row.notes[0]


@pytest.mark.parametrize("factor", [2.1, float("nan")])
def test_a_wrong_peer_gets_no_time(factor: float) -> None:
    row = row_beside(doubled(factor))
    assert row.peers == {}
    assert "toy: wrong doubled: error" in row.notes[0]


def test_each_copy_is_adapted_and_run() -> None:
    seen: set[int] = set()

    def adapt(arguments: Mapping[str, Any]) -> PeerCall:
        return PeerCall(lambda: seen.add(arguments["x"].data_ptr()))

    row = row_beside(adapt)
    assert len(seen) == row.calls > 1
    assert row.notes == ("toy: not compared",)


def test_a_call_that_a_peer_cannot_do() -> None:
    row = row_beside(lambda arguments: None)
    assert row.peers == {}
    assert row.notes == ("toy: cannot do this call",)


def test_a_peer_that_fails_harms_no_row() -> None:
    def adapt(arguments: Mapping[str, Any]) -> PeerCall:
        raise OSError("no libpeer.so")

    row = row_beside(adapt)
    assert row.peers == {}
    assert row.notes == ("toy: failed: OSError: no libpeer.so",)


def test_ours_and_the_peers_own_state_are_fresh_for_every_batch() -> None:
    """The peer adds to our pool and to a tensor of its own, both in place."""
    registry, op = accumulates()

    def adapt(arguments: Mapping[str, Any]) -> PeerCall:
        own = arguments["pool"].clone()

        def run() -> None:
            arguments["pool"].add_(arguments["more"])
            own.add_(arguments["more"])

        def outputs(_: Any) -> dict[str, Tensor]:
            return {"pool": (own + arguments["pool"]) / 2}

        pristine = own.clone()
        return PeerCall(run, outputs, lambda: own.copy_(pristine))

    bench = bench_of(registry, peers=[Peer("toy", adapters={"accumulate": adapt})])
    (row,) = bench.rows(cell_of(op, accumulate_cases), bench.kernels("accumulate"))
    assert row.notes == ()
    assert row.peers["toy"] > 0


def test_a_kernel_of_host_memory_is_not_held_against_peers_of_device_memory() -> None:
    """Nor against ceilings of the device's memory."""
    registry, op = doubles(placeable=("x",))
    registry.add_kernel(doubling(op, "far", constraints=[OnHost("x").in_(True)]))
    bench = bench_of(registry, peers=[Peer("toy", adapters={"double": doubled()})])
    rows = {row.kernel: row for row in bench.rows(cell_of(op), bench.kernels("double"))}
    assert rows["torch"].peers.keys() == {"toy"}
    assert rows["torch"].of_ceiling is not None
    assert rows["far"].us is not None
    assert rows["far"].peers == {}
    assert rows["far"].of_ceiling is rows["far"].floor_us is None
    assert rows["far"].notes == ("x in host memory: no ceiling is measured of that",)


def test_what_is_not_compared_is_said() -> None:
    registry, op = accumulates()
    adapters: dict[str, Adapter] = {"accumulate": lambda arguments: PeerCall(lambda: None, lambda _: {})}
    bench = bench_of(registry, peers=[Peer("toy", adapters=adapters)])
    (row,) = bench.rows(cell_of(op, accumulate_cases), bench.kernels("accumulate"))
    assert row.notes == ("toy: not compared",)


def test_adapters_are_found_and_absent_ones_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(GOOD)
    (tmp_path / "b.py").write_text(GOOD.replace("None\ndef", "'not installed'\ndef").replace('"good"', '"away"'))
    (tmp_path / "c.py").write_text("import no_such_module")
    (tmp_path / "_shared.py").write_text("raise AssertionError")
    good, away, broken = find_peers(tmp_path)
    assert (good.name, good.reason, good.version, set(good.adapters)) == ("good", "", "1.2", {"double"})
    assert (away.name, away.reason, away.adapters) == ("away", "not installed", {})
    assert broken.name == "c"
    assert "No module named 'no_such_module'" in broken.reason


def test_the_adapters_of_this_checkout_load() -> None:
    found = {peer.name: peer for peer in find_peers(FOLDER)}
    assert "torch.compile" in found
    assert not any("its adapter failed" in peer.reason for peer in found.values())
    assert all(peer.version for peer in found.values() if not peer.reason)


def test_versions_are_those_of_the_metadata_beside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla_core-9.8.7.dist-info").mkdir()
    (tmp_path / "fla_core-9.8.7.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fla-core\nVersion: 9.8.7\n"
    )
    monkeypatch.setenv("TOKENSPEED_PEERS", str(tmp_path))
    monkeypatch.setattr("sys.path", [*sys.path])
    found = {peer.name: peer for peer in find_peers(FOLDER)}
    assert (found["FLA"].reason, found["FLA"].version) == ("", "9.8.7")
