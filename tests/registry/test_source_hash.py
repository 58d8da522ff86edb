"""The hash covers what a kernel is made of, and nothing else."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.registry.toys import DOUBLE, double, new_registry, toy
from tokenspeed_registry import Kernel, RegistrationError, kernel
from tokenspeed_registry.source_hash import source_hash

FILES = {
    "__init__.py": "from made_up.unrelated import nothing",
    "unrelated.py": "nothing = 0",
    "backend/__init__.py": "VERSION = 1",
    "backend/mla.py": """
import math, os.path
from torch import nn
from made_up import tiles
from ..common.softmax import maximum
def run():
    import made_up.late as late
    from . import beside, VERSION
""",
    "backend/beside.py": "",
    "tiles.py": "from made_up.deep import name_that_is_no_module",
    "deep.py": "from made_up import tiles",
    "common/__init__.py": "",
    "common/softmax.py": "try:\n    from .maximum import maximum\nexcept ImportError:\n    maximum = max",
    "common/maximum.py": "maximum = 1",
    "late.py": "",
    "backend/csrc/decode.cu": "__global__",
}
REACHED = [
    "backend/__init__.py",
    "backend/mla.py",
    "backend/beside.py",
    "tiles.py",
    "deep.py",
    "common/softmax.py",
    "common/maximum.py",
    "late.py",
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "made_up" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "made_up"


def function_of(package: Path, file: str = "backend/mla.py", module: str = "made_up.backend.mla") -> Callable[..., Any]:
    """The function `run` of a file as if it had been imported under that name."""
    scope: dict[str, Any] = {"__name__": module}
    text = "def run(x, *, out=None): ...\n"
    exec(compile(text, str(package / file), "exec"), scope)
    function: Callable[..., Any] = scope["run"]
    return function


def change(path: Path) -> None:
    """An edit that the clock of the file system may be too coarse to see."""
    stamp = path.stat().st_mtime_ns
    path.write_text(path.read_text() + "\n# changed\n")
    os.utime(path, ns=(stamp + 1, stamp + 1))


@pytest.mark.parametrize("file", sorted(FILES))
def test_which_files_count(package: Path, file: str) -> None:
    run = function_of(package)
    before = source_hash(run)
    assert len(before) == 16
    assert source_hash(run) == before
    change(package / file)
    assert (source_hash(run) != before) == (file in REACHED)


def test_a_new_import_joins_and_a_renamed_file_counts(package: Path) -> None:
    run = function_of(package)
    hashes = [source_hash(run)]
    (package / "deep.py").write_text("import made_up.unrelated")
    hashes.append(source_hash(run))
    change(package / "unrelated.py")
    hashes.append(source_hash(run))
    (package / "late.py").rename(package / "later.py")
    hashes.append(source_hash(run))
    assert len(set(hashes)) == 4


def test_where_the_package_lies_does_not_count(package: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else" / "where"
    elsewhere.mkdir(parents=True)
    here = source_hash(function_of(package), ["csrc/decode.cu"])
    assert package.rename(elsewhere / "made_up")
    assert source_hash(function_of(elsewhere / "made_up"), ["csrc/decode.cu"]) == here


def test_a_file_outside_a_package_counts_alone(package: Path) -> None:
    """A script: its module's name does not say where its package begins."""
    run = function_of(package, module="__main__")
    before = source_hash(run)
    change(package / "tiles.py")
    assert source_hash(run) == before
    change(package / "backend" / "mla.py")
    assert source_hash(run) != before


def test_a_function_without_a_file_has_none() -> None:
    scope: dict[str, Any] = {"__name__": "nowhere"}
    exec("def run(): ...", scope)
    assert source_hash(scope["run"]) == ""


def test_a_file_that_does_not_parse_ends_the_search_there(package: Path) -> None:
    (package / "tiles.py").write_text("type X[T] = =")
    assert len(source_hash(function_of(package))) == 16


def declared(function: Callable[..., Any], **facts: Any) -> Kernel:
    op: Any = toy(new_registry(), double, **DOUBLE)
    found: Kernel = kernel(op, backend="mine", **facts)(function)
    return found


def test_explicit_sources_count(package: Path) -> None:
    plain = declared(function_of(package))
    before = declared(function_of(package), sources=("csrc/decode.cu",))
    assert before.source_hash != plain.source_hash
    change(package / "backend" / "csrc" / "decode.cu")
    assert declared(function_of(package), sources=("csrc/decode.cu",)).source_hash != before.source_hash
    assert declared(function_of(package)).source_hash == plain.source_hash


def test_explicit_sources_must_be_there(package: Path) -> None:
    with pytest.raises(
        RegistrationError, match=r"kernel mine\.double: no source file 'csrc/encode\.cu' beside .*mla\.py"
    ):
        declared(function_of(package), sources=("csrc/decode.cu", "csrc/encode.cu"))


def test_a_kernel_of_this_repository_covers_its_helpers_and_its_contract() -> None:
    """Read, not imported: the hash of one family's kernels must not cost the import of all others."""
    from tokenspeed_kernels.torch import mla

    before = set(sys.modules)
    assert len(mla.mla_decode.source_hash) == 16
    assert set(sys.modules) == before
