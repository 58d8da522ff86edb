"""Evidence survives a round trip, and only what speaks of this source under this compiler counts."""

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.registry.toys import DOUBLE, double, doubling, new_registry, toy
from tokenspeed_registry import Kernel, Plugin, Registry
from tokenspeed_registry.evidence import EvidenceStore, Level, Record, Timing, compiler_version, counts, read

REGISTRY = new_registry()
OP: Any = toy(REGISTRY, double, **DOUBLE)
PLAIN = doubling(OP, "plain")
TRITON = doubling(OP, "by_triton", compiler="triton")
FACTS = {"date": "2026-01-01", "registers": 128, "spills": None, "command": ["bench", "--record"]}


def record(of: Kernel = PLAIN, **changes: Any) -> Record:
    known = Record(
        of.name,
        of.source_hash,
        "cpu",
        Level.MEASURED,
        compiler_version(of),
        (Timing({"tokens": 3, "dim": 4}, 12.5), Timing({"tokens": 64, "dim": 4}, 40.0)),
        FACTS,
    )
    return dataclasses.replace(known, **changes)


def test_round_trip(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path / "made" / "by_record"])
    assert store.find(PLAIN, "cpu") is None
    store.record(record())
    store.record(record(TRITON, level=Level.COMPILED, timings=()))
    for reader in (store, EvidenceStore([tmp_path / "made" / "by_record"])):
        assert reader.find(PLAIN, "cpu") == record()
        assert reader.find(TRITON, "cpu") == record(TRITON, level=Level.COMPILED, timings=())
        assert reader.find(PLAIN, "sm_90a") is None
    (file,) = (tmp_path / "made" / "by_record").iterdir()
    assert file.name == "cpu.json"
    assert [item["level"] for item in json.loads(file.read_text())] == ["compiled", "measured"]


def test_a_new_record_replaces_the_old_one_of_its_kernel(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path])
    store.record(record(level=Level.EMULATED))
    store.record(record())
    assert [known.level for known in read(tmp_path / "cpu.json")] == [Level.MEASURED]


def test_minimal_file() -> None:
    data = {"kernel": "k", "source_hash": "h", "arch": "cpu", "level": "interpreted"}
    assert Record.from_json(data) == Record("k", "h", "cpu", Level.INTERPRETED)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    store = EvidenceStore([tmp_path])
    store.record(record())
    before = (tmp_path / "cpu.json").read_bytes()
    with pytest.raises(TypeError):
        store.record(record(facts={"dtype": torch.float32}))
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.json"]
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
        store.record(record(kernel=f"kernel_{index}", facts={"pad": "x" * 2000}))
    done.set()
    watcher.join()
    assert seen == sorted(seen)
    assert seen
    assert min(seen) >= 1
    assert len(read(tmp_path / "cpu.json")) == 41


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
    assert store.describe(PLAIN, "cpu") == "none"


def test_compiler_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed_registry.evidence.version", lambda package: {"triton": "3.7.1+git5"}[package])
    assert compiler_version(TRITON) == "triton 3.7"
    assert compiler_version(PLAIN) == ""
    monkeypatch.undo()
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
    shipped.record(record(TRITON, level=Level.COMPILED))
    mine.record(record())
    mine.add_folder(tmp_path / "shipped")
    assert mine.level(PLAIN, "cpu") is Level.MEASURED
    assert mine.level(TRITON, "cpu") is Level.COMPILED
    mine.record(record(TRITON))
    assert [known.level for known in read(tmp_path / "shipped" / "cpu.json")] == [Level.COMPILED] * 2
    assert mine.level(TRITON, "cpu") is Level.MEASURED


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
    "text", ["{ not json", "[1]", '[{"kernel": "plain"}]', '{"kernel": 1}', '[{"level": "great"}]']
)
def test_a_corrupt_file_is_ignored_aloud(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu.json").write_text(text)
    with pytest.warns(RuntimeWarning, match=r"evidence .*cpu\.json"):
        assert EvidenceStore([tmp_path]).level(PLAIN, "cpu") is Level.NONE


def test_source_hash_is_that_of_the_file() -> None:
    assert PLAIN.source_hash == TRITON.source_hash
    assert len(PLAIN.source_hash) == 16
