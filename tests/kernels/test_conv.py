"""The causal convolution: values by hand, what the history holds, roll-back of rejected tokens, refused input."""

import dataclasses
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


def prefill(
    x: Tensor, state: Tensor, *, slot: int = 0, fresh: bool = False, dilation: int = 1, dropped: Tensor | None = None
) -> Tensor:
    """One sequence. No activation, whose vectorised form may differ in a bit from the other one."""
    return causal_conv_prefill(
        x,
        WEIGHT,
        state,
        ints(slot),
        ints(0, x.shape[0]),
        torch.tensor([fresh]),
        dropped=dropped,
        dilation=dilation,
        activation="none",
        backend="torch",
    )


def update(x: Tensor, state: Tensor, slots: Tensor, *, dropped: Tensor | None = None, dilation: int = 1) -> Tensor:
    return causal_conv_update(
        x, WEIGHT, state, slots, dropped=dropped, dilation=dilation, activation="none", backend="torch"
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
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("op", ["prefill", "update"])
def test_padding_is_neither_read_nor_written(op: str, drop: bool, slots: list[int]) -> None:
    """Five slots; padding rows hold NaN. The others come out as if alone, and 1, 2, 4 keep their bits."""
    x, state = normal(4, 2, CHANNELS), normal(5, 5, CHANNELS, seed=1)
    before, alone = state.clone(), state.clone()
    x[[i for i, slot in enumerate(slots) if slot < 0]] = math.nan
    dropped = ints(1, 2, 0, 1) if drop else None
    if op == "prefill":
        fresh = torch.zeros(4, dtype=torch.bool)
        y = causal_conv_prefill(
            x.flatten(0, 1),
            WEIGHT,
            state,
            ints(*slots),
            ints(0, 2, 4, 6, 8),
            fresh,
            dropped=dropped,
            activation="none",
            backend="torch",
        ).reshape(4, 2, CHANNELS)
    else:
        y = update(x, state, ints(*slots), dropped=dropped)
    for i, slot in enumerate(slots):
        if slot < 0:
            assert not y[i].any()
            continue
        mine = dropped[i : i + 1] if dropped is not None else None
        wanted = update(x[i : i + 1], alone, ints(slot), dropped=mine)
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


@dataclasses.dataclass(frozen=True)
class Step:
    """`q_len` tokens for each sequence, of which `accepted` turn out to count; without `q_len` a chunk of a prompt."""

    accepted: tuple[int, ...]
    q_len: int | None = None

    @property
    def rejected(self) -> Tensor:
        return ints(*(0 if self.q_len is None else self.q_len - count for count in self.accepted))


def verify(*accepted: int, q_len: int = Q_LEN) -> Step:
    assert len(accepted) == BATCH
    return Step(accepted, q_len)


def counts(longest: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(0, longest)] * BATCH)


CHUNKS = counts(12).map(Step)
DECODE = verify(1, 1, 1, q_len=1)
VERIFIES = st.integers(1, Q_LEN).flatmap(lambda q_len: counts(q_len).map(lambda accepted: Step(accepted, q_len)))
SCHEDULES = st.lists(CHUNKS | st.just(DECODE) | VERIFIES, min_size=1, max_size=8)


def check_schedule(schedule: list[Step], dilation: int, extra: int = 0) -> None:
    """Step by step against a plain convolution of the accepted tokens alone.

    The history is the shortest that serves the schedule, with `extra` rows more. Rows that are said to stand for
    nothing are NaN before each step, which then shows where they are used.
    """
    slots = ints(3, 0, 2)
    history = (WIDTH - 1) * dilation + max(int(step.rejected.max()) for step in schedule) + extra
    state = torch.full((5, history, CHANNELS), math.nan)
    accepted, true, dropped = [torch.zeros(0, CHANNELS)] * BATCH, [history] * BATCH, ints(0, 0, 0)
    for number, step in enumerate(schedule):
        lengths = step.accepted if step.q_len is None else (step.q_len,) * BATCH
        x = [normal(length, CHANNELS, seed=BATCH * number + b) for b, length in enumerate(lengths)]
        if step.q_len is None or number == 0:
            y = causal_conv_prefill(
                torch.cat(x),
                WEIGHT,
                state,
                slots,
                torch.tensor([0, *lengths]).cumsum(0).int(),
                torch.full((BATCH,), number == 0),
                dropped=dropped,
                dilation=dilation,
                activation="none",
                backend="torch",
            ).split_with_sizes(lengths)
        else:
            y = update(torch.stack(x), state, slots, dropped=dropped, dilation=dilation).unbind()
        for b, slot in enumerate(slots.tolist()):
            tokens = torch.cat([accepted[b], x[b]])
            plain = torch.zeros(1, history, CHANNELS)
            wanted = prefill(tokens, plain, fresh=True, dilation=dilation)
            assert torch.equal(y[b], wanted[accepted[b].shape[0] :])
            left = true[b] - int(dropped[b]) + lengths[b]
            true[b] = min(history, left)
            assert torch.equal(state[slot, history - true[b] :], plain[0, history - true[b] :])
            state[slot, : history - true[b]] = math.nan
            accepted[b] = tokens[: accepted[b].shape[0] + step.accepted[b]]
        dropped = step.rejected


@settings(max_examples=60, deadline=None)
@given(schedule=SCHEDULES, dilation=st.sampled_from([1, 3]), extra=st.integers(0, 2))
def test_any_schedule_leaves_only_the_accepted_tokens(schedule: list[Step], dilation: int, extra: int) -> None:
    check_schedule(schedule, dilation, extra)


@pytest.mark.parametrize("dilation", [1, 3])
def test_nothing_one_and_everything_accepted_in_one_batch(dilation: int) -> None:
    """Three drafts verified with the last token: 0, 1 and k+1 = 4 of the four count, not cut to the taps."""
    accepted = [(4, 4, 4), (0, 1, 4), (4, 0, 1), (1, 4, 0), (0, 1, 4), (0, 0, 4)]
    check_schedule([verify(*counts) for counts in accepted], dilation)


@pytest.mark.parametrize("following", [Step((5, 0, 1)), DECODE, verify(1, 2, 0, q_len=2), verify(8, 0, 3, q_len=8)])
@pytest.mark.parametrize("dilation", [1, 3])
def test_a_step_of_any_kind_may_follow_a_verify(following: Step, dilation: int) -> None:
    prompt, drafts = Step((2, 11, 0)), verify(0, 1, 4)
    check_schedule([prompt, drafts, following, drafts, following, DECODE, DECODE], dilation)


def test_what_a_history_holds_after_rows_were_dropped() -> None:
    """By hand. Fewer tokens than were dropped: zeros at the old end. No tokens: the dropped rows are gone."""
    x, state = torch.arange(1.0, 11).unsqueeze(-1), torch.zeros(1, 7, 1)
    weight, slots = torch.ones(1, 4), ints(0)

    def chunk(tokens: Tensor, fresh: bool, dropped: Tensor | None = None) -> list[float]:
        bounds = ints(0, len(tokens))
        y = causal_conv_prefill(
            tokens,
            weight,
            state,
            slots,
            bounds,
            torch.tensor([fresh]),
            dropped=dropped,
            activation="none",
            backend="torch",
        )
        return y.flatten().tolist()

    def drafts(tokens: Tensor, dropped: Tensor | None = None) -> list[float]:
        y = causal_conv_update(tokens[None], weight, state, slots, dropped=dropped, activation="none", backend="torch")
        return y.flatten().tolist()

    chunk(x[:5], fresh=True)
    assert state.flatten().tolist() == [0, 0, 1, 2, 3, 4, 5]
    drafts(x[5:9])
    assert state.flatten().tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert drafts(x[9:], dropped=ints(4)) == [3 + 4 + 5 + 10]
    assert state.flatten().tolist() == [0, 0, 0, 3, 4, 5, 10]
    assert chunk(x[:0], fresh=False, dropped=ints(1)) == []
    assert state.flatten().tolist() == [0, 0, 0, 0, 3, 4, 5]
    assert chunk(x[:5], fresh=True, dropped=ints(4)) == [1, 3, 6, 10, 14], "where fresh, nothing is there to drop"


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


@pytest.mark.parametrize(("history", "dilation"), [(2, 1), (8, 3)])
def test_a_history_that_is_too_short_is_refused(history: int, dilation: int) -> None:
    x, state = normal(1, Q_LEN, CHANNELS), torch.zeros(1, history, CHANNELS)
    with pytest.raises(ShapeError, match="history"):
        update(x, state, ints(0), dilation=dilation)
    with pytest.raises(ShapeError, match="history"):
        prefill(x[0], state, dilation=dilation)
    update(x, torch.zeros(1, history + 1, CHANNELS), ints(0), dilation=dilation)


@pytest.mark.parametrize("count", [-1, 5])
@pytest.mark.parametrize("dilation", [1, 3])
def test_counts_that_leave_too_little_history_are_refused(count: int, dilation: int) -> None:
    """4 rows can be dropped, whatever the length of this call and of the one before."""
    x, state = normal(1, 2, CHANNELS), normal(1, 3 * dilation + 4, CHANNELS)
    before = state.clone()
    refused = rf"dropped.*history-\(width-1\)\*dilation=4.*{count}"
    with pytest.raises(ContentError, match=refused):
        update(x, state, ints(0), dropped=ints(count), dilation=dilation)
    with pytest.raises(ContentError, match=refused):
        prefill(x[0], state, dropped=ints(count), dilation=dilation)
    assert torch.equal(state, before)
    update(x, state, ints(0), dropped=ints(4), dilation=dilation)


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
