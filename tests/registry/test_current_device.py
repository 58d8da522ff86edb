"""With several devices, a compiled kernel runs with that of its tensors current."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tokenspeed_registry import Kernel
from tokenspeed_registry.current_device import launcher

FIRST = torch.device("cuda", 0)
SECOND = torch.device("cuda", 1)


def test_the_tensors_device_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current, ran_on = [0], []

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    kernel = Kernel("mine.op", "op", "mine", lambda scale, x: ran_on.append(current[0]), compiler="triton")
    run = launcher(kernel, 1)
    for where in (FIRST, SECOND, torch.device("cpu")):
        run(1.0, SimpleNamespace(device=where))
    assert ran_on == [0, 1, 0]
    assert current == [0]


@pytest.mark.parametrize(("devices", "compiler"), [(1, "triton"), (8, None)])
def test_where_nothing_can_be_wrong_nothing_is_wrapped(
    devices: int, compiler: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    kernel = Kernel("mine.op", "op", "mine", lambda x: x, compiler=compiler)
    assert launcher(kernel, 0) is kernel.function
