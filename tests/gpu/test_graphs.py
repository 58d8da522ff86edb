"""A captured call replayed after other eager calls, and after its inputs changed in place, equals an eager one."""

import pytest
import torch

import tokenspeed_kernels  # noqa: F401  declares the ops
from tests.gpu.calls import Arguments, copied, model_arguments, run
from tokenspeed_registry import Kernel
from tokenspeed_registry.registry import default_registry

pytestmark = pytest.mark.gpu
KERNELS = [kernel for kernel in default_registry.kernels() if kernel.compiler is not None and kernel.graph_capturable]


def change(arguments: Arguments) -> None:
    """Other numbers in the same places; indices stay."""
    for value in arguments.values():
        if (
            isinstance(value, torch.Tensor)
            and value.is_cuda
            and value.dtype in (torch.bfloat16, torch.float32, torch.half)
        ):
            value.mul_(0.5)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_replay_equals_an_eager_call(kernel: Kernel) -> None:
    contract = default_registry.contract(kernel.op)
    pristine = model_arguments(contract, kernel)
    captured = copied(pristine)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(contract, kernel, copied(pristine))  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(contract, kernel, captured)
    for _ in range(2):
        fresh = copied(pristine)
        change(fresh)
        for name, value in captured.items():
            if isinstance(value, torch.Tensor):
                value.copy_(fresh[name])
        wanted = run(contract, kernel, fresh)  # an eager call between capture and replay
        graph.replay()
        torch.cuda.synchronize()
        for got, expected in zip(results, wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
