"""How rows of a weight are shared out among warps and blocks: whatever the shape, a block has room for it."""

import pytest

from tokenspeed_cuda.linear.few import BF16, FP8, MOST_INPUTS, NVFP4, Format, Plan, plan

ROOM = 227 * 1024
"""Bytes of shared memory that a block may ask for on Hopper."""
OUTPUTS = 1, 136, 1600, 100_000, 300_000


@pytest.mark.parametrize("form", [BF16, FP8, NVFP4])
def test_every_row_has_a_plan_that_fits(form: Format) -> None:
    chunk = 4 * form.piece
    for inputs in range(form.piece, MOST_INPUTS + 1, chunk):
        for outputs in OUTPUTS:
            for octets in (1, 2):
                how, tiles = plan(form, outputs, inputs, octets), -(-outputs // 16)
                share = -(-inputs // (chunk * how.warps * how.cluster))
                assert 1 <= how.warps <= 32
                assert 1 <= how.depth <= 3
                assert how.resident * how.warps <= 64
                assert how.shared(tiles, octets) * how.resident <= ROOM, (form, inputs, outputs, octets, how)
                # Registers of x alone leave some for weights.
                assert share * octets * form.piece // 2 <= 128


def test_clusters_take_as_many_tiles_each() -> None:
    how = Plan(warps=10, cluster=2, depth=3, resident=1)
    assert how.clusters(640) == 64  # 10 tiles each, where 66 clusters would run at once
    assert how.clusters(7) == 7
    assert how.clusters(15_520) == 264  # 59 tiles each, in four waves


def test_shared_memory_holds_the_warps_sums_twice_and_the_inbox() -> None:
    assert Plan(warps=8, cluster=1, depth=2, resident=2).shared(1536, 1) == 512 * 2 * 2 * 8
    # 72 tiles over 30 clusters are 3 each, of which a block has one at most to add up, from 4 blocks.
    assert Plan(warps=7, cluster=4, depth=1, resident=1).shared(72, 2) == 512 * 2 * (2 * 7 + 4)
