"""Executes a gfx950 code object on CPU memory, instruction by instruction.

Most instructions are decoded and compiled by tinygrad's CDNA emulator (a checkout named by TINYGRAD_DIR); those that it
lacks or gets wrong for gfx950 are overridden by numpy functions beside this file. Workgroups run one after another,
their waves in turn from barrier to barrier, first to last or last to first: a race between waves shows in one of the
two orders, as a rule; timing and missing waits do not show.
"""

import ctypes
import itertools
import os
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tests.gfx950 import buffer, lanes, matrix
from tests.gfx950.code_object import CodeObject
from tests.gfx950.wave import Wave

ARCH = "cdna"
LDS_LIMIT = 160 * 1024
POISON = 0xFFC0FFC0
"""What LDS holds before it is written: NaN as float32 and as two half-precision numbers."""
TOO_MANY = 5_000_000
SCALED_MFMA = 0xD3AC
"""Upper half of the first word of a 16-byte scaled MFMA; all others have 8 bytes, and the decoder must not see more."""
OVERRIDES: tuple[tuple[str, Callable[[Wave, Any], None]], ...] = (
    ("V_CVT_SCALEF32_PK_", matrix.convert_scaled),
    ("BUFFER_", buffer.buffer),
    ("V_PERMLANE32_SWAP", lanes.permlane_swap),
    ("V_PERMLANE16_SWAP", lanes.permlane_swap),
    ("DS_BPERMUTE", lanes.bpermute),
    ("DS_SWIZZLE", lanes.swizzle),
    ("DS_READ_B64_TR", lanes.read_transposed),
    ("V_MFMA_", matrix.mfma),
)
WITHOUT_EFFECT = {
    "S_NOP", "S_WAITCNT", "S_SETPRIO", "S_SLEEP", "S_BARRIER", "S_ICACHE_INV", "S_DCACHE_WB", "S_SENDMSG",
}  # fmt: skip


class Step(NamedTuple):
    """How one instruction runs: by `override`, else by `compiled`, which takes the wave's pointers at `takes`."""

    override: Callable[[Wave, Any], None] | None
    compiled: Any
    takes: tuple[int, ...]
    instruction: Any
    size: int
    barrier: bool


@cache
def tinygrad() -> Any:
    """The emulator module of the checkout. Raises `KeyError` where TINYGRAD_DIR is not set."""
    os.environ.setdefault("DEV", "CPU")
    os.environ.setdefault("CC", "clang-19")
    os.environ.setdefault("PROFILE", "0")
    folder = os.environ["TINYGRAD_DIR"]
    # Its test/mockgpu is in no wheel, and our own `tests` is another package.
    sys.path.insert(0, folder)
    import test.mockgpu.amd.emu as emulator  # type: ignore[import-not-found]

    return emulator


def execute(
    code: CodeObject, grid: tuple[int, int, int], threads: int, arguments: bytes, lds_bytes: int, last_first: bool
) -> int:
    """Runs every workgroup of a launch; returns how many wave instructions that took.

    `arguments`: the kernel's argument segment. `last_first`: the order of a workgroup's waves. Raises `RuntimeError`
    for accesses outside the tensors of `buffer.bounds` and for code that does not end.
    """
    lds_bytes = max(lds_bytes, code.static_lds, 4)
    if lds_bytes > LDS_LIMIT:
        raise RuntimeError(f"{code.name} takes {lds_bytes} bytes of LDS, gfx950 has {LDS_LIMIT}")
    segment = ctypes.create_string_buffer(
        arguments + _hidden(grid, threads) + bytes(max(0, code.kernarg_size - len(arguments)) + 64)
    )
    program = _Program(code)
    executed = 0
    for z, y, x in itertools.product(range(grid[2]), range(grid[1]), range(grid[0])):
        executed += _workgroup(program, (x, y, z), grid, threads, segment, lds_bytes, last_first)
    return executed


def _hidden(grid: tuple[int, int, int], threads: int) -> bytes:
    """The arguments that the runtime adds: how many workgroups there are, of which size; no part of one is left over.

    Layout: https://llvm.org/docs/AMDGPUUsage.html, hidden arguments of code object version 5.
    """
    return struct.pack("<3I6H16x3QH", *grid, threads, 1, 1, 0, 0, 0, 0, 0, 0, 3)


class _Program:
    """The instructions of a code object, prepared when first met."""

    def __init__(self, code: CodeObject) -> None:
        self.code = code
        self._steps: dict[int, Step] = {}
        self._plain: dict[int, tuple[Any, tuple[int, ...], Any]] = {}

    def at(self, address: int) -> Step:
        step = self._steps.get(address)
        if step is None:
            step = self._steps[address] = self._prepare(address)
        return step

    def run_plain(self, wave: Wave, word: int) -> None:
        """Runs a four-byte instruction that stands nowhere in the code."""
        if word not in self._plain:
            emulator = tinygrad()
            raw = word.to_bytes(4, "little") + bytes(12)
            size = emulator.decode_inst(raw, ARCH).size()
            program, runtime = emulator._get_runner(raw[: size + 4], ARCH)
            self._plain[word] = runtime.fxn, tuple(program.arg.globals), ctypes.create_string_buffer(raw, 32)
        function, takes, memory = self._plain[word]
        wave.pc = ctypes.addressof(memory)  # compiled instructions read some of their fields at the program counter
        function(*[wave.pointers[i] for i in takes])

    def _prepare(self, address: int) -> Step:
        emulator = tinygrad()
        raw = bytes((ctypes.c_char * 16).from_address(address).raw)
        if int.from_bytes(raw[2:4], "little") != SCALED_MFMA:
            raw = raw[:8] + bytes(8)
        instruction = emulator.decode_inst(raw, ARCH)
        name = emulator._op_name(instruction)
        scalar = isinstance(instruction, emulator.irc.SOPP)
        barrier = scalar and instruction.op in emulator._BARRIER_OPS
        override = self._override(name, instruction, scalar)
        if override is not None:
            return Step(override, None, (), instruction, instruction.size(), barrier)
        try:
            program, runtime = emulator._get_runner(raw[: instruction.size() + 4], ARCH)
        except Exception as error:
            raise RuntimeError(
                f"{self.code.name} at {address - self.code.entry:#x}: {instruction!r}: {error}"
            ) from error
        return Step(None, runtime.fxn, tuple(program.arg.globals), instruction, instruction.size(), barrier)

    def _override(self, name: str, instruction: Any, scalar: bool) -> Callable[[Wave, Any], None] | None:
        for prefix, function in OVERRIDES:
            if name.startswith(prefix):
                return function
        if type(instruction).__name__.endswith("DPP16"):
            return lambda wave, moved: lanes.dpp(wave, moved, self.run_plain)
        if scalar and name in WITHOUT_EFFECT:
            return lambda wave, nothing: None
        return None


def _workgroup(
    program: _Program,
    place: tuple[int, int, int],
    grid: tuple[int, int, int],
    threads: int,
    segment: Any,
    lds_bytes: int,
    last_first: bool,
) -> int:
    code = program.code
    lds = np.full((lds_bytes + 3) // 4 + 64, POISON, np.uint32)
    scratch = np.zeros(max(code.private, 4) * 64, np.uint8)
    packet, registers = _user_registers(code, grid, threads, segment, lds_bytes)
    waves = [
        _wave(code, first, threads, place, ctypes.addressof(segment), registers, lds, scratch)
        for first in range(0, threads, 64)
    ]
    if last_first:
        waves.reverse()
    executed = 0
    while not all(wave.done for wave in waves):
        for wave in waves:
            if not wave.done:
                executed += _to_barrier(program, wave)
    del packet  # the registers point to it
    return executed


def _to_barrier(program: _Program, wave: Wave) -> int:
    """Runs a wave to its next barrier or to its end."""
    end = tinygrad().ENDPGM_PC
    for executed in range(TOO_MANY):
        address = wave.pc
        if address == end:
            wave.done = True
            return executed
        step = program.at(address)
        if step.override is not None:
            step.override(wave, step.instruction)
            wave.pc = address + step.size
        else:
            step.compiled(*[wave.pointers[i] for i in step.takes])
        if step.barrier:
            return executed + 1
    raise RuntimeError(f"{program.code.name}: more than {TOO_MANY} instructions")


def _wave(
    code: CodeObject,
    first: int,
    threads: int,
    place: tuple[int, int, int],
    segment: int,
    registers: list[int],
    lds: Any,
    scratch: Any,
) -> Wave:
    emulator = tinygrad()
    state = emulator._init_wave(
        code.entry, first, threads, threads, 1, 1, segment, code.rsrc2, code.private, ARCH, *place, registers, 64
    )
    # Hardware that preloads arguments skips the compatibility prologue of 256 bytes.
    state.pc = code.entry + (256 if code.preload & 0x7F else 0)
    accumulation = np.frombuffer(state.accvgpr_buf.as_memoryview(force_zero_copy=True).cast("I"), np.uint32)
    addresses = (
        state.sgpr_buf._buf.va_addr,
        state.vgpr_buf._buf.va_addr,
        _all_memory()._buf.va_addr,
        lds.ctypes.data,
        scratch.ctypes.data,
        state.accvgpr_buf._buf.va_addr,
    )
    return Wave(
        state,
        v=np.frombuffer(state._vgpr_mv, np.uint32).reshape(256, 64),
        a=accumulation.reshape(256, 64),
        s=np.frombuffer(state._sgpr_mv, np.uint32),
        lds=lds,
        pointers=[ctypes.c_uint64(address) for address in addresses],
    )


@cache
def _all_memory() -> Any:
    tinygrad()
    from tinygrad.device import Buffer, BufferSpec  # type: ignore[import-not-found]
    from tinygrad.dtype import dtypes  # type: ignore[import-not-found]

    return Buffer("CPU", 1 << 40, dtypes.uint32, options=BufferSpec(external_ptr=0)).ensure_allocated()


def _user_registers(
    code: CodeObject, grid: tuple[int, int, int], threads: int, segment: Any, lds_bytes: int
) -> tuple[Any, list[int]]:
    """What the first scalar registers hold, in the order of the descriptor's property bits; and what they point to."""
    at = ctypes.addressof(segment)
    sizes = threads, 1, 1
    totals = [count * size for count, size in zip(grid, sizes, strict=True)]
    packed = struct.pack("<HHHHHHIIIIIQQQQ", 0, 3, *sizes, 0, *totals, code.private, lds_bytes, 0, at, 0, 0)
    packet = ctypes.create_string_buffer(packed, 128), ctypes.create_string_buffer(512)
    dispatch, queue = (ctypes.addressof(part) for part in packet)
    given = (
        [0, 0, 0, 0],
        [dispatch & 0xFFFFFFFF, dispatch >> 32],
        [queue & 0xFFFFFFFF, queue >> 32],
        [at & 0xFFFFFFFF, at >> 32],
        [0, 0],
        [0, 0],
        [code.private],
    )
    registers = [word for bit, words in enumerate(given) if code.properties >> bit & 1 for word in words]
    count, offset = code.preload & 0x7F, code.preload >> 7
    registers += struct.unpack_from(f"<{count}I", segment.raw, offset * 4)
    return packet, registers + [0] * ((code.rsrc2 >> 1 & 0x1F) - len(registers))
