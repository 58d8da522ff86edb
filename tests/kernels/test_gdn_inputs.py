"""Convolution and gates in one op: what the two ops would give, and nothing for padding."""

import math

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.conv import causal_conv_prefill, causal_conv_update
from tokenspeed_kernels.gdn import gdn_gates
from tokenspeed_kernels.gdn_inputs import gdn_inputs_prefill, gdn_inputs_update
from tokenspeed_registry import ContentError, ShapeError

CHANNELS, HEADS, WIDTH = 6, 3, 4
SLOTS = [[0, 3, 1], [-1, 2, -1], [4, -1, 0], [-1, -1, -1]]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHT, A_LOG, DT_BIAS = normal(CHANNELS, WIDTH, seed=7), normal(HEADS, seed=8), normal(HEADS, seed=9)


def projections(*tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, a and b as slices of one product, as a model has them."""
    joint = normal(*tokens, CHANNELS + 2 * HEADS)
    x, a, b = joint.split_with_sizes([CHANNELS, HEADS, HEADS], -1)
    return x, a, b


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("dropped", [None, ints(0, 2, 1)])
def test_an_update_is_convolution_and_gates(slots: list[int], dropped: Tensor | None) -> None:
    x, a, b = projections(3, 2)
    state = normal(5, 5, CHANNELS, seed=1)
    apart = state.clone()
    wanted = causal_conv_update(x, WEIGHT, apart, ints(*slots), dropped=dropped, backend="torch")
    gates = gdn_gates(a.flatten(0, 1), b.flatten(0, 1), A_LOG, DT_BIAS, backend="torch")
    padding = torch.tensor(slots) < 0
    for part in (x, a, b):
        part[padding] = math.nan
    y, g, beta = gdn_inputs_update(
        x, a, b, WEIGHT, state, ints(*slots), A_LOG, DT_BIAS, dropped=dropped, backend="torch"
    )
    assert torch.equal(y, wanted)
    assert torch.equal(state, apart)
    for got, gate in zip((g, beta), gates, strict=True):
        assert torch.equal(got, torch.where(padding[:, None, None], 0.0, gate.view_as(got)))


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("dropped", [None, ints(0, 2, 1)])
def test_a_prefill_is_convolution_and_gates(slots: list[int], dropped: Tensor | None) -> None:
    x, a, b = projections(9)
    bounds, fresh = ints(0, 5, 5, 9), torch.tensor([True, False, False])
    state = normal(5, 5, CHANNELS, seed=1)
    apart = state.clone()
    wanted = causal_conv_prefill(x, WEIGHT, apart, ints(*slots), bounds, fresh, dropped=dropped, backend="torch")
    gates = gdn_gates(a, b, A_LOG, DT_BIAS, backend="torch")
    padding = (ints(*slots) < 0).repeat_interleave(bounds.diff())
    for part in (x, a, b):
        part[padding] = math.nan
    y, g, beta = gdn_inputs_prefill(
        x, a, b, WEIGHT, state, ints(*slots), bounds, fresh, A_LOG, DT_BIAS, dropped=dropped, backend="torch"
    )
    assert torch.equal(y, wanted)
    assert torch.equal(state, apart)
    for got, gate in zip((g, beta), gates, strict=True):
        assert torch.equal(got, torch.where(padding[:, None], 0.0, gate))


def test_histories_and_counts_that_do_not_fit_are_refused() -> None:
    x, a, b = projections(1, 2)
    with pytest.raises(ShapeError, match="history"):
        gdn_inputs_update(x, a, b, WEIGHT, torch.zeros(1, 2, CHANNELS), ints(0), A_LOG, DT_BIAS)
    with pytest.raises(ContentError, match="dropped"):
        gdn_inputs_update(x, a, b, WEIGHT, torch.zeros(1, 4, CHANNELS), ints(0), A_LOG, DT_BIAS, dropped=ints(2))
