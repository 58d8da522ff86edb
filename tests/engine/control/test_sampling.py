"""Each sampling parameter is checked by name."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tokenspeed_engine.control import ControlConfig, SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("temperature", -0.1, ValueError),
        ("temperature", math.nan, ValueError),
        ("temperature", math.inf, ValueError),
        ("temperature", 10**400, ValueError),
        ("temperature", "1", TypeError),
        ("temperature", True, TypeError),
        ("top_k", -1, ValueError),
        ("top_k", 1.0, TypeError),
        ("top_k", True, TypeError),
        ("top_p", 1.01, ValueError),
        ("top_p", -0.01, ValueError),
        ("top_p", math.nan, ValueError),
        ("seed", 1 << 63, ValueError),
        ("seed", 0.5, TypeError),
        ("max_new_tokens", 0, ValueError),
        ("max_new_tokens", None, TypeError),
        ("stop", "abc", TypeError),
        ("stop", ["a"], TypeError),
        ("stop", ("a", ""), ValueError),
        ("stop", ("a", b"b"), TypeError),
        ("stop_token_ids", [1], TypeError),
        ("stop_token_ids", (1, -1), ValueError),
        ("stop_token_ids", (1, "2"), TypeError),
        ("ignore_eos", 1, TypeError),
        ("logprobs", 21, ValueError),
        ("logprobs", -1, ValueError),
        ("logprobs", True, TypeError),
    ],
)
def test_bad_value_names_its_field(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{field}(\[1\])?: expected .*, got "):
        SamplingParams(**{field: value})


def test_extremes_are_taken() -> None:
    params = SamplingParams(temperature=0, top_k=1 << 40, top_p=0, seed=-(1 << 63), logprobs=0, stop_token_ids=(0,))
    assert (params.top_k, params.seed) == (1 << 40, -(1 << 63))
    assert SamplingParams(seed=(1 << 63) - 1, logprobs=20).logprobs == 20


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 0),
        ("num_pages", 0),
        ("num_slots", 0),
        ("max_batch", 0),
        ("max_step_tokens", 3),
        ("max_context", 0),
        ("context_tokens", -1),
        ("num_drafts", -1),
        ("state_interval", -1),
        ("num_snapshots", -1),
        ("num_host_snapshots", -1),
    ],
)
def test_bad_configuration_names_its_field(field: str, value: int) -> None:
    good = ControlConfig(page_size=4, num_pages=4, num_slots=4, max_batch=4, max_step_tokens=4, max_context=8)
    changes: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"^{field}: expected at least "):
        replace(good, **changes)


def test_a_prefix_cache_needs_room_for_snapshots_where_there_is_a_state() -> None:
    good = ControlConfig(page_size=4, num_pages=4, num_slots=4, max_batch=4, max_step_tokens=4, max_context=8)
    assert replace(good, num_snapshots=3).pool_slots == 7
    assert replace(good, prefix_cache=True, has_state=False).pool_slots == 4
    with pytest.raises(ValueError, match=r"^num_snapshots: expected at least 1 for the prefix cache"):
        replace(good, prefix_cache=True)
