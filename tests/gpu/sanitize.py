"""What compute-sanitizer watches: every portable kernel once, at a model's static dims and small sizes.

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize SHARED

`SHARED` names those that share memory across warps: products and reductions over several warps.
"""

import sys

import torch

import tokenspeed_kernels  # noqa: F401  declares the ops
from tests.gpu.calls import model_arguments, run
from tokenspeed_registry.registry import default_registry


def main(ops: list[str]) -> None:
    names = ops or sorted(default_registry.contracts)
    for op in names:
        contract = default_registry.contract(op)
        arguments = model_arguments(contract)
        for kernel in default_registry.kernels(op):
            if kernel.backend == "triton":
                run(contract, kernel, arguments)
                torch.cuda.synchronize()
                print(kernel.name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
