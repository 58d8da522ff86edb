"""Random models of every feature against transformers, through prefix cache, drafts and preemption together."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine import tiny_deepseek
from tests.engine.tiny import BASE, tiny_checkpoint
from tests.engine.tiny_draft import draft_checkpoint
from tests.engine.whole import Guess, Whole, greedy
from tokenspeed_engine import EngineOptions
from tokenspeed_engine.models.families import Verify

VOCAB = BASE["vocab_size"]
ROOMY = EngineOptions(page_size=8, max_batch=3, max_step_tokens=24, max_context=96)


def tight(**changes: object) -> EngineOptions:
    """Pages for little more than one context."""
    return replace(ROOMY, num_pages=16, prefix_cache=True, overlap=True, **changes)  # type: ignore[arg-type]


def converse(whole: Whole, *, turns: int = 2, count: int = 28) -> None:
    """Three agents that begin alike, each for two turns; what they said is compared."""
    begin = [(7 * i * i + 3 * i) % 90 + 4 for i in range(17)]
    texts = [[*begin, *((5 * i + 11 * agent) % 90 + 4 for i in range(agent * 5 + 1))] for agent in range(3)]
    for turn in range(turns):
        names = [whole.add(text, greedy(count)) for text in texts]
        whole.finish()
        texts = [[*whole.whole_text(name), turn + 4, 9] for name in names]
    whole.check()


def mostly_right(answers: Sequence[Sequence[int]]) -> Guess:
    """Three guesses; every fourth is wrong."""

    def guess(name: str, generated: int) -> list[int]:
        number = int(name[1:])
        known = [*answers[number], 0, 0, 0][generated : generated + 3]
        return [(token + ((number + generated + i) % 4 == 0)) % VOCAB for i, token in enumerate(known)]

    return guess


@pytest.mark.parametrize(
    ("variant", "verify", "buckets"),
    [
        ("default", "replay", True),
        ("default", "states", False),
        ("several_ngram_layers", "replay", False),
        ("two_streams", "states", True),
        ("compress_ratio_2", "replay", True),
    ],
)
def test_a_draft_source_that_is_mostly_right(variant: str, verify: Verify, buckets: bool) -> None:
    plain = Whole(ROOMY, tiny_checkpoint(variant))
    converse(plain)
    answers = [plain.tokens(name) for name in plain.asked]
    whole = Whole(
        tight(num_drafts=3, verify=verify, buckets=buckets, state_interval=16, num_snapshots=2, num_host_snapshots=2),
        draft_checkpoint(variant),
        guess=mostly_right(answers),
        same=tiny_checkpoint(variant),
    )
    converse(whole)
    assert [whole.tokens(name) for name in whole.asked] == answers
    counters = whole.core.counters
    assert counters.preemptions > 0
    assert counters.cached_tokens_device + counters.cached_tokens_host > 0
    assert counters.drafts_proposed / 4 < counters.drafts_accepted < counters.drafts_proposed


def test_a_draft_head_of_random_weights() -> None:
    """Nearly every draft is wrong."""
    whole = Whole(
        tight(num_drafts=4, buckets=True, state_interval=24, num_snapshots=2),
        draft_checkpoint(),
        same=tiny_checkpoint(),
    )
    converse(whole)
    assert whole.core.counters.preemptions > 0
    assert whole.core.counters.drafts_accepted < whole.core.counters.drafts_proposed / 4


@pytest.mark.parametrize("variant", ["default", "no_groups"])
def test_a_model_without_state_goes_on_from_anywhere(variant: str) -> None:
    folder: Path = tiny_deepseek.tiny_checkpoint(variant)
    whole = Whole(tight(buckets=True), folder, tiny_deepseek.hf_logits)
    converse(whole)
    assert whole.core.counters.preemptions > 0
    whole = Whole(replace(ROOMY, prefix_cache=True, num_pages=200), folder, tiny_deepseek.hf_logits)
    (name,) = whole.ask(list(range(40, 70)), count=2)
    text = whole.whole_text(name)
    parted = whole.ask(*([*text[:length], 5] for length in range(1, 30)), count=2)
    assert [whole.cached(name) for name in parted] == list(range(1, 30))
    whole.check()
