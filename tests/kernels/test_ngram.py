"""n-gram hashing and lookup: literal values, segments, chunk boundaries, large tables."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.ngram import ngram_embed, ngram_hash, ngram_lookup
from tokenspeed_kernels.ngram_block import ngram_gate, ngram_inject
from tokenspeed_registry import ArgumentError, ContentError, ShapeError

EOS = 50
# The constants of Qwen3.8-Flash-Next: vocabulary 248,320, three tokens at most, eight heads an order.
MULTIPLIERS = [23703573157769, 20109073645365, 8052911324071]
PRIMES = [
    *(20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077),
    *(20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171),
]
MODEL_EOS = 248044


def _int64(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _hash(
    ids: Sequence[int],
    *,
    context: Sequence[int] = (EOS, EOS),
    multipliers: Sequence[int] = (3, 5, 7),
    moduli: Sequence[int] = (101, 103),
    offsets: Sequence[int] = (0, 101),
    eos: int = EOS,
) -> list[list[int]]:
    """Rows of one sequence."""
    cu_seqlens = torch.tensor([0, len(ids)], dtype=torch.int32)
    before = _int64(context).unsqueeze(0)
    hashing = _int64(multipliers), _int64(moduli), _int64(offsets)
    rows: list[list[int]] = ngram_hash(_int64(ids), before, cu_seqlens, *hashing, eos=eos, backend="torch").tolist()
    return rows


def test_a_text_by_hand() -> None:
    assert _hash([4, 8, 15, 16]) == [[44, 113], [12, 130], [5, 126], [22, 168]]


@pytest.mark.parametrize(("token", "multiplier"), [(1, -(2**61) + 5), (5, 6917529027641081857)])
def test_the_modulo_of_a_negative_product_is_floored(token: int, multiplier: int) -> None:
    # The second product passes 2^63 and wraps to the first.
    assert (token * multiplier + 2**63) % 2**64 - 2**63 == -(2**61) + 5
    assert _hash([token], multipliers=[multiplier, 0], context=[EOS], moduli=[101], offsets=[0]) == [[33]]


def test_products_wrap_at_64_bits() -> None:
    # (2^62 + 1) · 6 = 2^64 + 2^63 + 6, which is 6 − 2^63.
    assert _hash([6], multipliers=[2**62 + 1, 0], context=[EOS], moduli=[1000], offsets=[0]) == [[(6 - 2**63) % 1000]]


def test_rows_of_the_model() -> None:
    offsets = [sum(PRIMES[:i]) for i in range(len(PRIMES))]
    assert offsets[-1] == 300001275
    assert -(-sum(PRIMES) // 128) * 128 == 320001536
    assert max(MULTIPLIERS) * 248319 < 2**63
    text = [0, 248319, 1, MODEL_EOS, 17, 9]
    rows = _hash(
        text,
        context=[MODEL_EOS, MODEL_EOS],
        multipliers=MULTIPLIERS,
        moduli=PRIMES,
        offsets=offsets,
        eos=MODEL_EOS,
    )
    # Heads 0 and 7 (bigrams), 8 and 15 (trigrams), as the reference implementation computes them.
    assert [[row[0], row[7], row[8], row[15]] for row in rows] == [
        [768795, 154856127, 173280301, 304432235],
        [17035305, 148091832, 170263291, 305886554],
        [16280486, 152029436, 169208075, 311336689],
        [2760535, 157703057, 169914061, 318417803],
        [7961118, 144041389, 176216895, 308564037],
        [7765737, 149920966, 164748573, 305319807],
    ]
    for head, (prime, offset) in enumerate(zip(PRIMES, offsets, strict=True)):
        assert all(offset <= row[head] < offset + prime for row in rows)


def test_rows_pass_32_bits() -> None:
    assert _hash([2**40], multipliers=[1, 0], context=[EOS], moduli=[2**41], offsets=[2**45]) == [[2**45 + 2**40]]


def test_eos_blanks_what_is_older_but_sees_its_own_predecessors() -> None:
    one, other = _hash([4, 8, EOS, 15, 16]), _hash([5, 9, EOS, 15, 16])
    assert one[3:] == other[3:]
    assert one[2] != other[2]
    # What follows an EOS hashes as at the start of a text.
    assert one[3:] == _hash([15, 16])


def test_only_eos_in_the_window_blanks() -> None:
    # The token two after an EOS has it as its oldest predecessor; the one three after does not see it at all.
    assert _hash([4, EOS, 8, 15, 16])[4] == _hash([7, 7, 8, 15, 16])[4]


@pytest.mark.parametrize("text", [[4, 8, 15, 16, 23, 42], [4, EOS, 15, EOS, EOS, 42], [EOS, 8, -1, 16, 23, 42]])
def test_a_chunk_boundary_anywhere_changes_nothing(text: list[int]) -> None:
    whole = _hash(text)
    for cut in range(len(text) + 1):
        context = [EOS, EOS, *text[:cut]][-2:]
        assert _hash(text[:cut]) + _hash(text[cut:], context=context) == whole


def test_sequences_do_not_see_each_other() -> None:
    ids = _int64([4, 8, 15, 16, 23])
    context = _int64([[EOS, EOS], [1, 2], [EOS, 3], [8, 9]])
    cu_seqlens = torch.tensor([0, 2, 2, 5, 5], dtype=torch.int32)  # two of them are empty
    rows = ngram_hash(
        ids, context, cu_seqlens, _int64([3, 5, 7]), _int64([101, 103]), _int64([0, 101]), eos=EOS, backend="torch"
    )
    assert rows.tolist() == _hash([4, 8]) + _hash([15, 16, 23], context=[EOS, 3])


def test_padding_gives_no_rows_and_counts_as_eos() -> None:
    rows = _hash([4, -1, 15, 16])
    assert rows[1] == [-1, -1]
    assert rows[2:] == _hash([15, 16])
    assert _hash([15], context=[7, -1]) == _hash([15])
    assert _hash([-1, -1]) == [[-1, -1], [-1, -1]]


def test_padding_rows_read_nothing() -> None:
    table = torch.tensor([[torch.nan, torch.inf], [1.0, 2.0]])
    out = torch.full((2, 4), torch.nan)
    ngram_lookup(_int64([[-1, 1], [-1, -1]]), table, None, dtype=torch.float32, out=out, backend="torch")
    assert out.tolist() == [[0.0, 0.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(("scale", "wanted"), [([0.5], [224.0, 1.0]), ([0.5, 3.0], [224.0, 6.0]), (None, [448.0, 2.0])])
def test_scales_of_a_float8_table(scale: list[float] | None, wanted: list[float]) -> None:
    table = torch.tensor([[448.0], [2.0]]).to(torch.float8_e4m3fn)
    factors = None if scale is None else torch.tensor(scale)
    embedding = ngram_lookup(_int64([[0, 1]]), table, factors, dtype=torch.bfloat16, backend="torch")
    assert embedding.dtype == torch.bfloat16
    assert embedding.tolist() == [wanted]


@pytest.mark.parametrize(("dtype", "elements"), [(torch.float8_e4m3fn, 2**31), (torch.bfloat16, 2**31)])
def test_rows_past_2_to_the_31_elements(dtype: torch.dtype, elements: int) -> None:
    # Pages that nobody writes take no memory, so the table costs a few rows.
    rows = elements // 160 + 20
    table = torch.empty(rows, 160, dtype=dtype)
    picked = [0, rows // 2 + 1, rows - 3, rows - 1]
    small = torch.randn(len(picked), 160).to(dtype)
    for row, values in zip(picked, small, strict=True):
        table[row].copy_(values)
    got = ngram_lookup(_int64([picked]), table, None, dtype=torch.bfloat16, backend="torch")
    wanted = ngram_lookup(_int64([[0, 1, 2, 3]]), small, None, dtype=torch.bfloat16, backend="torch")
    assert torch.equal(got, wanted)


def test_embed_is_the_lookup_of_the_hash() -> None:
    table, scale = torch.randn(204, 4).to(torch.float8_e4m3fn), torch.rand(204)
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    text = _int64([4, EOS, -1, 16]), _int64([[EOS, 9]]), cu_seqlens
    hashing = _int64([3, 5, 7]), _int64([101, 103]), _int64([0, 101])
    embedding = ngram_embed(*text, *hashing, table, scale, eos=EOS, dtype=torch.float16, backend="torch")
    rows = ngram_hash(*text, *hashing, eos=EOS, backend="torch")
    assert torch.equal(embedding, ngram_lookup(rows, table, scale, dtype=torch.float16, backend="torch"))
    assert embedding[2].count_nonzero() == 0


def _gate(x: Tensor, key: Tensor, value: Tensor, **norms: Tensor) -> tuple[Tensor, Tensor]:
    zero = torch.zeros(x.shape[1:], dtype=x.dtype)
    weights = (norms.get(name, zero) for name in ("norm_key", "norm_query", "norm_conv"))
    return ngram_gate(x, key, value, *weights, eps=0.0, backend="torch")


@pytest.mark.parametrize(
    ("key", "gate"),
    [
        ([1.0, 1.0, 1.0, 1.0], 0.8044296),  # a = 4 / sqrt(4), sigmoid(sqrt(2))
        ([-1.0, -1.0, -1.0, -1.0], 0.1955704),
        ([1.0, -1.0, 1.0, -1.0], 0.5),  # sign(0) is 0
    ],
)
def test_gate_by_hand(key: list[float], gate: float) -> None:
    gated, conv_input = _gate(torch.ones(1, 1, 4), torch.tensor([[key]]), torch.tensor([[2.0, -2.0, 0.0, 0.0]]))
    torch.testing.assert_close(gated, torch.tensor([[[2.0, -2.0, 0.0, 0.0]]]) * gate)
    torch.testing.assert_close(conv_input, torch.tensor([[[2**0.5, -(2**0.5), 0.0, 0.0]]]))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_score_is_at_least_a_millionth(sign: float) -> None:
    x, key = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), torch.tensor([[[sign * 1e-8, 1.0, 0.0, 0.0]]])
    gated, _ = _gate(x, key, torch.ones(1, 4))
    torch.testing.assert_close(gated, torch.full((1, 1, 4), 0.5 + sign * 0.00025), atol=1e-7, rtol=0)


def test_streams_gate_by_themselves_with_their_own_norms() -> None:
    x, key = torch.ones(1, 2, 4), torch.ones(1, 2, 4)
    key[0, 1] *= -100.0
    norm_query = torch.zeros(2, 4)
    norm_query[0] = 7.0  # 1 + w = 8: a = 16, sigmoid(4)
    gated, _ = _gate(x, key, torch.ones(1, 4), norm_query=norm_query)
    torch.testing.assert_close(gated[0, :, 0], torch.tensor([0.9820138, 0.1955704]))


def test_a_token_without_ngrams_adds_nothing() -> None:
    zero = torch.zeros(1, 1, 4)
    gated, conv_input = ngram_gate(torch.ones(1, 1, 4), zero, zero[0], *[zero[0]] * 3, eps=1e-6, backend="torch")
    assert gated.count_nonzero() == conv_input.count_nonzero() == 0


def test_inject_rounds_once() -> None:
    # Added one by one, each of the two would be lost to rounding.
    x = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    half_step = torch.full_like(x, 2**-8)
    ngram_inject(x, half_step, half_step.clone(), backend="torch")
    assert x.item() == 1 + 2**-7


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ShapeError, match="history == order-1"):
        _hash([4], context=[EOS])
    with pytest.raises(ShapeError, match=r"heads % \(order-1\) == 0"):
        _hash([4], moduli=[101, 103, 107], offsets=[0, 101, 204])
    with pytest.raises(ContentError, match="moduli"):
        _hash([4], moduli=[101, 0])
    with pytest.raises(ContentError, match="cu_seqlens"):
        ngram_hash(
            _int64([4, 8]),
            _int64([[EOS, EOS]]),
            torch.tensor([0, 1], dtype=torch.int32),
            _int64([3, 5, 7]),
            _int64([101, 103]),
            _int64([0, 101]),
            eos=EOS,
        )
    rows, table = _int64([[0, 1]]), torch.zeros(3, 4)
    with pytest.raises(ContentError, match="rows"):
        ngram_lookup(_int64([[0, 3]]), table, None, dtype=torch.float32)
    with pytest.raises(ShapeError, match=r"scales in \(1, table_rows\)"):
        ngram_lookup(rows, table, torch.ones(2), dtype=torch.float32)
    for dtype in (torch.int32, torch.float64, torch.float8_e4m3fn):
        with pytest.raises(ArgumentError, match="dtype"):
            ngram_lookup(rows, table, None, dtype=dtype)


@pytest.mark.parametrize("scale", [None, "one", "row"])
def test_shards_of_a_table_by_rows_add_up_to_the_whole(scale: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(40, 8, generator=generator).to(torch.float8_e4m3fn)
    scales = {None: None, "one": torch.tensor([0.5]), "row": torch.rand(40, generator=generator)}[scale]
    rows = torch.randint(-1, 40, (50, 4), generator=generator)
    whole = ngram_lookup(rows, table, scales, dtype=torch.float32)
    parts = []
    for first, last in ((0, 13), (13, 14), (14, 40)):
        own = scales[first:last] if scales is not None and scale == "row" else scales
        parts.append(ngram_lookup(rows, table[first:last], own, dtype=torch.float32, first_row=first))
    assert torch.equal(sum(parts[1:], parts[0]), whole)
    with pytest.raises(ContentError, match="table_rows"):
        ngram_lookup(rows[:4], table[:13], None, dtype=torch.float32)
