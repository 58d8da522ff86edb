"""The gated delta rule: values worked out by hand, chunking, padding, slots, large pools, refused input."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.gdn import gated_rms_norm, gdn_decode, gdn_gates, gdn_prefill
from tokenspeed_kernels.gdn_speculative import gdn_fold, gdn_verify, gdn_verify_replay
from tokenspeed_registry import ContentError, ShapeError

LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129]
K_HEADS, V_HEADS, D = 1, 2, 16


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def close(got: Tensor, wanted: Tensor) -> None:
    """Equal up to float32 roundings of sums of a hundred terms of size one."""
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=5e-6)


def tokens(*shape: int, seed: int = 0) -> Inputs:
    """With gates that change strongly from one token to the next."""
    make = torch.Generator().manual_seed(seed)
    steps = torch.tensor([0.0, 0.0, -0.01, -0.01, -0.01, -0.5, -0.5, -20.0, -3000.0])
    return Inputs(
        q=torch.randn(*shape, K_HEADS, D, generator=make),
        k=torch.randn(*shape, K_HEADS, D, generator=make),
        v=torch.randn(*shape, V_HEADS, D, generator=make),
        g=steps[torch.randint(len(steps), (*shape, V_HEADS), generator=make)],
        beta=torch.rand(*shape, V_HEADS, generator=make),
    )


def rows(inputs: Inputs, index: slice | list[int]) -> Inputs:
    return Inputs(*(x[index].contiguous() for x in inputs))


def pool(slots: int, seed: int = 1) -> Tensor:
    return torch.randn(slots, V_HEADS, D, D, generator=torch.Generator().manual_seed(seed))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill(inputs: Inputs, state: Tensor, slot: int = 0, fresh: bool = False) -> Tensor:
    """One sequence."""
    offsets = ints(0, inputs.v.shape[0])
    return gdn_prefill(*inputs, state, ints(slot), offsets, torch.tensor([fresh]), scale=D**-0.5, backend="torch")


def decode(inputs: Inputs, state: Tensor, slot: int = 0) -> Tensor:
    """One sequence, token by token."""
    out = [
        gdn_decode(*rows(inputs, [t]), state, ints(slot), scale=D**-0.5, backend="torch")
        for t in range(inputs.v.shape[0])
    ]
    return torch.cat(out) if out else torch.zeros_like(inputs.v)


def test_gates_by_hand() -> None:
    a = torch.tensor([[0.0, 1000.0, -1000.0]])
    b = torch.tensor([[0.0, 100.0, -100.0]])
    g, beta = gdn_gates(a, b, torch.zeros(3), torch.zeros(3), backend="torch")
    close(g, torch.tensor([[-math.log(2), -1000.0, 0.0]]))
    close(beta, torch.tensor([[0.5, 1.0, 0.0]]))
    g, _ = gdn_gates(a, b, torch.full((3,), math.log(4)), torch.tensor([math.log(math.e - 1), 0.0, 1000.0]))
    close(g, torch.tensor([[-4.0, -4000.0, -4 * math.log(2)]]))


def test_gates_of_narrow_inputs_are_not_rounded() -> None:
    a, b = (torch.randn(9, 48, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    a_log, dt_bias = torch.randn(48), torch.randn(48)
    narrow = gdn_gates(a, b, a_log, dt_bias, backend="torch")
    wide = gdn_gates(a.float(), b.float(), a_log, dt_bias, backend="torch")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(narrow, wide, strict=True))
    assert not torch.equal(narrow[1], narrow[1].bfloat16().float())


def one_token(normalise: bool, k: list[float]) -> tuple[Tensor, Tensor]:
    state = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    out = gdn_decode(
        torch.tensor([[[1.0, 1.0]]]),
        torch.tensor([[k]]),
        torch.tensor([[[2.0, 4.0]]]),
        torch.tensor([[math.log(0.5)]]),
        torch.tensor([[0.5]]),
        state,
        ints(0),
        scale=2.0,
        normalise=normalise,
        backend="torch",
    )
    return out, state


def test_one_token_by_hand() -> None:
    """Decay first, then the read of what k finds, then the update; the output reads the updated state."""
    out, state = one_token(normalise=False, k=[1.0, 0.0])
    close(state, torch.tensor([[[[1.25, 1.0], [2.75, 2.0]]]]))
    close(out, torch.tensor([[[4.5, 9.5]]]))


def test_normalisation_is_over_the_sum_of_squares() -> None:
    out, state = one_token(normalise=True, k=[3.0, 4.0])
    # k = (0.6, 0.8) finds (1.1, 2.5) in the decayed state; half of what is missing to (2, 4) is written.
    close(state, torch.tensor([[[[0.5 + 0.27, 1 + 0.36], [1.5 + 0.45, 2 + 0.6]]]]))
    close(out, math.sqrt(2) * torch.tensor([[[2.13, 4.55]]]))
    zero, state = one_token(normalise=True, k=[0.0, 0.0])
    assert zero.isfinite().all()
    close(state, torch.tensor([[[[0.5, 1.0], [1.5, 2.0]]]]))


def test_three_value_heads_share_a_key_head() -> None:
    q = k = torch.zeros(1, 16, 2)
    k = k.clone()
    k[0, 5] = 1.0
    state = torch.zeros(1, 48, 2, 2)
    ones = torch.ones(1, 48)
    gdn_decode(q, k, torch.ones(1, 48, 2), -ones, ones, state, ints(0), scale=1.0, backend="torch")
    assert state[0].flatten(1).any(-1).nonzero().flatten().tolist() == [15, 16, 17]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("fresh", [True, False])
def test_prefill_is_the_recurrence(length: int, fresh: bool) -> None:
    inputs = tokens(length, seed=length)
    stepped, chunked = pool(1), pool(1)
    if fresh:
        stepped.zero_()
    wanted = decode(inputs, stepped)
    close(prefill(inputs, chunked, fresh=fresh), wanted)
    close(chunked, stepped)


@pytest.mark.parametrize("cut", [0, 1, 31, 63, 64, 65, 100, 128, 129])
def test_prefill_cut_anywhere_carries_its_state(cut: int) -> None:
    inputs = tokens(129)
    whole, parts = pool(1), pool(1)
    wanted = prefill(inputs, whole)
    got = [prefill(rows(inputs, slice(0, cut)), parts), prefill(rows(inputs, slice(cut, None)), parts)]
    close(torch.cat(got), wanted)
    close(parts, whole)


def test_small_decays_after_a_huge_one_keep_their_digits() -> None:
    """Sums from the chunk's start would be near −30000 here, where float32 has steps of 0.002."""
    inputs = tokens(60)
    inputs.g[:] = -0.03
    inputs.g[0] = -30000.0
    stepped, chunked = pool(1), pool(1)
    wanted = decode(inputs, stepped)
    close(prefill(inputs, chunked), wanted)
    close(chunked, stepped)


def test_packed_sequences_do_not_see_each_other() -> None:
    lengths = [65, 0, 1, 130, 0, 64]
    inputs, state = tokens(sum(lengths)), pool(8)
    slots, fresh = ints(6, 2, 0, 5, 3, 1), torch.tensor([True, False, False, True, True, False])
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    alone = state.clone()
    wanted = [
        prefill(rows(inputs, slice(int(bounds[i]), int(bounds[i + 1]))), alone, int(slots[i]), bool(fresh[i]))
        for i in range(len(lengths))
    ]
    got = gdn_prefill(*inputs, state, slots, bounds.int(), fresh, scale=D**-0.5, backend="torch")
    close(got, torch.cat(wanted))
    close(state, alone)
    assert not state[3].any(), "a fresh sequence without tokens leaves zeros"


@pytest.mark.parametrize("length", [0, 1, 70])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_a_fresh_sequence_does_not_look_at_its_slot(length: int, garbage: float) -> None:
    inputs = tokens(length)
    clean, dirty = torch.zeros(1, V_HEADS, D, D), torch.full((1, V_HEADS, D, D), garbage)
    wanted = prefill(inputs, clean, fresh=True)
    assert torch.equal(prefill(inputs, dirty, fresh=True), wanted)
    assert torch.equal(dirty, clean)


PADDINGS = [[0, 3, -1, -1], [-1, -1, 0, 3], [-1, 3, -1, 0], [0, -1, -1, 3], [-1, -1, -1, -1]]


@pytest.mark.parametrize("slots", PADDINGS)
@pytest.mark.parametrize("op", ["decode", "prefill", "verify", "verify_replay"])
def test_padding_is_neither_read_nor_written(op: str, slots: list[int]) -> None:
    """Five slots; padding rows hold NaN. The others come out as without the padding, and 1, 2, 4 keep their bits."""
    shape = {"decode": (4,), "prefill": (12,)}.get(op, (4, 3))
    inputs, before = tokens(*shape), pool(5)
    real = [i for i, slot in enumerate(slots) if slot >= 0]
    for x in inputs:
        groups = x.view(4, 3, *x.shape[1:]) if op == "prefill" else x
        groups[[i for i in range(4) if i not in real]] = math.nan

    def run(index: list[int], state: Tensor) -> Tensor:
        named = ints(*(slots[i] for i in index))
        if op == "prefill":
            x = Inputs(*(x.view(4, 3, *x.shape[1:])[index].flatten(0, 1) for x in inputs))
            offsets = torch.arange(len(index) + 1, dtype=torch.int32) * 3
            fresh = torch.zeros(len(index), dtype=torch.bool)
            out = gdn_prefill(*x, state, named, offsets, fresh, scale=1.0, backend="torch")
            return out.reshape(len(index), 3, V_HEADS, D)
        x = rows(inputs, index)
        if op == "decode":
            return gdn_decode(*x, state, named, scale=1.0, backend="torch")
        if op == "verify":
            into = torch.full((len(index), 3), -1, dtype=torch.int32)
            into[:, 2] = torch.where(named >= 0, named, 1)
            return gdn_verify(*x, state, named, into, scale=1.0, backend="torch")
        kept_k, kept_v, kept_g, kept_beta = (torch.full((5, 4, *part.shape[2:]), 0.5) for part in x[1:])
        kept = torch.full((len(index),), 2, dtype=torch.int32)
        return gdn_verify_replay(*x, state, kept_k, kept_v, kept_g, kept_beta, named, kept, scale=1.0, backend="torch")

    state, alone = before.clone(), before.clone()
    out = run([0, 1, 2, 3], state)
    assert not out[[i for i in range(4) if i not in real]].any()
    if real:
        close(out[real], run(real, alone))
    close(state, alone)
    untouched = sorted(set(range(5)) - set(slots))
    assert torch.equal(state[untouched], before[untouched])
    assert all(not torch.equal(state[slot], before[slot]) for slot in slots if slot >= 0)


@pytest.mark.parametrize("op", ["decode", "prefill", "verify", "verify_replay"])
def test_slots_past_2_31_elements(op: str) -> None:
    """A pool of more than 4 GiB, of which only the touched pages take memory: the same bits as at low slots."""
    width = 64
    high = 2**31 // (width * width) + 3
    state = torch.empty(high + 2, 1, width, width, dtype=torch.bfloat16)
    make = torch.Generator().manual_seed(0)
    low, far = ints(1, 2), ints(high, high + 1)
    for a, b in zip(low.tolist(), far.tolist(), strict=True):
        state[a] = state[b] = torch.randn(1, width, width, generator=make).bfloat16()
    shape = (2,) if op in ("decode", "prefill") else (2, 1)
    q, k, v = (torch.randn(*shape, 1, width, generator=make) for _ in range(3))
    x = Inputs(q, k, v, torch.full((*shape, 1), -0.5), torch.full((*shape, 1), 0.5))
    outputs = []
    for slots in (low, far):
        if op == "decode":
            out = gdn_decode(*x, state, slots, scale=1.0, backend="torch")
        elif op == "prefill":
            fresh = torch.zeros(2, dtype=torch.bool)
            out = gdn_prefill(*x, state, slots, ints(0, 1, 2), fresh, scale=1.0, backend="torch")
        elif op == "verify":
            out = gdn_verify(*x, state, slots, slots[:, None].contiguous(), scale=1.0, backend="torch")
        else:
            kept_k, kept_v, kept_g, kept_beta = (torch.empty(state.shape[0], *part.shape[1:]) for part in x[1:])
            buffers = kept_k, kept_v, kept_g, kept_beta
            for kept in (0, 1):  # the second call folds what the first one kept, then its own token is folded
                out = gdn_verify_replay(*x, state, *buffers, slots, ints(kept, kept), scale=1.0, backend="torch")
            gdn_fold(state, *buffers, slots, ints(1, 1), backend="torch")
        outputs.append(out)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(state[low.long()], state[far.long()])


def test_gated_norm_by_hand() -> None:
    x = torch.tensor([[[3.0, 4.0]]])
    gate, weight = torch.tensor([[[0.0, math.log(3)]]]), torch.tensor([2.0, 0.5])
    root = math.sqrt(12.5)
    sigmoid = gated_rms_norm(x, gate, weight, eps=0.0, activation="sigmoid", backend="torch")
    close(sigmoid, torch.tensor([[[3 / root * 2 * 0.5, 4 / root * 0.5 * 0.75]]]))
    silu = gated_rms_norm(x, gate, weight, eps=0.0, activation="silu", backend="torch")
    close(silu, torch.tensor([[[0.0, 4 / root * 0.5 * 0.75 * math.log(3)]]]))
    assert not gated_rms_norm(0 * x, gate, weight, eps=1e-6, activation="silu", backend="torch").any()


def test_gated_norm_rounds_once() -> None:
    make = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(5, 48, 128, generator=make).bfloat16() for _ in range(2))
    weight = torch.rand(128, generator=make)
    narrow = gated_rms_norm(x, gate, weight, eps=1e-6, activation="sigmoid", backend="torch")
    wide = gated_rms_norm(x.float(), gate.float(), weight, eps=1e-6, activation="sigmoid", backend="torch")
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("offsets", [(1, 3, 6), (0, 4, 3), (0, 3, 5), (0, 7, 6)])
def test_offsets_that_are_none_are_refused(offsets: tuple[int, ...]) -> None:
    state = pool(2)
    before = state.clone()
    with pytest.raises(ContentError, match="cu_seqlens"):
        gdn_prefill(
            *tokens(6), state, ints(0, 1), ints(*offsets), torch.tensor([True, True]), scale=1.0, backend="torch"
        )
    assert torch.equal(state, before)


def test_slots_outside_the_pool_are_refused() -> None:
    for slot in (2, -2):
        with pytest.raises(ContentError, match="slots"):
            gdn_decode(*tokens(1), pool(2), ints(slot), scale=1.0, backend="torch")
        with pytest.raises(ContentError, match="slots"):
            prefill(tokens(3), pool(2), slot)


def test_heads_that_do_not_divide_are_refused() -> None:
    q, k, v, g, beta = tokens(1)
    q, k = (x.expand(-1, 4, -1).contiguous() for x in (q, k))
    with pytest.raises(ShapeError, match="k_heads=4, v_heads=2"):
        gdn_decode(q, k, v, g, beta, pool(1), ints(0), scale=1.0, backend="torch")
