"""Compile keys hold static dims: forty token counts in a row compile at most as often as there are buckets.

Run with TRITON_INTERPRET=0: kernels are compiled for sm_90a here, and nothing is launched.
"""

from collections import Counter
from typing import Any

import pytest

import tokenspeed_kernels  # noqa: F401  declares the ops
from tokenspeed_kernels.triton.device import bucket, interpreted
from tokenspeed_kernels.triton.interpreter import interpretable
from tokenspeed_registry import known_platform
from tokenspeed_registry.cases import CaseSet, case_set
from tokenspeed_registry.compiled import on_meta
from tokenspeed_registry.registry import default_registry

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(interpreted(), reason="not run: TRITON_INTERPRET must be 0"),
]
COUNTS = range(1, 41)
BUCKETS = len({bucket(count) for count in COUNTS})
SMALL = {"rms_norm", "gdn_decode", "residual_inject", "ngram_hash"}
"""Whose kernels compile in a moment; the others take minutes together."""


def counted(source: CaseSet, count: int) -> dict[str, Any] | None:
    """The first model's parameters at so many tokens; None where the op's cases do not count them."""
    model = dict(next(iter(source.models.values())))
    for axis, value in (
        ("tokens", count),
        ("batch", count),
        ("rows", count),
        ("lengths", (count,)),
        ("new", (1,) * count),
    ):
        if axis in source.axes:
            return {**model, axis: value}
    return None


COUNTED = [op for op, contract in default_registry.contracts.items() if counted(case_set(contract), 1) is not None]
"""The others take lists of sequences, which no one number sizes."""
OPS = [pytest.param(op, marks=() if op in SMALL else pytest.mark.slow) for op in COUNTED]


@pytest.mark.parametrize("op", OPS)
def test_forty_token_counts_compile_no_more_than_buckets(op: str) -> None:
    from tokenspeed_kernels.triton.offline import offline

    contract = default_registry.contract(op)
    source = case_set(contract)
    kernel = next(k for k in default_registry.kernels(op) if k.backend == "triton" and interpretable(k))
    with offline(known_platform("sm_90a")) as launches:
        for count in COUNTS:
            params = counted(source, count)
            assert params is not None
            args, kwargs = on_meta(contract, source.blank(contract, source.case(params)))
            kernel.function(*args, **kwargs)
    compiled = Counter(launch.metadata.name for launch in launches)
    assert compiled
    assert max(compiled.values()) <= BUCKETS, compiled
