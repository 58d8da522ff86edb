"""Launches as far as no device is needed: how arguments are laid out, and what planning collects."""

import ctypes
import struct
from pathlib import Path

import torch

from tokenspeed_cuda.ahead import compile_calls
from tokenspeed_cuda.code import Code
from tokenspeed_cuda.counters import counters
from tokenspeed_cuda.launch import packed, planned_arch, planned_for
from tokenspeed_cuda.tensor_map import TensorMap, tensor_map
from tokenspeed_registry import Kernel, known_platform

META = torch.device("meta")


def read(pointer: int, size: int) -> bytes:
    return ctypes.string_at(pointer, size)


def test_each_argument_lies_aligned_where_its_pointer_says() -> None:
    x = torch.zeros(3)
    tensor_map_bytes = bytes(range(128))
    storage, pointers = packed([x, None, -5, 1.5, True, TensorMap(tensor_map_bytes), ctypes.c_int64(1 << 40)])
    assert len(storage) >= 8 * 64
    assert all(pointer % 64 == 0 for pointer in pointers)
    assert struct.unpack("P", read(pointers[0], 8))[0] == x.data_ptr()
    assert read(pointers[1], 8) == bytes(8)
    assert struct.unpack("i", read(pointers[2], 4))[0] == -5
    assert struct.unpack("f", read(pointers[3], 4))[0] == 1.5
    assert struct.unpack("i", read(pointers[4], 4))[0] == 1
    assert read(pointers[5], 128) == tensor_map_bytes
    assert struct.unpack("q", read(pointers[6], 8))[0] == 1 << 40


def test_planning_collects_each_entry_once_and_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('extern "C" __global__ void a(float* x) { x[0] = N; }\n')
    code = Code(str(tmp_path / "a.py"), "a.cu")
    assert planned_arch() is None
    with planned_for("sm_90a") as entries:
        assert planned_arch() == "sm_90a"
        for n in (1, 2, 1):
            code.entry("a", META, N=n)(1, 32, torch.empty(1, device=META), shared=64)
        assert counters(META).device == META
        assert tensor_map(torch.empty(4, 4, device=META), (4, 4)).data == bytes(128)
    assert [(entry.name, entry.macros, entry.shared) for entry in entries] == [("a", {"N": 1}, 64), ("a", {"N": 2}, 64)]


def test_compiling_ahead_describes_every_entry_of_a_source(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text(
        '#include "device.cuh"\n'
        'extern "C" __global__ void plain(float* x) { x[0] = 1; }\n'
        'extern "C" __global__ void product(float* x) {\n'
        "    __shared__ float kept[64]; kept[threadIdx.x] = x[1]; __syncthreads();\n"
        "    float c[4] = {}; u32 a[4] = {1, 2, 3, 4}; mma_bf16(c, a, 5, 6); x[0] = c[0] + kept[threadIdx.x ^ 1];\n"
        "}\n"
    )
    code = Code(str(tmp_path / "a.py"), "a.cu")

    def launches() -> None:
        code.entry("plain", META)(1, 32, None)
        code.entry("product", META)(1, 32, None, shared=4096)

    kernel = Kernel("cuda.toy", "toy", "cuda", launches, compiler="nvrtc")
    plain, product = compile_calls(kernel, known_platform("sm_90a"), [((), {})])
    assert (plain.config, plain.spills, plain.instructions) == ("plain", 0, {})
    assert product.shared_bytes == 4096 + 256
    assert product.instructions == {"HMMA": 1}
