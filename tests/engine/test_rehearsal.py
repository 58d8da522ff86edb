"""A rehearsal names every call that the model then makes."""

from collections.abc import Iterable

from tokenspeed_engine import LLM, SamplingParams
from tokenspeed_engine.llm import EMBEDDED_MODEL, EngineOptions
from tokenspeed_engine.rehearsal import rehearse
from tokenspeed_registry import Call, trace
from tokenspeed_registry.variant import variant_of


def variants(calls: Iterable[Call]) -> set[tuple[str, str]]:
    """What a kernel is compiled for: op, static dims, dtypes, flags, optional tensors."""
    found = set()
    for call in calls:
        assert call.contract is not None
        found.add((call.op, f"{variant_of(call.contract, call.signature)} {sorted(call.signature.present)}"))
    return found


def test_a_rehearsal_names_every_variant_that_generation_calls() -> None:
    rehearsed = rehearse(EMBEDDED_MODEL, max_batch=4, max_step_tokens=32, page_size=16)
    llm = LLM(options=EngineOptions(dtype="bfloat16", page_size=16, max_step_tokens=32))
    with trace() as calls:
        llm.generate(["a first prompt", "another one, somewhat longer"], SamplingParams(max_new_tokens=4, logprobs=1))
    assert {call.op for call in calls} <= {call.op for call in rehearsed}
    missing = variants(calls) - variants(rehearsed)
    assert not missing, missing
