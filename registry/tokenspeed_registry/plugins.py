"""Backends as plugins: found through an entry point, loaded in isolation, reported one by one.

An installed package names an object in the entry-point group `tokenspeed_kernels.backends`:

    plugin = Plugin("mine", modules=("my_kernels.mla",), probe=lambda: None)

A plugin that fails to import, or one of whose modules does, is reported and harms no other.
"""

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenspeed_registry.contract import CONTRACT_VERSION
from tokenspeed_registry.kernel import Kernel

ENTRY_POINTS = "tokenspeed_kernels.backends"


@dataclass(frozen=True)
class Plugin:
    """What a backend package offers.

    `modules` are imported when first needed; their `Kernel` objects are the plugin's kernels. `probe` is cheap and
    says why the backend is not usable here (no such device, driver or compiler), or None where it is. `evidence` is
    the folder with its evidence files. `compile`, as `package.module:function`, compiles kernels ahead: see `compiled`.
    """

    name: str
    modules: tuple[str, ...]
    probe: Callable[[], str | None]
    evidence: Path | None = None
    compile: str | None = None
    contract_version: int = CONTRACT_VERSION


@dataclass
class PluginStatus:
    """How loading went. `reason` says why it is not usable, or which modules failed; empty where all is well."""

    name: str
    usable: bool
    reason: str = ""
    plugin: Plugin | None = None
    kernels: list[Kernel] = field(default_factory=list)
    loaded: bool = False


def find_plugins(disabled: frozenset[str]) -> list[PluginStatus]:
    """All installed plugins in name order, probed; kernels not yet loaded."""
    entries = sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name)
    statuses: dict[str, PluginStatus] = {}
    for entry in entries:
        if entry.name in statuses:
            ignored = f"a second plugin of this name ({entry.value}) was ignored"
            statuses[entry.name].reason = "; ".join(filter(None, [statuses[entry.name].reason, ignored]))
            continue
        statuses[entry.name] = _probe(entry, disabled)
    return list(statuses.values())


def load_kernels(status: PluginStatus) -> list[Kernel]:
    """Imports a plugin's modules, each in isolation, and collects their kernels. A second call does nothing."""
    if status.loaded or status.plugin is None:
        return status.kernels
    status.loaded = True
    failures = []
    for name in status.plugin.modules:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            failures.append(f"module {name} failed to import: {_one_line(error)}")
            continue
        found = dict.fromkeys(value for value in vars(module).values() if isinstance(value, Kernel))
        status.kernels += [kernel for kernel in found if kernel not in status.kernels]
    if failures:
        status.reason = "; ".join(filter(None, [status.reason, *failures]))
    return status.kernels


def _probe(entry: importlib.metadata.EntryPoint, disabled: frozenset[str]) -> PluginStatus:
    if entry.name in disabled:
        return PluginStatus(entry.name, False, "disabled by configuration")
    try:
        plugin = entry.load()
        if not isinstance(plugin, Plugin):
            return PluginStatus(entry.name, False, f"entry point {entry.value} is not a Plugin")
        if plugin.contract_version != CONTRACT_VERSION:
            reason = f"built for contract version {plugin.contract_version}, this is {CONTRACT_VERSION}"
            return PluginStatus(entry.name, False, reason)
        unusable = plugin.probe()
    except Exception as error:
        return PluginStatus(entry.name, False, f"failed to load: {_one_line(error)}")
    return PluginStatus(entry.name, unusable is None, unusable or "", plugin)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
