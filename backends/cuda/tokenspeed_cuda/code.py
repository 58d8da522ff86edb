"""CUDA C++ beside a kernel's launcher: compiled by NVRTC when an entry point is first used, kept on disk.

    CODE = Code(__file__, "few.cu")
    CODE.entry("inject_mix", x.device, HIDDEN=2560)(grid, block, x, y, tokens)      # see `launch`

A source includes files of `csrc/`, of its own folder, and nothing else: no header of CUDA or of the standard library,
so that NVRTC alone is enough to compile it. What changes from call to call is an argument; macros are static dims.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

import torch

from tokenspeed_cuda.launch import Entry, Macros, planned_arch
from tokenspeed_registry import platform_of
from tokenspeed_registry.registry import default_registry

SHARED = Path(__file__).parent / "csrc"
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


class Code:
    """A source file `name` that lies beside `file`, with what it includes."""

    def __init__(self, file: str, name: str) -> None:
        self.path = Path(file).resolve().parent / name
        self._entries: dict[tuple[object, ...], Entry] = {}

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The source and all that it includes. Raises `FileNotFoundError` for what is not there."""
        return tuple(dict.fromkeys(self._reachable(self.path)))

    def _reachable(self, path: Path) -> Iterator[Path]:
        yield path
        for name in _INCLUDE.findall(path.read_text()):
            folder = self.path.parent if (self.path.parent / name).is_file() else SHARED
            yield from self._reachable(folder / name)

    def entry(self, name: str, device: torch.device, **macros: int) -> Entry:
        """An `extern "C"` kernel of the source, compiled with these macros for the arch of `device`.

        Compiles at the first call for these macros, or reads what an earlier process compiled. Raises
        `NVRTCError` of cuda.core, with the compiler's log, where the source does not compile.
        """
        arch = planned_arch()
        key = (name, arch or device.index, *macros.items())
        found = self._entries.get(key)
        if found is None:
            arch = arch or platform_of(device).arch
            found = self._entries[key] = Entry(name, arch, macros, self.compiled(arch, macros))
        return found

    def compiled(self, arch: str, macros: Macros) -> bytes:
        """The cubin, from the disk cache where it is there."""
        digest = hashlib.sha256("\0".join([arch, _compiler(), *(f"{k}={v}" for k, v in macros.items())]).encode())
        for path in self.files:
            digest.update(path.read_bytes())
        kept = default_registry.settings.cache / "cubin" / f"{self.path.stem}-{arch}-{digest.hexdigest()[:24]}.cubin"
        if kept.is_file():
            return kept.read_bytes()
        cubin = self._compile(arch, macros)
        kept.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=kept.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        os.replace(temporary, kept)  # nobody ever reads half of it
        return cubin

    def _compile(self, arch: str, macros: Macros) -> bytes:
        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(
            name=self.path.name,
            arch=arch,
            std="c++17",
            define_macro=[(name, str(value)) for name, value in macros.items()] or None,
            include_path=[str(self.path.parent), str(SHARED)],
            device_as_default_execution_space=True,
            lineinfo=True,
        )
        return bytes(Program(self.path.read_text(), "c++", options).compile("cubin").code)


@cache
def _compiler() -> str:
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC does not say its version: {error}")
    return f"nvrtc {major}.{minor}"
