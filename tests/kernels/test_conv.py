"""The causal convolution: values by hand, what the history holds, roll-back of rejected tokens, refused input."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed_kernels.conv import causal_conv_prefill, causal_conv_update
from tokenspeed_registry import ContentError, ShapeError

CHANNELS, WIDTH = 6, 4
BATCH, Q_LEN = 3, 4


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = normal(CHANNELS, WIDTH, seed=7)


def prefill(x: Tensor, state: Tensor, *, slot: int = 0, fresh: bool = False, dilation: int = 1) -> Tensor:
    """One sequence. No activation, whose vectorised form may differ in a bit from the other one."""
    return causal_conv_prefill(
        x,
        WEIGHT,
        state,
        ints(slot),
        ints(0, x.shape[0]),
        torch.tensor([fresh]),
        dilation=dilation,
        activation="none",
        backend="torch",
    )


def update(x: Tensor, state: Tensor, slots: Tensor, *, accepted: Tensor | None = None, dilation: int = 1) -> Tensor:
    return causal_conv_update(
        x, WEIGHT, state, slots, accepted=accepted, dilation=dilation, activation="none", backend="torch"
    )


def test_by_hand() -> None:
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    weight, state = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.full((1, 3, 1), 9.0)
    arguments = x, weight, state, ints(0), ints(0, 5)
    y = causal_conv_prefill(*arguments, torch.tensor([True]), activation="none", backend="torch")
    assert y.flatten().tolist() == [4, 11, 20, 30, 40]
    assert state.flatten().tolist() == [3, 4, 5]
    y = causal_conv_prefill(*arguments, torch.tensor([False]), activation="none", backend="torch")
    assert y.flatten().tolist() == [30, 25, 25, 30, 40]
    y = causal_conv_update(torch.tensor([[[6.0]]]), weight, state, ints(0), activation="none", backend="torch")
    assert y.flatten().tolist() == [3 + 8 + 15 + 24]
    assert state.flatten().tolist() == [4, 5, 6]


def test_dilated_taps_lie_nine_six_three_and_no_tokens_back() -> None:
    impulse = torch.zeros(12, 1)
    impulse[0] = 1.0
    y = causal_conv_prefill(
        impulse,
        torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
        torch.zeros(1, 9, 1),
        ints(0),
        ints(0, 12),
        torch.tensor([True]),
        dilation=3,
        activation="none",
        backend="torch",
    )
    assert y.flatten().tolist() == [4, 0, 0, 3, 0, 0, 2, 0, 0, 1, 0, 0]


def test_the_sum_is_rounded_before_the_activation() -> None:
    x, weight = normal(300, 64).bfloat16(), normal(64, WIDTH, seed=1).bfloat16()
    outputs = {}
    for activation in ("none", "silu"):
        state = torch.zeros(1, 3, 64, dtype=torch.bfloat16)
        outputs[activation] = causal_conv_prefill(
            x, weight, state, ints(0), ints(0, 300), torch.tensor([True]), activation=activation, backend="torch"
        )
    assert torch.equal(outputs["silu"], F.silu(outputs["none"].float()).bfloat16())


@pytest.mark.parametrize("length", [1, 2, 3, 4, 1023, 1024, 1025, 1026, 1027])
@pytest.mark.parametrize("fresh", [True, False])
def test_the_history_is_the_last_inputs(length: int, fresh: bool) -> None:
    x, state = normal(length, CHANNELS), normal(1, 3, CHANNELS, seed=1)
    before = torch.zeros(3, CHANNELS) if fresh else state[0].clone()
    inputs = torch.cat([before, x])
    y = prefill(x, state, fresh=fresh)
    assert torch.equal(state[0], inputs[-3:])
    wanted = F.conv1d(inputs.T[None], WEIGHT[:, None], groups=CHANNELS)[0].T
    torch.testing.assert_close(y, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 8, 9, 10, 19, 20])
def test_cut_anywhere(cut: int, dilation: int) -> None:
    x = normal(20, CHANNELS)
    whole, parts = normal(1, 9, CHANNELS, seed=1), normal(1, 9, CHANNELS, seed=1)
    wanted = prefill(x, whole, dilation=dilation)
    got = torch.cat([prefill(part.contiguous(), parts, dilation=dilation) for part in (x[:cut], x[cut:])])
    assert torch.equal(got, wanted)
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_fresh_sequence_does_not_look_at_its_slot(length: int) -> None:
    x = normal(length, CHANNELS)
    clean, dirty = torch.zeros(1, 3, CHANNELS), torch.full((1, 3, CHANNELS), math.nan)
    assert torch.equal(prefill(x, dirty, fresh=True), prefill(x, clean, fresh=True))
    assert torch.equal(dirty, clean)


@pytest.mark.parametrize("slots", [[0, 3, -1, -1], [-1, -1, 0, 3], [-1, 3, -1, 0], [-1, -1, -1, -1]])
@pytest.mark.parametrize("op", ["prefill", "update", "verify"])
def test_padding_is_neither_read_nor_written(op: str, slots: list[int]) -> None:
    """Five slots; padding rows hold NaN. The others come out as if alone, and 1, 2, 4 keep their bits."""
    history = 3 + 2 * (op == "verify")
    x, state = normal(4, 2, CHANNELS), normal(5, history, CHANNELS, seed=1)
    before, alone = state.clone(), state.clone()
    x[[i for i, slot in enumerate(slots) if slot < 0]] = math.nan
    accepted = ints(1, 2, 0, 1) if op == "verify" else None
    if op == "prefill":
        fresh = torch.zeros(4, dtype=torch.bool)
        y = causal_conv_prefill(
            x.flatten(0, 1),
            WEIGHT,
            state,
            ints(*slots),
            ints(0, 2, 4, 6, 8),
            fresh,
            activation="none",
            backend="torch",
        ).reshape(4, 2, CHANNELS)
    else:
        y = update(x, state, ints(*slots), accepted=accepted)
    for i, slot in enumerate(slots):
        if slot < 0:
            assert not y[i].any()
            continue
        mine = accepted[i : i + 1] if accepted is not None else None
        wanted = update(x[i : i + 1], alone, ints(slot), accepted=mine)
        assert torch.equal(y[i], wanted[0])
    assert torch.equal(state, alone)
    untouched = sorted(set(range(5)) - set(slots))
    assert torch.equal(state[untouched], before[untouched])


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 8, 11])
def test_an_update_of_many_tokens_is_as_many_updates(q_len: int, dilation: int) -> None:
    x, state = normal(BATCH, q_len, CHANNELS), normal(BATCH, 9, CHANNELS, seed=1)
    single = state.clone()
    slots = ints(2, 0, 1)
    wanted = [update(x[:, i : i + 1].contiguous(), single, slots, dilation=dilation) for i in range(q_len)]
    got = update(x, state, slots, dilation=dilation)
    assert torch.equal(got, torch.cat(wanted, 1))
    assert torch.equal(state, single)


def check_schedule(schedule: list[list[int]], dilation: int, extra: int) -> None:
    """Verifies drafts round by round; the plain side convolves the accepted tokens only."""
    reach = (WIDTH - 1) * dilation
    slots = ints(3, 0, 2)
    state = torch.full((5, reach + Q_LEN + extra, CHANNELS), math.nan)
    for b, slot in enumerate(slots.tolist()):
        prefill(normal(2, CHANNELS, seed=50 + b), state, slot=slot, fresh=True, dilation=dilation)
    accepted = [normal(2, CHANNELS, seed=50 + b) for b in range(BATCH)]
    counts = ints(*([Q_LEN] * BATCH))
    for round_, following in enumerate(schedule):
        x = normal(BATCH, Q_LEN, CHANNELS, seed=round_)
        y = update(x, state, slots, accepted=counts, dilation=dilation)
        for b, slot in enumerate(slots.tolist()):
            tokens = torch.cat([accepted[b], x[b]])
            plain = torch.zeros(1, state.shape[1], CHANNELS)
            wanted = prefill(tokens, plain, fresh=True, dilation=dilation)
            assert torch.equal(y[b], wanted[-Q_LEN:])
            assert torch.equal(state[slot], plain[0])
            accepted[b] = tokens[: accepted[b].shape[0] + following[b]]
        counts = ints(*following)


@settings(max_examples=15, deadline=None)
@given(
    schedule=st.lists(st.lists(st.integers(0, Q_LEN), min_size=BATCH, max_size=BATCH), min_size=1, max_size=6),
    dilation=st.sampled_from([1, 3]),
    extra=st.integers(0, 2),
)
def test_any_schedule_leaves_only_the_accepted_tokens(schedule: list[list[int]], dilation: int, extra: int) -> None:
    check_schedule(schedule, dilation, extra)


@pytest.mark.parametrize("dilation", [1, 3])
def test_nothing_one_and_everything_accepted_in_one_batch(dilation: int) -> None:
    """Three drafts verified with the last token: 0, 1 and k+1 = 4 of the four count, not cut to the taps."""
    check_schedule([[0, 1, 4], [4, 0, 1], [1, 4, 0], [0, 1, 4], [0, 0, 4]], dilation, extra=0)


def test_slots_past_2_31_elements() -> None:
    """A pool of more than 4 GiB, of which only the touched pages take memory: the same bits as at low slots."""
    channels = 1024
    high = 2**31 // (3 * channels) + 3
    state = torch.empty(high + 1, 3, channels, dtype=torch.bfloat16)
    x, weight = normal(5, channels).bfloat16(), normal(channels, WIDTH, seed=1).bfloat16()
    state[1] = state[high] = normal(3, channels, seed=2).bfloat16()
    fresh = torch.tensor([False])
    low, far = (
        causal_conv_prefill(x, weight, state, ints(slot), ints(0, 5), fresh, backend="torch") for slot in (1, high)
    )
    assert torch.equal(low, far)
    assert torch.equal(state[1], state[high])
    low, far = (causal_conv_update(x[None], weight, state, ints(slot), backend="torch") for slot in (1, high))
    assert torch.equal(low, far)
    assert torch.equal(state[1], state[high])


@pytest.mark.parametrize(("history", "dilation", "verify"), [(2, 1, False), (8, 3, False), (6, 1, True), (12, 3, True)])
def test_a_history_that_is_too_short_is_refused(history: int, dilation: int, verify: bool) -> None:
    x, state = normal(1, Q_LEN, CHANNELS), torch.zeros(1, history, CHANNELS)
    accepted = ints(1) if verify else None
    with pytest.raises(ShapeError, match="history"):
        update(x, state, ints(0), accepted=accepted, dilation=dilation)
    if not verify:
        with pytest.raises(ShapeError, match="history"):
            prefill(x[0], state, dilation=dilation)
    enough = torch.zeros(1, history + 1, CHANNELS)
    update(x, enough, ints(0), accepted=accepted, dilation=dilation)


@pytest.mark.parametrize("count", [-1, Q_LEN + 1])
def test_accepted_counts_that_cannot_be_are_refused(count: int) -> None:
    state = torch.zeros(1, 7, CHANNELS)
    with pytest.raises(ContentError, match="accepted"):
        causal_conv_update(normal(1, Q_LEN, CHANNELS), WEIGHT, state, ints(0), accepted=ints(count), backend="torch")


@pytest.mark.parametrize("offsets", [(1, 3, 6), (0, 4, 3), (0, 3, 5), (0, 7, 6)])
def test_offsets_that_are_none_are_refused(offsets: tuple[int, ...]) -> None:
    state = torch.zeros(2, 3, CHANNELS)
    with pytest.raises(ContentError, match="cu_seqlens"):
        causal_conv_prefill(
            normal(6, CHANNELS),
            WEIGHT,
            state,
            ints(0, 1),
            ints(*offsets),
            torch.tensor([True, True]),
            backend="torch",
        )
