"""Speculative verify of the delta rule: whatever is drafted and accepted, only the accepted tokens leave a trace."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed_kernels.gdn import gdn_decode, gdn_prefill
from tokenspeed_kernels.gdn_speculative import gdn_fold, gdn_verify, gdn_verify_replay
from tokenspeed_registry import ContentError, ShapeError

BATCH, Q_LEN, D = 3, 4, 8
K_HEADS, V_HEADS = 1, 2
SCALE = D**-0.5
Schedule = list[list[int]]
"""How many tokens of each sequence are accepted, round by round."""

SCHEDULES = st.lists(st.lists(st.integers(0, Q_LEN), min_size=BATCH, max_size=BATCH), min_size=1, max_size=7)


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=3e-6)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def drafts(q_len: int = Q_LEN, seed: int = 0, batch: int = BATCH) -> Inputs:
    make = torch.Generator().manual_seed(seed)
    shape = batch, q_len
    steps = torch.tensor([0.0, -0.02, -0.7, -15.0])
    return Inputs(
        q=torch.randn(*shape, K_HEADS, D, generator=make),
        k=torch.randn(*shape, K_HEADS, D, generator=make),
        v=torch.randn(*shape, V_HEADS, D, generator=make),
        g=steps[torch.randint(4, (*shape, V_HEADS), generator=make)],
        beta=torch.rand(*shape, V_HEADS, generator=make),
    )


def states(slots: int) -> Tensor:
    return torch.randn(slots, V_HEADS, D, D, generator=torch.Generator().manual_seed(9))


def commit(inputs: Inputs, state: Tensor, accepted: Sequence[int]) -> list[Tensor]:
    """Plain decode of exactly the accepted tokens, on `state` [batch ...]; returns each sequence's outputs."""
    outputs = []
    for i in range(max(accepted)):
        token = Inputs(*(x[:, i].contiguous() for x in inputs))
        slots = ints(*(b if i < count else -1 for b, count in enumerate(accepted)))
        outputs.append(gdn_decode(*token, state, slots, scale=SCALE, backend="torch"))
    together = torch.stack(outputs, 1) if outputs else torch.zeros(BATCH, 0, V_HEADS, D)
    return [out[:count] for out, count in zip(together, accepted, strict=True)]


class PlainStates:
    """`gdn_verify` with a slot for every position; the engine's part is to remember one slot a sequence."""

    def __init__(self, initial: Tensor) -> None:
        self.state = torch.full((BATCH * (1 + Q_LEN) + 1, *initial.shape[1:]), torch.nan)
        self.slots = torch.arange(BATCH * (1 + Q_LEN), dtype=torch.int32).reshape(BATCH, 1 + Q_LEN)
        self.committed = self.slots[:, 2].clone()
        self.state[self.committed.long()] = initial

    def verify(self, inputs: Inputs) -> Tensor:
        self.into = torch.stack(
            [row[row != slot] for row, slot in zip(self.slots, self.committed, strict=True)]
        ).contiguous()
        return gdn_verify(*inputs, self.state, self.committed, self.into, scale=SCALE, backend="torch")

    def accept(self, accepted: list[int]) -> None:
        for b, count in enumerate(accepted):
            if count:
                self.committed[b] = self.into[b, count - 1]

    def committed_states(self) -> Tensor:
        return self.state[self.committed.long()]


class ReplayedStates:
    """`gdn_verify_replay` with one slot a sequence; the engine's part is to count kept tokens."""

    def __init__(self, initial: Tensor, capacity: int) -> None:
        self.capacity = capacity
        self.slots = ints(4, 0, 2)
        self.state = torch.full((BATCH + 2, *initial.shape[1:]), torch.nan)
        self.state[self.slots.long()] = initial
        self.buffers = tuple(torch.full((BATCH + 2, capacity, *x.shape[2:]), torch.nan) for x in drafts()[1:])
        self.kept = ints(0, 0, 0)

    def verify(self, inputs: Inputs) -> Tensor:
        self.folded = self.kept + inputs.v.shape[1] > self.capacity
        k, v, g, beta = self.buffers
        return gdn_verify_replay(
            *inputs, self.state, k, v, g, beta, self.slots, self.kept, scale=SCALE, backend="torch"
        )

    def accept(self, accepted: Sequence[int]) -> None:
        self.kept = torch.where(self.folded, 0, self.kept) + ints(*accepted)

    def fold(self) -> None:
        k, v, g, beta = self.buffers
        gdn_fold(self.state, k, v, g, beta, self.slots, self.kept, backend="torch")
        self.kept = ints(0, 0, 0)
        for buffer in self.buffers:
            buffer.fill_(math.nan)

    def decode(self, inputs: Inputs) -> Tensor:
        token = Inputs(*(x[:, 0].contiguous() for x in inputs))
        return gdn_decode(*token, self.state, self.slots, scale=SCALE, backend="torch")[:, None]

    def prefill(self, inputs: Inputs, lengths: Sequence[int]) -> Sequence[Tensor]:
        packed = Inputs(*(torch.cat([rows[:n] for rows, n in zip(x, lengths, strict=True)]) for x in inputs))
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        fresh = torch.zeros(BATCH, dtype=torch.bool)
        out = gdn_prefill(*packed, self.state, self.slots, offsets, fresh, scale=SCALE, backend="torch")
        return out.split_with_sizes(list(lengths))

    def committed_states(self) -> Tensor:
        return self.state[self.slots.long()]


def run(scheme: PlainStates | ReplayedStates, initial: Tensor, schedule: Schedule) -> Tensor:
    """Plays a schedule against plain decode. Returns plain decode's final states."""
    plain = initial.clone()
    for round_, accepted in enumerate(schedule):
        inputs = drafts(seed=round_)
        before = plain.clone()
        out = scheme.verify(inputs)
        if isinstance(scheme, ReplayedStates):
            close(scheme.state[scheme.slots.long()][scheme.folded], before[scheme.folded])
        for got, wanted in zip(out, commit(inputs, plain, accepted), strict=True):
            close(got[: wanted.shape[0]], wanted)
        scheme.accept(accepted)
    return plain


@settings(max_examples=15, deadline=None)
@given(schedule=SCHEDULES)
def test_any_schedule_with_a_state_per_position(schedule: Schedule) -> None:
    initial = states(BATCH)
    scheme = PlainStates(initial)
    plain = run(scheme, initial, schedule)
    close(scheme.committed_states(), plain)


@pytest.mark.parametrize("capacity", [Q_LEN, 2 * Q_LEN, 3 * Q_LEN + 1])
@settings(max_examples=15, deadline=None)
@given(schedule=SCHEDULES)
def test_any_schedule_with_replay(capacity: int, schedule: Schedule) -> None:
    initial = states(BATCH)
    scheme = ReplayedStates(initial, capacity)
    plain = run(scheme, initial, schedule)
    # What is kept shows in the next outputs, of which all rows are the decode of the drafts so far.
    inputs = drafts(seed=99)
    for got, wanted in zip(scheme.verify(inputs), commit(inputs, plain, [Q_LEN] * BATCH), strict=True):
        close(got, wanted)


@dataclass(frozen=True)
class Step:
    """A verify of `q_len` drafts, `accepted` of them counting; or a decode of one; or a prefill of `accepted`."""

    kind: Literal["verify", "decode", "prefill", "fold"]
    accepted: tuple[int, ...] = (0, 0, 0)
    q_len: int = 0


def counts(longest: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(0, longest)] * BATCH)


VERIFIES = st.integers(1, Q_LEN).flatmap(lambda q_len: counts(q_len).map(lambda some: Step("verify", some, q_len)))
STEPS = (
    VERIFIES
    | st.sampled_from([Step("decode", (1, 1, 1), 1), Step("fold")])
    | counts(70).map(lambda lengths: Step("prefill", lengths, max(lengths)))
)


def check_mixed(capacity: int, schedule: Sequence[Step]) -> None:
    """Against plain decode of the accepted tokens; kept ones are folded before anything but a verify."""
    plain = states(BATCH)
    scheme = ReplayedStates(plain, capacity)
    for number, step in enumerate(schedule):
        inputs = drafts(step.q_len, seed=number)
        if step.kind != "verify":
            scheme.fold()
            close(scheme.committed_states(), plain)
        got: Sequence[Tensor] | Tensor = []
        if step.kind == "verify":
            got = scheme.verify(inputs)
            scheme.accept(step.accepted)
        elif step.kind == "decode":
            got = scheme.decode(inputs)
        elif step.kind == "prefill":
            got = scheme.prefill(inputs, step.accepted)
        wanted = commit(inputs, plain, step.accepted)
        for mine, theirs in zip(got, wanted, strict=step.kind != "fold"):
            close(mine[: theirs.shape[0]], theirs)
    scheme.fold()
    close(scheme.committed_states(), plain)


@pytest.mark.parametrize("capacity", [Q_LEN, 2 * Q_LEN, 3 * Q_LEN + 1])
@settings(max_examples=15, deadline=None)
@given(schedule=st.lists(STEPS, min_size=1, max_size=7))
def test_any_schedule_of_replay_fold_decode_and_prefill(capacity: int, schedule: list[Step]) -> None:
    check_mixed(capacity, schedule)


@pytest.mark.parametrize("following", [Step("decode", (1, 1, 1), 1), Step("prefill", (5, 0, 66), 66), Step("fold")])
@pytest.mark.parametrize("capacity", [Q_LEN, 2 * Q_LEN])
def test_anything_may_follow_a_verify(capacity: int, following: Step) -> None:
    rounds = [Step("verify", (0, 1, 4), 4), Step("verify", (2, 0, 1), 2)]
    check_mixed(capacity, [*rounds, following, *rounds, following, following])


def test_folding_nothing_and_padding_leaves_the_bits() -> None:
    """Five slots of which one has tokens to fold; none of the buffers changes."""
    state, expected = states(5), states(5)
    expected[0, 0, 0, 0] = math.inf
    state.copy_(expected)
    buffers = k, v, g, beta = [torch.rand(5, Q_LEN, *x.shape[2:]) for x in drafts()[1:]]
    before = [buffer.clone() for buffer in buffers]
    gdn_fold(state, k, v, g, beta, ints(3, 0, -1), ints(2, 0, 4), backend="torch")
    assert not torch.equal(state[3], expected[3])
    others = [0, 1, 2, 4]
    assert torch.equal(state[others], expected[others])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(buffers, before, strict=True))


def test_fold_by_hand() -> None:
    """Two of three kept tokens: decay by half, then k finds 1 and half of what is missing to 3 is written; twice."""
    state = torch.tensor([[[[2.0, 4.0]]]])
    k = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]], [[5.0, 5.0]]]])
    v = torch.full((1, 3, 1, 1), 3.0)
    half = torch.full((1, 3, 1), 0.5)
    gdn_fold(state, k, v, half.log(), half, ints(0), ints(2), normalise=False, backend="torch")
    # [2, 4] → [1, 2] → [2, 2] → [1, 1] → [1, 2]
    close(state, torch.tensor([[[[1.0, 2.0]]]]))


@pytest.mark.parametrize("capacity", [Q_LEN, 2 * Q_LEN, 3 * Q_LEN + 1])
def test_nothing_one_and_everything_accepted_in_one_batch(capacity: int) -> None:
    """Three drafts verified with the last token: 0, 1 and k+1 = 4 of the four count."""
    initial = states(BATCH)
    schedule = [[0, 1, 4], [4, 0, 1], [1, 4, 0], [0, 1, 4], [0, 1, 4]]
    plain_states = PlainStates(initial)
    plain = run(plain_states, initial, schedule)
    close(plain_states.committed_states(), plain)
    run(ReplayedStates(initial, capacity), initial, [*schedule, [4, 4, 4]])


def test_nothing_accepted_leaves_the_committed_state_bit_equal() -> None:
    initial = states(BATCH)
    scheme = PlainStates(initial)
    for seed in range(3):
        scheme.verify(drafts(seed=seed))
        scheme.accept([0, 0, 0])
    assert torch.equal(scheme.committed_states(), initial)
    replay = ReplayedStates(initial, Q_LEN)
    for seed in range(3):
        replay.verify(drafts(seed=seed))
        replay.accept([0, 0, 0])
    assert torch.equal(replay.state[replay.slots.long()], initial)


@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
def test_verify_is_as_many_decodes(q_len: int) -> None:
    inputs, initial = drafts(q_len), states(BATCH)
    pool = torch.cat([initial, torch.full((BATCH * q_len, *initial.shape[1:]), torch.nan)])
    into = torch.arange(BATCH, BATCH * (1 + q_len), dtype=torch.int32).reshape(BATCH, q_len)
    out = gdn_verify(*inputs, pool, ints(0, 1, 2), into, scale=SCALE, backend="torch")
    for count in range(q_len + 1):
        plain = initial.clone()
        wanted = commit(inputs, plain, [count] * BATCH)
        close(out[:, :count], torch.stack(wanted))
        close(pool[into[:, count - 1].long()] if count else pool[:BATCH], plain)


@pytest.mark.parametrize("scheme", ["states", "replay"])
def test_no_row_sees_a_later_one(scheme: str) -> None:
    initial, inputs = states(BATCH), drafts()
    outputs = []
    for huge in (False, True):
        if huge:
            inputs.v[:, 2:] = 1e20
            inputs.k[:, 2:] *= -1
        outputs.append((PlainStates(initial) if scheme == "states" else ReplayedStates(initial, Q_LEN)).verify(inputs))
    assert torch.equal(outputs[0][:, :2], outputs[1][:, :2])
    assert not torch.equal(outputs[0][:, 2:], outputs[1][:, 2:])


def test_a_state_may_be_written_over_the_one_it_started_from() -> None:
    inputs, state = drafts(1), states(5)
    plain = state[:BATCH].clone()
    commit(inputs, plain, [1] * BATCH)
    slots = ints(0, 1, 2)
    gdn_verify(*inputs, state, slots, slots[:, None].contiguous(), scale=SCALE, backend="torch")
    close(state[:BATCH], plain)
    assert torch.equal(state[BATCH:], states(5)[BATCH:])


def test_replay_stores_the_new_tokens_and_nothing_else() -> None:
    """Buffers of 9 rows. With 2 kept, four tokens go to rows 2 to 5, with 6 kept to 0 to 3; nothing else changes."""
    scheme = ReplayedStates(states(BATCH), 9)
    for buffer in scheme.buffers:
        buffer.copy_(torch.rand(buffer.shape))
    wanted = [buffer.clone() for buffer in scheme.buffers]
    scheme.kept = ints(2, 2, 6)
    inputs = drafts()
    scheme.verify(inputs)
    for buffer, expected, new in zip(scheme.buffers, wanted, inputs[1:], strict=True):
        expected[4, 2:6], expected[0, 2:6], expected[2, 0:4] = new
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("kept", [-1, 9])
def test_counts_beyond_the_buffers_are_refused(kept: int) -> None:
    scheme = ReplayedStates(states(BATCH), 8)
    scheme.kept = ints(0, kept, 0)
    with pytest.raises(ContentError, match="kept"):
        scheme.verify(drafts())
    with pytest.raises(ContentError, match="kept"):
        scheme.fold()


def test_buffers_shorter_than_the_drafts_are_refused() -> None:
    with pytest.raises(ShapeError, match="capacity >= q_len"):
        ReplayedStates(states(BATCH), Q_LEN - 1).verify(drafts())


@pytest.mark.parametrize(("initial", "last", "name"), [(9, 2, "initial_slots"), (0, 9, "slots"), (0, -2, "slots")])
def test_slots_outside_the_pool_are_refused(initial: int, last: int, name: str) -> None:
    with pytest.raises(ContentError, match=rf"\b{name}\b"):
        gdn_verify(*drafts(2, batch=1), states(9), ints(initial), ints(1, last)[None], scale=SCALE, backend="torch")
