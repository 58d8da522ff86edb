"""Evidence survives a round trip, and only what speaks of this source under this compiler counts."""

import dataclasses
import json
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.registry.toys import DOUBLE, double, doubling, new_registry, toy
from tokenspeed_registry import Kernel, Plugin, Registry, evidence
from tokenspeed_registry.evidence import EvidenceStore, compiler_version, counts, read
from tokenspeed_registry.record import PASSED, Level, Record, Timing

REGISTRY = new_registry()
OP: Any = toy(REGISTRY, double, **DOUBLE)
PLAIN = doubling(OP, "plain")
TRITON = doubling(OP, "by_triton", compiler="triton")
FACTS = {"date": "2026-01-01", "registers": 128, "spills": None, "command": ["bench", "--record"]}


def timing(tokens: int, microseconds: float, dtype: str = "float32", **flags: Any) -> Timing:
    return Timing({"tokens": tokens, "dim": 4}, {"x": dtype}, flags, microseconds, facts={"date": "2026-01-02"})


def record(of: Kernel = PLAIN, level: Level = Level.MEASURED, **changes: Any) -> Record:
    """A record of that level and nothing below it."""
    measured = level is Level.MEASURED
    known = Record(
        of.name,
        of.source_hash,
        "cpu",
        compiler_version(of),
        {Level.VERIFIED if measured else level: FACTS},
        (timing(3, 12.5), timing(64, 40.0)) if measured else (),
        recorded="2026-01-01T00:00:00+00:00",
    )
    return dataclasses.replace(known, **changes)


def test_round_trip(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path / "made" / "by_record"])
    assert store.find(PLAIN, "cpu") is None
    store.record(record())
    store.record(record(TRITON, Level.COMPILED))
    for reader in (store, EvidenceStore([tmp_path / "made" / "by_record"])):
        assert reader.find(PLAIN, "cpu") == record()
        assert reader.find(TRITON, "cpu") == record(TRITON, Level.COMPILED)
        assert reader.find(PLAIN, "sm_90a") is None
    file = tmp_path / "made" / "by_record" / "cpu.json"
    assert [list(item["proofs"]) for item in json.loads(file.read_text())] == [["compiled"], ["verified"]]


def test_what_is_found_out_later_joins_what_was_known(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path])
    levels = []
    for found in (
        record(level=Level.COMPILED, proofs={Level.COMPILED: {"registers": 128}}),
        record(proofs={}, timings=(timing(3, 12.5),)),
        record(level=Level.VERIFIED),
        record(proofs={}, timings=(timing(3, 11.0), timing(64, 40.0), timing(3, 9.0, "bfloat16"))),
        record(level=Level.COMPILED, proofs={Level.COMPILED: {"registers": 96}}),
        record(proofs={}, timings=(), self_checks={"dim=4": PASSED}),
    ):
        store.record(found)
        levels.append(store.level(PLAIN, "cpu"))
    compiled, verified, measured = Level.COMPILED, Level.VERIFIED, Level.MEASURED
    assert levels == [compiled, compiled, measured, measured, measured, measured]
    (known,) = read(tmp_path / "cpu.json")
    assert known.proofs == {compiled: {"registers": 96}, verified: FACTS}
    times = {(t.dims["tokens"], t.dtypes["x"]): t.microseconds for t in known.timings}
    assert times == {(3, "float32"): 11.0, (64, "float32"): 40.0, (3, "bfloat16"): 9.0}
    assert known.self_checks == {"dim=4": PASSED}


@pytest.mark.parametrize("derived", [Level.NONE, Level.MEASURED])
def test_a_derived_level_is_no_proof(derived: Level) -> None:
    with pytest.raises(ValueError, match=f"{derived.name}: not a proof"):
        Record("k", "h", "cpu", proofs={derived: {}})


@pytest.mark.parametrize("level", [Level.INTERPRETED, Level.COMPILED, Level.EMULATED])
def test_a_time_makes_nothing_measured_that_is_not_verified(level: Level) -> None:
    assert record(level=level, timings=(timing(3, 1.0),)).level is level


def test_minimal_file() -> None:
    data = {"kernel": "k", "source_hash": "h", "arch": "cpu", "proofs": {"interpreted": {}}}
    assert Record.from_json(data) == Record("k", "h", "cpu", proofs={Level.INTERPRETED: {}})
    assert Record.from_json(data).to_json() == data


def test_the_time_of_the_last_addition_is_kept(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path])
    store.record(record(recorded=""))
    (first,) = read(tmp_path / "cpu.json")
    assert first.recorded.startswith("20")
    store.record(record())
    assert read(tmp_path / "cpu.json")[0].recorded == first.recorded


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path])
    store.record(record())
    before = (tmp_path / "cpu.json").read_bytes()
    with pytest.raises(TypeError):
        store.record(record(proofs={Level.VERIFIED: {"dtype": torch.float32}}))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cpu.lock", "cpu.json"]
    assert (tmp_path / "cpu.json").read_bytes() == before


def test_no_reader_ever_sees_half_a_file(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path])
    store.record(record())
    done = threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not done.is_set():
            seen.append(len(read(tmp_path / "cpu.json")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for index in range(40):
        store.record(record(kernel=f"kernel_{index}", proofs={Level.VERIFIED: {"pad": "x" * 2000}}))
    done.set()
    watcher.join()
    assert seen == sorted(seen)
    assert seen
    assert min(seen) >= 1
    assert len(read(tmp_path / "cpu.json")) == 41


def write_some(folder: Path, writer: int, start: Any = None) -> None:
    store = EvidenceStore([folder])
    if start is not None:
        start.wait()
    for index in range(10):
        store.record(record(kernel=f"own_{writer}_{index}"))
        store.record(record(timings=(timing(100 * writer + index, 1.0),)))


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    """A process beside threads: each reads the file, adds to it and writes it back."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(4)
    process = context.Process(target=write_some, args=(tmp_path, 1, start))
    threads = [threading.Thread(target=write_some, args=(tmp_path, writer, start)) for writer in (2, 3, 4)]
    process.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.join()
    assert process.exitcode == 0
    known = {known.kernel: known for known in read(tmp_path / "cpu.json")}
    assert len(known) == 41
    assert len(known["plain"].timings) == 40


def test_without_file_locks_it_still_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed_registry.evidence.fcntl", None)
    write_some(tmp_path, 1)
    assert len(read(tmp_path / "cpu.json")) == 11


def test_another_source_shows_but_does_not_count(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path])
    store.record(record(source_hash="0" * 16))
    assert store.level(PLAIN, "cpu") is Level.NONE
    assert store.describe(PLAIN, "cpu") == "measured for another source"


def test_another_compiler_shows_but_does_not_count(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path])
    store.record(record(TRITON, compiler="triton 1.0"))
    assert store.level(TRITON, "cpu") is Level.NONE
    assert store.describe(TRITON, "cpu") == "measured on triton 1.0"
    store.record(record(TRITON))
    assert store.level(TRITON, "cpu") is Level.MEASURED
    assert store.describe(TRITON, "cpu") == "measured"
    assert len(read(tmp_path / "cpu.json")) == 2, "the other compiler may come back"
    assert store.describe(PLAIN, "cpu") == "none"


def test_of_several_that_do_not_count_the_newest_shows(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path])
    for year, compiler, level in [(2024, "9.9", Level.MEASURED), (2026, "1.0", Level.EMULATED), (2025, "3.0", 4)]:
        proof = Level.VERIFIED if level is Level.MEASURED else Level(level)
        found = record(TRITON, proof, compiler=f"triton {compiler}", recorded=f"{year}-01-01")
        store.record(dataclasses.replace(found, timings=(timing(3, 1.0),)))
    assert store.describe(TRITON, "cpu") == "emulated on triton 1.0"
    store.record(record(TRITON, Level.INTERPRETED, recorded="2020-01-01"))
    assert store.describe(TRITON, "cpu") == "interpreted"


def test_self_checks_show_until_the_kernel_is_verified(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path])
    nothing: dict[str, Any] = {"proofs": {}, "timings": ()}
    store.record(record(TRITON, **nothing, self_checks={"dim=4": PASSED}))
    assert store.describe(TRITON, "cpu") == "self-checked"
    store.record(record(TRITON, Level.COMPILED, self_checks={"dim=8": "error 2 above 1"}))
    assert store.describe(TRITON, "cpu") == "compiled, self-checked and failed at dim=8"
    store.record(record(TRITON))
    assert store.describe(TRITON, "cpu") == "measured"


def test_checks_of_older_sources_do_not_pile_up(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path])
    nothing: dict[str, Any] = {"proofs": {}, "timings": (), "self_checks": {"dim=4": PASSED}}
    store.record(record(source_hash="0" * 16))
    for source in ("1" * 16, "2" * 16, PLAIN.source_hash):
        store.record(record(TRITON, source_hash=source, **nothing))
        store.record(record(source_hash=source, **nothing))
    sources = {(known.kernel, known.source_hash) for known in read(tmp_path / "cpu.json")}
    assert sources == {("plain", "0" * 16), ("plain", PLAIN.source_hash), ("by_triton", PLAIN.source_hash)}


def test_compiler_version(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(evidence, "version", lambda package: {"triton": "3.7.1+git5"}[package])
        evidence._installed.cache_clear()
        assert compiler_version(TRITON) == "triton 3.7"
        assert compiler_version(PLAIN) == ""
    evidence._installed.cache_clear()
    assert compiler_version(doubling(OP, "exotic", compiler="no_such_compiler")) == "no_such_compiler absent"


def test_evidence_of_kernels_with_an_unknown_compiler_is_described(tmp_path: Path) -> None:
    exotic = doubling(OP, "exotic", compiler="no_such_compiler")
    store = EvidenceStore([tmp_path])
    store.record(record(exotic, compiler="no_such_compiler 2.0"))
    assert store.describe(exotic, "cpu") == "measured on no_such_compiler 2.0"
    assert not counts(record(exotic, compiler="no_such_compiler 2.0"), exotic)


def test_the_users_folder_overrides_the_plugins(tmp_path: Path) -> None:
    shipped, mine = EvidenceStore([tmp_path / "shipped"]), EvidenceStore([tmp_path / "mine"])
    shipped.record(record(level=Level.COMPILED))
    shipped.record(record(TRITON, timings=(timing(3, 5.0), timing(4, 6.0))))
    mine.record(record())
    mine.add_folder(tmp_path / "shipped")
    assert mine.level(PLAIN, "cpu") is Level.MEASURED
    assert mine.counting(PLAIN, "cpu").proofs.keys() == {Level.COMPILED, Level.VERIFIED}
    assert mine.level(TRITON, "cpu") is Level.MEASURED
    mine.record(record(TRITON, proofs={}, timings=(timing(3, 50.0),)))
    assert [t.microseconds for t in mine.counting(TRITON, "cpu").timings] == [50.0, 6.0]
    assert len(read(tmp_path / "shipped" / "cpu.json")) == 2
    assert [t.microseconds for t in read(tmp_path / "mine" / "cpu.json")[0].timings] == [50.0]


def test_a_plugins_folder_joins_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata
    import sys
    import types

    registry: Registry = new_registry(cache=tmp_path / "cache", plugins=True)
    toy(registry, double, **DOUBLE)
    module = types.ModuleType("fake_evidence_plugin")
    vars(module)["plain"] = PLAIN
    monkeypatch.setitem(sys.modules, module.__name__, module)
    plugin = Plugin("fake", (module.__name__,), lambda: None, evidence=tmp_path / "shipped")
    entry = types.SimpleNamespace(name="fake", value="fake:plugin", load=lambda: plugin)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    EvidenceStore([tmp_path / "shipped"]).record(record())
    found = {c.kernel.name: (c.evidence, c.level) for c in registry.explain("double")}
    assert found == {"plain": ("measured", Level.MEASURED), "reference.double": ("none", Level.NONE)}


@pytest.mark.parametrize(
    "text",
    [
        "{ not json",
        "[1]",
        '[{"kernel": "plain"}]',
        '{"kernel": 1}',
        '[{"kernel": "k", "source_hash": "h", "arch": "cpu", "proofs": {"great": {}}}]',
        '[{"kernel": "k", "source_hash": "h", "arch": "cpu", "proofs": {"measured": {}}}]',
        '[{"kernel": "k", "source_hash": "h", "arch": "cpu", "timings": [{"microseconds": 1}]}]',
    ],
)
def test_a_corrupt_file_is_ignored_aloud(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu.json").write_text(text)
    with pytest.warns(RuntimeWarning, match=r"evidence .*cpu\.json"):
        assert EvidenceStore([tmp_path]).level(PLAIN, "cpu") is Level.NONE
    with pytest.raises(ValueError, match=r"evidence .*cpu\.json"):
        EvidenceStore([tmp_path]).record(record())
    assert (tmp_path / "cpu.json").read_text() == text, "what cannot be read is not overwritten"
