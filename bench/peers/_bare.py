"""Imports single modules of a peer without running its package's own start, which asks for much that is not needed.

Where the peers' packages lie unpacked is said by TOKENSPEED_PEERS, a folder; without it, nothing of them is found.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import site
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def folder() -> Path | None:
    """Where the peers lie."""
    named = os.environ.get("TOKENSPEED_PEERS")
    return Path(named) if named else None


def missing(package: str) -> str | None:
    """Why a package cannot be used; None where it can."""
    where = folder()
    if where is None:
        return "TOKENSPEED_PEERS names no folder"
    return None if (where / package).exists() else f"no {package} in the folder that TOKENSPEED_PEERS names"


def on_path() -> None:
    """Whole packages that lie there can be imported, after those that are installed."""
    if (where := folder()) is not None and str(where) not in sys.path:
        site.addsitedir(str(where))


def version(package: str) -> str:
    """By the metadata of a package that is installed or lies there; empty without any."""
    found = importlib.metadata.distributions(name=package, path=[*map(str, filter(None, [folder()])), *sys.path])
    return next((each.version for each in found), "")


def bare(name: str) -> types.ModuleType:
    """A package that only says where its modules lie. Those above it are made too."""
    if name in sys.modules:
        return sys.modules[name]
    where = folder()
    assert where is not None
    module = types.ModuleType(name)
    module.__path__ = [str(where.joinpath(*name.split(".")))]
    module.__package__ = name
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(bare(parent), child, module)
    return module


def stand_in(name: str, **attributes: Any) -> types.ModuleType:
    """A module of given attributes under a name that a peer imports."""
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


class Renamed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves `old.*` from `new.*`."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._old and not fullname.startswith(self._old + "."):
            return None
        try:
            module = importlib.import_module(self._new + fullname[len(self._old) :])
        except ImportError:
            return None
        spec = importlib.util.spec_from_loader(fullname, self, is_package=hasattr(module, "__path__"))
        if spec is not None and hasattr(module, "__path__"):
            spec.submodule_search_locations = list(module.__path__)
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return importlib.import_module(self._new + spec.name[len(self._old) :])

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def quiet_logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """A logger that also has the methods which vllm adds to its own."""

    class Quiet(logging.LoggerAdapter[logging.Logger]):
        def info_once(self, *args: object, **kwargs: object) -> None: ...
        def warning_once(self, *args: object, **kwargs: object) -> None: ...
        def debug_once(self, *args: object, **kwargs: object) -> None: ...

    return Quiet(logging.getLogger(name), {})
