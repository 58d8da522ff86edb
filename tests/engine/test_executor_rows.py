"""What rows of a step do to one another, to what pads them, and to what is not theirs: nothing."""

import threading

import pytest
import torch

from tests.engine.drive import Driver, Growing
from tests.engine.tiny import tiny_checkpoint
from tests.engine.tiny_draft import draft_checkpoint
from tokenspeed_engine.control import Accepted, Failed, StepPlan
from tokenspeed_engine.models.families import Verify

PROMPT = [(7 * i * i + 3 * i) % 90 + 4 for i in range(21)]


def started(driver: Driver, count: int = 2) -> list[Growing]:
    texts = [driver.start([*PROMPT, 4 + i], 16) for i in range(count)]
    driver.step(prefills=[(text, len(text.tokens)) for text in texts])
    return texts


def accepted(result: Accepted | Failed) -> Accepted:
    assert isinstance(result, Accepted)
    return result


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("verify", ["replay", "states"])
def test_a_row_of_nan_fails_alone(verify: Verify, buckets: bool) -> None:
    """Its neighbours yield what they yield without it, and so does a fresh request on its slot."""
    outcomes = []
    for poisoned in (False, True):
        driver = Driver(tiny_checkpoint(), num_drafts=3, verify=verify, buckets=buckets)
        first, bad, last = started(driver, 3)
        if poisoned:
            for pool in driver.caches.slot_pools:
                pool[:, bad.slot] = torch.nan
        results = driver.step(decodes=[(first, [5, 6]), (bad, [7]), (last, [])])
        assert isinstance(results[1], Failed if poisoned else Accepted)
        again = driver.step(decodes=[(first, [8]), (last, [5, 6, 7])])
        bad.computed, bad.tokens, bad.prompt = 0, [*PROMPT, 50], 22
        afterwards = driver.step(prefills=[(bad, 22)])
        outcomes.append([accepted(result) for result in (results[0], results[2], *again, *afterwards)])
    for plain, beside in zip(*outcomes, strict=True):
        assert plain.tokens == beside.tokens
        # Experts sum in another order where other tokens go to them.
        logprobs = [[entry.logprob for entry in result.logprobs] for result in (plain, beside)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)


@pytest.mark.parametrize("draft_head", [False, True])
@pytest.mark.parametrize("verify", ["replay", "states"])
def test_a_padded_step_touches_own_slots_and_pages_alone(verify: Verify, draft_head: bool) -> None:
    """A ragged batch of three in a bucket of four, with every other slot and page full of NaN."""
    folder = draft_checkpoint() if draft_head else tiny_checkpoint()
    driver = Driver(folder, num_drafts=3, verify=verify, buckets=True, draft_head=draft_head)
    texts = started(driver, 3)
    driver.step(decodes=[(texts[0], [5, 6, 7]), (texts[1], []), (texts[2], [8])])
    slots = {text.slot for text in texts}
    pages = {page for text in texts for page in text.pages}
    places = slots | set(range(driver.sizes.num_slots, 100))  # states beside the slots
    pages |= set(range(driver.sizes.num_pages, 100))  # pages that no plan names
    paged = {pool.data_ptr() for pool in driver.caches.page_pools}
    for pool in driver.caches.tensors():
        written = {row for row in range(pool.shape[1]) if not pool[:, row].isnan().all()}
        assert written <= (pages if pool.data_ptr() in paged else places)


def test_a_fresh_request_takes_over_a_slot_with_drafts_unsettled() -> None:
    """Whatever the slot was ahead of, it counts as empty."""
    for verify in ("replay", "states"):
        driver = Driver(tiny_checkpoint(), num_drafts=3, verify=verify)
        (text,) = started(driver, 1)
        cold = (text.tokens[-1], text.logprobs[-1].logprob)
        for _ in range(3):
            driver.step(decodes=[(text, [5, 6, 7])])
        again = driver.start([*PROMPT, 4], 16)
        again.slot = text.slot
        driver.step(prefills=[(again, 10)])
        driver.step(prefills=[(again, 12)])
        assert again.tokens[-1] == cold[0]
        assert again.logprobs[-1].logprob == pytest.approx(cold[1], abs=1e-5)


def test_submit_returns_while_the_step_runs() -> None:
    """On a CPU too the caller is free until it asks for the result."""
    driver = Driver(tiny_checkpoint())
    text = driver.start(PROMPT, 8)
    running, go_on = threading.Event(), threading.Event()
    forward = driver.model.forward

    def slow(*arguments: object) -> object:
        running.set()
        assert go_on.wait(10)
        return forward(*arguments)  # type: ignore[arg-type]

    driver.model.forward = slow  # type: ignore[assignment, method-assign]
    pending = driver.runner.submit(StepPlan((driver._row(text, text.tokens, decode=False),), 0))
    assert running.wait(10)
    go_on.set()
    (result,) = pending.result().rows
    assert isinstance(result, Accepted)


def test_a_step_that_raises_does_so_where_its_result_is_asked_for() -> None:
    driver = Driver(tiny_checkpoint(), num_drafts=1)
    (text,) = started(driver, 1)
    pending = driver.runner.submit(StepPlan((driver._row(text, [1, 2, 3], decode=True),), 1))
    with pytest.raises(ValueError, match="2 drafts; caches were made for 1"):
        pending.result()

    def broken(*_: object) -> object:
        raise RuntimeError("out of memory")

    driver.model.forward = broken  # type: ignore[assignment, method-assign]
    pending = driver.runner.submit(StepPlan((driver._row(text, [1], decode=True),), 1))
    with pytest.raises(RuntimeError, match="out of memory"):
        pending.result()
