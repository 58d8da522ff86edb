"""A stand-in for Triton's HIP driver: launches compile for gfx950 and run in the emulator, on CPU tensors."""

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from tests.gfx950 import code_object
from tests.gfx950.buffer import bounds
from tests.gfx950.code_object import CodeObject
from tests.gfx950.emulator import LDS_LIMIT, execute

ARCH, WARP = "gfx950", 64
NUMBERS = {
    "i1": "<?", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q",
    "u1": "<?", "u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q",
    "fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d",
}  # fmt: skip


@contextmanager
def emulated() -> Iterator["Emulated"]:
    """Triton launches in the block run in the emulator."""
    stand_in = _Driver()
    before = driver._active
    driver.set_active(stand_in)
    try:
        yield stand_in.emulated
    finally:
        driver._active = before


@dataclass
class Emulated:
    """What runs in the emulator. `counts`: instructions of each launch so far.

    `last_first`: the order in which the waves of workgroups take their turns, for the launches to come.
    """

    counts: list[int] = field(default_factory=list)
    last_first: bool = False


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": LDS_LIMIT, "warpSize": WARP, "multiprocessor_count": 256, "max_num_regs": 512}

    def load_binary(self, name: str, blob: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        code = code_object.load(blob, name)
        return code, code, 0, 0, 1024

    def unload_module(self, module: object) -> None:
        pass


class _Driver(DriverBase):  # type: ignore[misc]
    def __init__(self) -> None:
        self.utils = _Utils()
        self.emulated = Emulated()

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        kinds = list(source.signature.values())

        def launch(
            x: int,
            y: int,
            z: int,
            stream: int,
            code: CodeObject,
            packed: Any,
            info: Any,
            enter: Any,
            leave: Any,
            *args: Any,
        ) -> None:
            given = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) and len(kinds) != 1 else args
            pairs = [(kind, value) for kind, value in zip(kinds, given, strict=True) if kind != "constexpr"]
            storages = (value.untyped_storage() for _, value in pairs if isinstance(value, torch.Tensor))
            bounds.set([(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages])
            threads = metadata.num_warps * WARP
            count = execute(code, (x, y, z), threads, _segment(pairs), metadata.shared, self.emulated.last_first)
            self.emulated.counts.append(count)

        return launch

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", ARCH, WARP)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return 9, 5

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self) -> Any:
        raise NotImplementedError

    def clear_cache(self, cache: object) -> None:
        pass


def _segment(pairs: Iterable[tuple[str, Any]]) -> bytes:
    """The kernel's argument segment: each argument aligned to its size, then two scratch pointers that are not used."""
    packed = bytearray()
    for kind, value in pairs:
        if kind.startswith("*"):
            field = struct.pack("<Q", 0 if value is None else value.data_ptr())
        elif kind == "bf16":
            field = struct.pack("<f", value)[2:]
        else:
            field = struct.pack(NUMBERS[kind], value)
        packed += bytes(-len(packed) % len(field)) + field
    return bytes(packed) + bytes(-len(packed) % 8 + 16)
