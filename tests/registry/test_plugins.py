"""Plugins are isolated: one that fails in any way is reported with its reason, and all others still serve."""

import importlib.metadata
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.registry.toys import DOUBLE, double, doubling, new_registry, toy
from tokenspeed_registry import CONTRACT_VERSION, Kernel, NoKernelError, Plugin, Registry, UnknownNameError, trace
from tokenspeed_registry.plugins import ENTRY_POINTS

X = torch.ones(2, 4)
REASON = "no such device"


class Entry:
    """An entry point that needs no installed package."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name = name
        self.value = f"{name}_package:plugin"
        self.load = load


def healthy() -> None:
    """The probe of a plugin that can run here."""


def fails(error: BaseException) -> Callable[[], Any]:
    def load() -> Any:
        raise error

    return load


class Bench:
    """Installs fake plugins for a registry that has one op, `double`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.entries: list[Entry] = []
        self.registry = new_registry(plugins=True)
        self.op: Any = toy(self.registry, double, **DOUBLE)
        self.looked: list[str] = []

        def entry_points(group: str) -> list[Entry]:
            self.looked.append(group)
            return self.entries

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    def module(self, name: str, *kernels: Kernel) -> str:
        module = types.ModuleType(name)
        for index, each in enumerate(kernels):
            setattr(module, f"kernel_{index}", each)
        self.monkeypatch.setitem(sys.modules, name, module)
        return name

    def plugin(self, name: str, *kernels: Kernel, probe: Callable[[], str | None] = healthy, **facts: Any) -> None:
        modules = facts.pop("modules", None) or (self.module(f"fake_{name}_{len(self.entries)}", *kernels),)
        plugin = Plugin(name, modules=modules, probe=probe, **facts)
        self.entries.append(Entry(name, lambda: plugin))

    def kernel(self, name: str, **facts: Any) -> Kernel:
        return doubling(self.op, name, **facts)

    @property
    def reasons(self) -> dict[str, tuple[bool, str]]:
        return {status.name: (status.usable, status.reason) for status in self.registry.plugins()}

    @property
    def names(self) -> set[str]:
        return {each.name for each in self.registry.kernels()} - {"reference.double"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_plugins_load_on_first_dispatch_once_and_in_name_order(bench: Bench) -> None:
    probes: list[str] = []
    bench.plugin("zz", bench.kernel("zz"), probe=lambda: probes.append("zz"))
    bench.plugin("aa", bench.kernel("aa"), probe=lambda: probes.append("aa"))
    assert bench.looked == []
    assert torch.equal(bench.op(X, backend="zz"), 2 * X)
    bench.op(X)
    bench.registry.explain("double")
    assert bench.looked == [ENTRY_POINTS]
    assert probes == ["aa", "zz"]
    assert bench.reasons == {"aa": (True, ""), "zz": (True, "")}


def broken_probe() -> str | None:
    raise RuntimeError("driver\nmismatch")


def test_each_failure_is_reported_and_harms_no_other(bench: Bench) -> None:
    good = bench.kernel("good")
    missing = f"no_such_module_{id(bench)}"
    bench.entries.append(Entry("a_import", fails(ImportError("no libtoy.so"))))
    bench.entries.append(Entry("b_not_a_plugin", lambda: "plugin"))
    bench.plugin("c_version", bench.kernel("c"), contract_version=CONTRACT_VERSION + 1)
    bench.plugin("d_probe_raises", bench.kernel("d"), probe=broken_probe)
    bench.plugin("e_probe_says_no", bench.kernel("e"), probe=lambda: REASON)
    modules = (missing, bench.module("fake_half", bench.kernel("half")))
    bench.plugin("f_half", modules=modules)
    bench.plugin("g_good", good)
    bench.op(X)
    assert bench.registry.dispatcher("double").kernels[-1] is good
    version = f"built for contract version {CONTRACT_VERSION + 1}, this is {CONTRACT_VERSION}"
    broken = f"module {missing} failed to import: ModuleNotFoundError: No module named {missing!r}"
    assert bench.reasons == {
        "a_import": (False, "failed to load: ImportError: no libtoy.so"),
        "b_not_a_plugin": (False, "entry point b_not_a_plugin_package:plugin is not a Plugin"),
        "c_version": (False, version),
        "d_probe_raises": (False, "failed to load: RuntimeError: driver"),
        "e_probe_says_no": (False, REASON),
        "f_half": (True, broken),
        "g_good": (True, ""),
    }
    assert bench.names == {"e", "half", "good"}
    for name in ("good", "half"):
        assert torch.equal(bench.op(X, backend=name), 2 * X)


def test_a_module_that_raises_anything(bench: Bench, tmp_path: Path) -> None:
    bench.monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raises_at_import.py").write_text("1 / 0\n")
    (tmp_path / "does_not_parse.py").write_text("def\n")
    bench.plugin("bad", modules=("raises_at_import", "does_not_parse"))
    bench.plugin("good", bench.kernel("good"))
    assert torch.equal(bench.op(X, backend="good"), 2 * X)
    usable, reason = bench.reasons["bad"]
    assert usable
    assert "raises_at_import failed to import: ZeroDivisionError: division by zero" in reason
    assert "does_not_parse failed to import: SyntaxError" in reason


def test_disabled_by_configuration(bench: Bench) -> None:
    bench.registry.settings.disabled = frozenset({"off"})
    bench.entries.append(Entry("off", fails(AssertionError("a disabled plugin is not even imported"))))
    bench.plugin("on", bench.kernel("on"))
    assert bench.reasons == {"off": (False, "disabled by configuration"), "on": (True, "")}


def test_two_plugins_of_one_name(bench: Bench) -> None:
    bench.plugin("twin", bench.kernel("first"))
    bench.plugin("twin", bench.kernel("second"))
    ((usable, reason),) = bench.reasons.values()
    assert usable
    assert "a second plugin of this name (twin_package:plugin) was ignored" in reason
    assert bench.names == {"first"}


def test_two_plugins_with_kernels_of_one_name(bench: Bench) -> None:
    first, again = bench.kernel("same"), bench.kernel("same", factor=3.0)
    bench.plugin("aa", first)
    bench.plugin("bb", again, bench.kernel("other"))
    assert torch.equal(bench.op(X, backend="same"), 2 * X)
    assert bench.reasons == {"aa": (True, ""), "bb": (True, "kernel 'same' is already registered")}
    assert bench.names == {"same", "other"}


def test_a_kernel_that_a_module_imports_from_another_counts_once(bench: Bench) -> None:
    shared = bench.kernel("shared")
    modules = (bench.module("fake_one", shared, shared), bench.module("fake_two", shared))
    bench.plugin("aa", modules=modules)
    assert bench.names == {"shared"}
    assert bench.reasons == {"aa": (True, "")}


def test_kernels_of_an_unusable_plugin_are_shown_but_never_serve(bench: Bench) -> None:
    bench.plugin("absent", bench.kernel("absent", priority=400), probe=lambda: REASON)
    bench.plugin("present", bench.kernel("present"))
    for _ in range(2):
        with pytest.raises(NoKernelError) as caught:
            bench.op(X, backend="absent")
        assert caught.value.reasons == (f"absent: refused: plugin absent: {REASON}",)
        explained = {c.kernel.name: (c.accepted, c.reason) for c in bench.registry.explain("double")}
        assert explained["absent"] == (False, f"plugin absent: {REASON}")
        with trace() as calls:
            bench.op(X)
        assert [call.kernel for call in calls] == ["present"]
    with pytest.raises(UnknownNameError):
        bench.op(X, backend="nobody")


def test_probe_that_gives_an_empty_reason_says_no_too(bench: Bench) -> None:
    bench.plugin("mute", bench.kernel("mute"), probe=lambda: "")
    assert bench.reasons["mute"][0] is False
    with pytest.raises(NoKernelError):
        bench.op(X, backend="mute")


def test_corrupt_evidence_of_one_plugin_harms_no_other(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "cpu.json").write_text("{ not json")
    bench.plugin("bad", bench.kernel("bad"), evidence=tmp_path)
    bench.plugin("good", bench.kernel("good"))
    with pytest.warns(RuntimeWarning, match=r"evidence .*cpu\.json"):
        assert torch.equal(bench.op(X, backend="good"), 2 * X)


def test_a_registry_without_plugins_looks_for_none(bench: Bench) -> None:
    registry: Registry = new_registry()
    op = toy(registry, double, **DOUBLE)
    op(X)
    assert registry.plugins() == []
    assert bench.looked == []
