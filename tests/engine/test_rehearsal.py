"""A rehearsal names every call that the model then makes."""

from collections.abc import Iterable

import pytest

from tests.engine.drive import Driver, own_drafts, serve
from tests.engine.tiny import tiny_checkpoint
from tests.engine.tiny_draft import draft_checkpoint
from tokenspeed_engine import LLM, SamplingParams
from tokenspeed_engine.control import Settle
from tokenspeed_engine.llm import EMBEDDED_MODEL, EngineOptions
from tokenspeed_engine.rehearsal import rehearse
from tokenspeed_registry import Call, TokenspeedError, trace
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


@pytest.mark.parametrize("buckets", [False, True])
def test_with_drafts_too(buckets: bool) -> None:
    """Every call of ragged rows, of the draft head, and of what a prefix cache moves."""
    rehearsed = rehearse(draft_checkpoint(), max_batch=4, max_step_tokens=32, page_size=8, num_drafts=3)
    driver = Driver(draft_checkpoint(), num_drafts=3, draft_head=True, buckets=buckets)
    with trace() as calls:
        texts = serve(driver, [[5] * 30, [6, 7]], 8, lambda *_: own_drafts)
        driver.step(decodes=[(text, [1] * i) for i, text in enumerate(texts)])
        driver.step(transfers=[Settle(text.slot, text.computed) for text in texts])
    assert {call.op for call in calls} >= {"gdn_verify_replay", "gdn_fold", "causal_conv_prefill", "sparse_attention"}
    missing = variants(calls) - variants(rehearsed)
    assert not missing, missing


def test_a_model_without_a_draft_head_says_so() -> None:
    with pytest.raises(TokenspeedError, match="no draft head to guess 2 tokens with"):
        rehearse(tiny_checkpoint(), num_drafts=2)
