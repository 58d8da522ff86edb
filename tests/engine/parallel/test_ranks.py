"""The parts that ranks have, and how these become a whole."""

import pytest
import torch

from tests.engine.parallel.threads import on_ranks
from tokenspeed_engine.parallel.ranks import ALONE, Ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 12, 97])
def test_parts_follow_one_another(size: int, count: int) -> None:
    parts = [Ranks(rank, size).part(count) for rank in range(size)]
    assert [place for part in parts for place in part] == list(range(count))
    assert max(map(len, parts)) == -(-count // size)
    assert [Ranks(0, size).part(count, rank) for rank in range(size)] == parts


def test_fewer_things_than_ranks_are_copied_to_neighbours() -> None:
    assert [list(Ranks(rank, 4).part_or_copy(2)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [list(Ranks(rank, 2).part_or_copy(6)) for rank in range(2)] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_the_same_on_all_ranks_to_the_bit(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    for shape in ((1, 3), (7, 64), (300, 129)):
        terms = torch.randn(size, *shape, generator=generator).to(dtype)
        sums = on_ranks(size, lambda ranks, terms=terms: ranks.sum(terms[ranks.rank].clone()))  # type: ignore[misc]
        again = on_ranks(size, lambda ranks, terms=terms: ranks.sum(terms[ranks.rank].clone()))  # type: ignore[misc]
        assert all(torch.equal(found, sums[0]) for found in (*sums, *again))
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(sums[0].double(), terms.double().sum(0), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("size", "width"), [(2, 8), (3, 10), (4, 97)])
def test_gathering_parts_of_uneven_width(size: int, width: int) -> None:
    whole = torch.arange(5.0 * width).view(5, width)

    def gather(ranks: Ranks) -> torch.Tensor:
        own = ranks.part(width)
        return ranks.gather(whole[:, own.start : own.stop], width)

    assert all(torch.equal(found, whole) for found in on_ranks(size, gather))


def test_alone_nothing_is_copied() -> None:
    tensor = torch.ones(2, 3)
    assert ALONE.sum(tensor) is tensor
    assert ALONE.gather(tensor, 3) is tensor
    assert ALONE.part(5) == ALONE.part_or_copy(5) == range(5)
