"""What programmatic dependent launch saves: `python bench/overlap.py [--json FILE]`, on an NVIDIA device.

Each kernel in CUDA C++ is called on rotating cold data, as `tokenspeed-kernels bench` does, back to back in one CUDA
graph: once as it is, so that a call starts under the one before it and fetches what nobody writes, and once with every
launch waiting for the end of the one before. Printed are microseconds a call of both. Then all of them follow one
another, as in a step of a model, with and without.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import tokenspeed_kernels  # noqa: F401  declares the ops
from tokenspeed_cuda.launch import one_after_another
from tokenspeed_kernels.benchmark.rotation import Rotation, copies_needed, footprint
from tokenspeed_kernels.benchmark.timing import Flush, cache_bytes, time_calls
from tokenspeed_kernels.facts import facts_now
from tokenspeed_registry import platform_of
from tokenspeed_registry.cases import case_set
from tokenspeed_registry.registry import default_registry

CELLS = (
    ("residual_inject_mix", "qwen4_exp decode, tokens=4"),
    ("residual_inject_mix", "qwen4_exp decode, tokens=4, weights=float8"),
    ("gdn_decode", "qwen4_exp decode, batch=1"),
    ("gdn_verify_replay", "qwen4_exp verify, 3 drafts, batch=1, kept=few"),
    ("moe_experts_nvfp4", "qwen4_exp decode, tokens=4"),
    ("linear_fp8_block", "deepseek_v3 latent down, decode, tokens=4"),
    ("mla_decode", "deepseek_v3 decode, 16 heads a rank, batch=1, longest=8192, uniform=True, q_len=1"),
)
CUDA = torch.device("cuda")
Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    file = parser.parse_args().json
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    flush = Flush(CUDA)
    rows, chain = [], []
    for op, cell in CELLS:
        for name, calls, before in rotated(op, cell):
            rows.append({"kernel": name, "cell": cell, **both(calls, [before, flush])})
            chain.append((calls, before))
    steps = min(len(calls) for calls, _ in chain)
    in_turn = [calls[i] for i in range(steps) for calls, _ in chain]
    together = both(in_turn, [*(before for _, before in chain), flush])
    rows.append({"kernel": "all in turn", "cell": f"{len(chain)} kernels, a call", **together})
    for row in rows:
        print(f"{row['overlapping']:8.2f} {row['one after another']:8.2f} us  {row['kernel']}, {row['cell']}")
    if file is not None:
        file.write_text(json.dumps(facts_now() | {"rows": rows}, indent=1) + "\n")


def rotated(op: str, cell: str) -> Iterator[tuple[str, list[Call], Callable[[], None]]]:
    """The kernel in CUDA C++ that takes the call, calls of it on copies of the data, and what restores those."""
    contract = default_registry.contract(op)
    source = case_set(contract)
    arguments = source.arguments(contract, source.swept()[cell], CUDA)
    signature = source.describe(contract, arguments)
    size = footprint(contract, signature, arguments)
    copies = copies_needed(contract.cost(signature).nbytes, size, cache_bytes(CUDA), torch.cuda.mem_get_info()[0] / 8)
    rotation = Rotation(contract, signature, arguments, copies)
    for kernel in default_registry.kernels(op):
        if kernel.compiler == "nvrtc" and kernel.refusals(platform_of(CUDA), signature)[0]:
            yield kernel.name, rotation.calls(kernel.function), rotation.restore
            return


def both(calls: list[Call], before: list[Callable[[], object]]) -> dict[str, float]:
    """Microseconds a call."""

    def prepare() -> None:
        for each in before:
            each()

    ways: dict[str, AbstractContextManager[None]]
    ways = {"overlapping": nullcontext(), "one after another": one_after_another()}
    times = {}
    for name, way in ways.items():
        with way:
            times[name] = time_calls(calls, CUDA, prepare).us
    return times


if __name__ == "__main__":
    main()
