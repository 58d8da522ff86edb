"""CUDA C++ sources: what they include, what is compiled when, and what is kept on disk."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tokenspeed_cuda.code import Code
from tokenspeed_cuda.launch import planned_for
from tokenspeed_registry.registry import default_registry

META = torch.device("meta")
SOURCE = """
#include "device.cuh"
#include "value.cuh"
extern "C" __global__ void fill(float* x) { x[threadIdx.x] = value() + TIMES * low_to_float(1); }
extern "C" __global__ void other(float* x) { x[0] = TIMES; }
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Code:
    monkeypatch.setattr(default_registry, "settings", replace(default_registry.settings, cache=tmp_path / "cache"))
    (tmp_path / "fill.cu").write_text(SOURCE)
    (tmp_path / "value.cuh").write_text("#pragma once\n__device__ float value() { return 3; }\n")
    return Code(str(tmp_path / "fill.py"), "fill.cu")


def cubins(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "cubin").glob("*"))


def test_files_are_the_source_and_all_that_it_includes(code: Code) -> None:
    assert [path.name for path in code.files] == ["fill.cu", "device.cuh", "value.cuh"]


def test_an_include_that_is_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('#include "absent.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"absent\.cuh"):
        _ = Code(str(tmp_path / "a.py"), "a.cu").files


def test_an_entry_is_compiled_once_for_an_arch_and_its_macros(code: Code, tmp_path: Path) -> None:
    with planned_for("sm_90a"):
        first = code.entry("fill", META, TIMES=1)
        assert code.entry("fill", META, TIMES=1) is first
        assert code.entry("fill", META, TIMES=2) is not first
        assert code.entry("other", META, TIMES=1).cubin == first.cubin
    assert len(cubins(tmp_path)) == 2
    with planned_for("sm_100a"):
        assert code.entry("fill", META, TIMES=1).cubin != first.cubin
    assert len(cubins(tmp_path)) == 3


def test_what_is_on_disk_is_read_and_not_compiled(code: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = code.compiled("sm_90a", {"TIMES": 1})
    monkeypatch.setattr(Code, "_compile", lambda *_: pytest.fail("compiled again"))
    assert Code(str(tmp_path / "fill.py"), "fill.cu").compiled("sm_90a", {"TIMES": 1}) == compiled


def test_a_changed_include_is_compiled_anew(code: Code, tmp_path: Path) -> None:
    code.compiled("sm_90a", {"TIMES": 1})
    (tmp_path / "value.cuh").write_text("#pragma once\n__device__ float value() { return 4; }\n")
    code.compiled("sm_90a", {"TIMES": 1})
    assert len(cubins(tmp_path)) == 2


def test_an_error_of_the_compiler_reaches_the_caller(code: Code, tmp_path: Path) -> None:
    (tmp_path / "value.cuh").write_text("#pragma once\n__device__ float value() { return absent; }\n")
    with pytest.raises(Exception, match="absent"):
        code.compiled("sm_90a", {"TIMES": 1})
    assert not (tmp_path / "cache").exists()
