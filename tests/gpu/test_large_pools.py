"""Past 4 GiB and past 2^31 elements: the same data at high and at low places gives the same bits."""

import pytest
import torch

from tests.gpu.calls import CUDA
from tokenspeed_kernels import gdn, mla, ngram

pytestmark = pytest.mark.gpu
PAGE, ROW = 64, 576
HIGH_PAGE = (1 << 31) // (PAGE * ROW) + 1
"""The first page that lies past 2^31 elements, and 4 GiB."""


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def test_mla_reads_and_writes_high_pages() -> None:
    cache = torch.empty(HIGH_PAGE + 16, PAGE, ROW, dtype=torch.bfloat16, device=CUDA)
    low = torch.arange(8, dtype=torch.int32, device=CUDA)
    cache[:8] = normal(8, PAGE, ROW)
    cache[HIGH_PAGE : HIGH_PAGE + 8] = cache[:8]
    q, lengths = normal(2, 1, 16, ROW), torch.tensor([200, 256], dtype=torch.int32, device=CUDA)
    results = [
        mla.mla_decode(q, cache, (low + first).view(2, 4), lengths, latent=512, scale=192**-0.5, backend="triton")
        for first in (0, HIGH_PAGE)
    ]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    latent, k_rope = normal(5, 512), normal(5, 64)
    slots = torch.tensor([1, 70, 3, 400, 511], device=CUDA)
    for first in (0, HIGH_PAGE):
        mla.mla_cache_write(latent, k_rope, slots + first * PAGE, cache, backend="triton")
    assert torch.equal(cache[:8], cache[HIGH_PAGE : HIGH_PAGE + 8])


def test_gdn_state_pools_past_2_31_elements() -> None:
    heads, width = 48, 128
    high = (1 << 31) // (heads * width * width) + 3
    state = torch.empty(high + 4, heads, width, width, device=CUDA)
    state[:4] = normal(4, heads, width, width, dtype=torch.float32) * 0.1
    state[high : high + 4] = state[:4]
    q, k, v = normal(3, 16, width), normal(3, 16, width), normal(3, heads, width)
    g, beta = -torch.rand(3, heads, device=CUDA), torch.rand(3, heads, device=CUDA)
    slots = torch.tensor([2, 0, 3], dtype=torch.int32, device=CUDA)
    outputs = [
        gdn.gdn_decode(q, k, v, g, beta, state, slots + first, scale=width**-0.5, backend="triton")
        for first in (0, high)
    ]
    assert torch.equal(*outputs)
    assert torch.equal(state[:4], state[high : high + 4])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_ngram_tables_past_2_31_elements(dtype: torch.dtype) -> None:
    width = 160
    high = (1 << 31) // width + 7
    table = torch.empty(high + 64, width, dtype=dtype, device=CUDA)
    table[:64] = normal(64, width).to(dtype)
    table[high:] = table[:64]
    rows = torch.randint(0, 64, (33, 16), device=CUDA)
    low, far = (
        ngram.ngram_lookup(rows + first, table, None, dtype=torch.bfloat16, backend="triton") for first in (0, high)
    )
    assert torch.equal(low, far)


def test_packed_sequences_past_2_31_elements() -> None:
    """The last sequence of a packed batch equals itself alone."""
    heads, width = 48, 128
    tokens = (1 << 31) // (heads * width) + 300
    q, k = normal(tokens, 16, width), normal(tokens, 16, width)
    v = normal(tokens, heads, width)
    g, beta = -torch.rand(tokens, heads, device=CUDA), torch.rand(tokens, heads, device=CUDA)
    tail = 200
    states = torch.zeros(2, heads, width, width, device=CUDA)
    slots = torch.tensor([0, 1], dtype=torch.int32, device=CUDA)
    bounds = torch.tensor([0, tokens - tail, tokens], dtype=torch.int32, device=CUDA)
    fresh = torch.ones(2, dtype=torch.bool, device=CUDA)
    scale = width**-0.5
    whole = gdn.gdn_prefill(q, k, v, g, beta, states, slots, bounds, fresh, scale=scale, backend="triton")
    alone_state = torch.zeros(1, heads, width, width, device=CUDA)
    q, k, v, g, beta = (x[-tail:].contiguous() for x in (q, k, v, g, beta))
    bounds = bounds[-2:] - (tokens - tail)
    alone = gdn.gdn_prefill(q, k, v, g, beta, alone_state, slots[:1], bounds, fresh[:1], scale=scale, backend="triton")
    assert torch.equal(whole[-tail:], alone)
    assert torch.equal(states[1], alone_state[0])
