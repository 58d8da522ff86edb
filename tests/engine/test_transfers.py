"""States that are settled, copied, sent to the host and back are those of the sequence at exactly that length."""

import itertools

import pytest
import torch

from tests.engine.drive import Driver, Growing, oracle
from tests.engine.forward import CPU
from tests.engine.test_speculation import VOCAB, assert_guessed, cases
from tests.engine.tiny import hf_logits, tiny_checkpoint
from tests.engine.tiny_draft import draft_checkpoint
from tokenspeed_engine.control import CopyPage, CopySlot, Fetch, Offload, Settle, StepPlan
from tokenspeed_engine.control.plan import Transfer
from tokenspeed_engine.execution.ledger import Ledger, Undo
from tokenspeed_engine.models.families import Verify

WAYS = ("in place", "copied", "by the host")


def prompt_and_answer() -> tuple[list[int], list[int]]:
    prompts, answers = cases("default")
    return prompts[-2], answers[-2]


def branch(driver: Driver, text: Growing, length: int, way: str) -> tuple[Growing, list[Transfer]]:
    """A text that goes on from the first `length` tokens of another, which has run further, and how it gets there.

    Whole pages are shared, the last one is copied if the length lies inside.
    """
    whole = length // driver.page_size
    pages = (*text.pages[:whole], *(driver.free_pages.pop() for _ in text.pages[whole:]))
    transfers: list[Transfer] = [Settle(text.slot, length)]
    if length % driver.page_size:
        transfers.append(CopyPage(text.pages[whole], pages[whole]))
    slot = text.slot
    if way != "in place":
        slot = driver.free_slots.pop()
        transfers += [CopySlot(text.slot, slot)] if way == "copied" else [Offload(text.slot, 1), Fetch(1, slot)]
    # The token after them is the same: the draft head's last row has taken it in.
    tokens = [*text.tokens[: length + 1], 60, 7]
    return Growing(tokens, len(tokens), pages, slot, computed=length), transfers


def assert_as_cold(driver: Driver, text: Growing) -> None:
    """Its logprobs are those of one uncached pass over its tokens."""
    logits = hf_logits(tiny_checkpoint(), text.tokens[:-1]).log_softmax(-1)[text.prompt - 1 :]
    wanted = torch.tensor([float(row[token]) for row, token in zip(logits, text.generated, strict=True)])
    got = torch.tensor([entry.logprob for entry in text.logprobs])
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num_drafts", "verify"), [(0, "replay"), (1, "replay"), (4, "replay"), (3, "states")])
def test_a_text_goes_on_from_any_accepted_length(num_drafts: int, verify: Verify, way: str) -> None:
    """Also where fewer tokens of the last row count than the model accepted, as after a stop string."""
    prompt, answer = prompt_and_answer()
    tried = 0
    for steps, fewer in itertools.product((1, 2, 4), range(num_drafts + 1)):
        driver = Driver(tiny_checkpoint(), num_drafts=num_drafts, verify=verify, num_host=2, seed=steps)
        text = driver.start(prompt, len(answer))
        driver.step(prefills=[(text, len(prompt))])
        drafts = oracle(driver, {id(text): answer}, 0.8, VOCAB)
        for _ in range(steps):
            before = text.computed
            driver.step(decodes=[(text, drafts(text))])
        length = text.computed - fewer
        if length <= before:
            continue
        tried += 1
        new, transfers = branch(driver, text, length, way)
        driver.step(prefills=[(new, len(new.tokens) - length)], transfers=transfers)
        answers = {id(new): [0] * 9}
        for _ in range(4):
            driver.step(decodes=[(new, oracle(driver, answers, 0.5, VOCAB)(new))])
        assert_as_cold(driver, new)
    assert tried >= 3


@pytest.mark.parametrize("way", WAYS)
def test_the_draft_head_goes_on_from_any_accepted_length(way: str) -> None:
    """It has guessed further than what was verified; none of that may be left of it."""
    prompts, answers = cases("default")
    compared = 0
    for case, steps, fewer in itertools.product((-2, -1), (1, 2, 3), range(5)):
        prompt, answer = prompts[case], answers[case]
        driver = Driver(draft_checkpoint(), num_drafts=4, draft_head=True, num_host=2)
        text = driver.start(prompt, len(answer) + 8)
        driver.step(prefills=[(text, len(prompt))])
        for _ in range(steps):
            before = text.computed
            driver.step(decodes=[(text, answer[len(text.generated) :][:4])])
        if text.computed - fewer <= before:
            continue
        new, transfers = branch(driver, text, text.computed - fewer, way)
        new.pages += (driver.free_pages.pop(), driver.free_pages.pop())
        driver.step(prefills=[(new, 3)], transfers=transfers)
        for token in range(8):
            compared += assert_guessed(new, 4)
            driver.step(decodes=[(new, [token])])
    assert compared > 100


@pytest.mark.parametrize("way", WAYS)
def test_both_go_on_after_a_copy(way: str) -> None:
    """A snapshot inside a prompt; the one it was taken of, the new one, and rows of both in one step."""
    prompt, answer = prompt_and_answer()
    driver = Driver(draft_checkpoint(), num_drafts=3, draft_head=True, num_host=2)
    text = driver.start(prompt, len(answer))
    driver.step(prefills=[(text, 13)])
    if way == "in place":
        driver.step(transfers=[Settle(text.slot, 13)])
        both = [text]
    else:
        new, transfers = branch(driver, text, 13, way)
        new.tokens, new.prompt = list(prompt), len(prompt)
        driver.step(prefills=[(new, 9), (text, 5)], transfers=transfers)
        both = [text, new]
    driver.step(prefills=[(one, one.prompt - one.computed) for one in both])
    for _ in range(3):
        assert sum(assert_guessed(one, 3) for one in both) > 0
        driver.step(decodes=[(one, one.drafts) for one in both])
    for one in both:
        assert one.generated == answer[: len(one.generated)]
        assert_as_cold(driver, one)


def test_a_step_of_transfers_alone() -> None:
    driver = Driver(tiny_checkpoint(), num_drafts=2)
    text = driver.start(list(range(4, 20)), 8)
    driver.step(prefills=[(text, 16)])
    driver.step(decodes=[(text, [1, 2])])
    before = [pool.clone() for pool in driver.caches.page_pools]
    assert driver.runner.submit(StepPlan((), 0, (Settle(text.slot, text.computed),))).result().rows == ()
    assert all(
        torch.equal(old, new) or new.isnan().any() for old, new in zip(before, driver.caches.page_pools, strict=True)
    )
    for pool in driver.caches.slot_pools:
        assert pool[:, text.slot].isfinite().all()


def test_what_no_slot_holds_is_refused() -> None:
    driver = Driver(tiny_checkpoint(), num_drafts=2)
    text = driver.start(list(range(4, 20)), 8)
    driver.step(prefills=[(text, 16)])
    driver.step(decodes=[(text, [1, 2])])
    other = driver.free_slots[0]
    for transfer, message in (
        (Settle(text.slot, 15), "cannot be at 15"),
        (Settle(text.slot, 16), "cannot be at 16"),
        (Settle(text.slot, 20), "cannot be at 20"),
        (CopySlot(text.slot, other), "not settled"),
        (Settle(other, 3), "holds no state"),
    ):
        with pytest.raises(RuntimeError, match=message):
            driver.runner.submit(StepPlan((), 0, (transfer,))).result()


def test_only_named_slots_and_pages_change() -> None:
    """Of copies and of settling; everything else keeps its bits."""
    driver = Driver(tiny_checkpoint(), num_drafts=3, num_host=1)
    generator = torch.Generator().manual_seed(1)
    for pool in driver.caches.tensors():
        pool.copy_(torch.randn(pool.shape, generator=generator))
    text = driver.start(list(range(4, 20)), 8)
    driver.step(prefills=[(text, 16)])
    driver.step(decodes=[(text, [1, 2])])
    target, page = driver.free_slots[0], driver.free_pages[0]
    before = [pool.clone() for pool in driver.caches.tensors()]
    moves = (Settle(text.slot, text.computed), CopySlot(text.slot, target), CopyPage(text.pages[0], page))
    driver.step(transfers=moves)
    paged = {pool.data_ptr() for pool in driver.caches.page_pools}
    for old, new in zip(before, driver.caches.tensors(), strict=True):
        changed = {row for row in range(old.shape[1]) if not torch.equal(old[:, row], new[:, row])}
        assert changed <= ({page} if new.data_ptr() in paged else {text.slot, target})
    for pool in driver.caches.page_pools:
        assert torch.equal(pool[:, page], pool[:, text.pages[0]])
    for pool in driver.caches.slot_pools:
        assert torch.equal(pool[:, target], pool[:, text.slot])
    assert driver.caches.tensors  # the device is where the pools are
    assert all(pool.device == CPU for pool in driver.caches.tensors())


def test_ledger_of_replayed_tokens() -> None:
    """Kept tokens pile up until a row finds no room, which is when the op folds them."""
    ledger = Ledger("replay", 2, capacity=6, scratch=())
    ledger.settled(4, 10)
    undo = ledger.undo(4, 10)
    assert undo == Undo(0, 0, 4)
    ledger.decode(4, undo, 10, 3, 3)
    undo = ledger.undo(4, 12)
    assert undo == Undo(dropped=1, kept=2, initial=4)
    ledger.decode(4, undo, 12, 2, 3)  # padded to three
    undo = ledger.undo(4, 14)
    assert undo == Undo(dropped=1, kept=4, initial=4)  # two of two, the padding dropped
    ledger.decode(4, undo, 14, 1, 3)  # four and three are more than six: folded
    assert ledger.undo(4, 15) == Undo(dropped=2, kept=1, initial=4)


def test_ledger_of_stored_states() -> None:
    """A slot has places of its own while drafts run, and gives them back when it is settled."""
    ledger = Ledger("states", 2, capacity=6, scratch=(10, 12))
    for slot in (1, 2):
        ledger.settled(slot, 5)
    assert ledger.decode(1, ledger.undo(1, 5), 5, 3, 3) == (1, 12, 13)
    assert ledger.decode(2, ledger.undo(2, 5), 5, 2, 3) == (2, 10, -1)
    assert ledger.undo(1, 7) == Undo(dropped=1, kept=0, initial=12)
    assert ledger.undo(2, 6) == Undo(dropped=2, kept=0, initial=2)
    ledger.settled(1, 7)
    ledger.settled(3, 9)
    assert ledger.decode(3, ledger.undo(3, 9), 9, 3, 3) == (3, 12, 13)


def test_ledger_takes_places_of_a_slot_that_was_freed_with_drafts_unsettled() -> None:
    ledger = Ledger("states", 2, capacity=6, scratch=(10, 12))
    for slot in (1, 2, 3):
        ledger.settled(slot, 5)
        if slot < 3:
            ledger.decode(slot, ledger.undo(slot, 5), 5, 3, 3)
    ledger.running([1, 3])
    assert ledger.decode(3, ledger.undo(3, 5), 5, 3, 3) == (3, 10, 11)  # those of slot 2
    assert ledger.undo(1, 6).initial == 1
    with pytest.raises(RuntimeError, match="slot 2 holds no state"):
        ledger.undo(2, 6)
