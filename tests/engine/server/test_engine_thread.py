"""The engine's thread over a fake model: what crosses into it and out of it, and what cannot end it."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.engine.control.fake import VOCAB, FakeExecutor, FakeTokenizer, expected_tokens
from tests.engine.server.running import Gate, wait_until
from tokenspeed_engine.control import ControlConfig, EngineCore, RequestOutput, RequestRefusedError, SamplingParams
from tokenspeed_engine.engine_thread import (
    Admitted,
    EngineClosedError,
    EngineStepError,
    EngineThread,
    Event,
    NewRequest,
)

CONFIG = ControlConfig(page_size=4, num_pages=24, num_slots=4, max_batch=4, max_step_tokens=8, max_context=64)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class Inbox:
    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events.put(event)

    def next(self) -> Event:
        return self.events.get(timeout=20)

    def outputs(self) -> list[RequestOutput]:
        """All outputs up to the last one of one request."""
        outputs = []
        while True:
            event = self.next()
            assert isinstance(event, RequestOutput)
            outputs.append(event)
            if event.finish_reason is not None:
                return outputs


class Engine:
    def __init__(self, config: ControlConfig) -> None:
        self.gate = Gate(FakeExecutor(config))
        self.core = EngineCore(config, self.gate, vocab_size=VOCAB, tokenizer=FakeTokenizer())
        self.thread = EngineThread(self.core)

    def is_free(self) -> bool:
        stats = self.thread.stats
        free = stats.num_free_pages == CONFIG.num_pages and stats.num_free_slots == CONFIG.num_slots
        return free and not stats.num_running and not stats.num_waiting

    def check_serves(self) -> None:
        """A request is answered with the model's tokens, and everything is free after it."""
        inbox = Inbox()
        self.thread.submit([new("check", 4)], inbox)
        assert isinstance(inbox.next(), Admitted)
        tokens = [token for output in inbox.outputs() for token in output.token_ids]
        assert tokens == expected_tokens(PROMPT, SamplingParams(temperature=0), 0, 4)
        wait_until(self.is_free)


@pytest.fixture(params=[False, True], ids=["alternating", "overlapping"])
def engine(request: pytest.FixtureRequest) -> "Engine":
    return Engine(replace(CONFIG, overlap=request.param))


def new(name: str, count: int, prompt: Sequence[int] = PROMPT) -> NewRequest:
    return NewRequest(name, prompt, SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True))


def test_requests_are_admitted_together_and_answered(engine: Engine) -> None:
    inbox = Inbox()
    engine.thread.submit([new("a", 5), new("b", 7)], inbox)
    assert isinstance(inbox.next(), Admitted)
    outputs = inbox.outputs() + inbox.outputs()
    wanted = expected_tokens(PROMPT, SamplingParams(temperature=0), 0, 7)
    for name, count in (("a", 5), ("b", 7)):
        assert [t for o in outputs if o.request_id == name for t in o.token_ids] == wanted[:count]
    engine.thread.close()


def test_one_refused_request_takes_those_beside_it_along(engine: Engine) -> None:
    inbox = Inbox()
    engine.thread.submit([new("a", 5), new("b", 5, [])], inbox)
    assert isinstance(inbox.next(), RequestRefusedError)
    engine.check_serves()
    assert inbox.events.empty()
    assert all(row.request_id == "check" for plan in engine.gate.plans for row in plan.rows)
    engine.thread.close()


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5], ids=["first chunk", "second chunk", "first decode", "decode"])
def test_an_abort_during_a_step_frees_everything_before_the_next(engine: Engine, steps_before: int) -> None:
    inbox = Inbox()
    with engine.gate.held():
        engine.thread.submit([new("a", 20)], inbox)
        for _ in range(steps_before):
            engine.gate.wait_for_step()
            engine.gate.step()
        engine.gate.wait_for_step()
        assert len(engine.gate.plans) == steps_before + 1
        engine.thread.abort(["a"])
        engine.gate.step()
        wait_until(engine.is_free)
    assert len(engine.gate.plans) == steps_before + 1
    engine.check_serves()
    assert all(event.finish_reason is None for event in inbox.events.queue if isinstance(event, RequestOutput))
    engine.thread.close()


def test_an_executor_that_raises_ends_its_requests_and_nothing_else(engine: Engine) -> None:
    inbox = Inbox()
    engine.gate.failure = RuntimeError("device lost")
    engine.thread.submit([new("a", 5)], inbox)
    assert isinstance(inbox.next(), Admitted)
    (output,) = inbox.outputs()
    assert output.finish_reason == "error"
    assert output.error == "RuntimeError: device lost"
    engine.gate.failure = None
    engine.check_serves()
    engine.thread.close()


def test_a_control_plane_that_raises_ends_its_requests_and_the_thread_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox()
    with monkeypatch.context() as patch:
        patch.setattr(engine.core.scheduler, "accept", _raise)
        engine.thread.submit([new("a", 5)], inbox)
        assert isinstance(inbox.next(), Admitted)
        error = inbox.next()
        assert isinstance(error, EngineStepError)
        assert "planted" in str(error)
        wait_until(engine.is_free)
    assert engine.thread.healthy
    engine.check_serves()
    engine.thread.close()


@pytest.mark.parametrize("owner", ["executor", "scheduler"])
def test_what_is_no_exception_does_not_end_the_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    inbox = Inbox()
    place, name = (engine.gate, "submit") if owner == "executor" else (engine.core.scheduler, "accept")
    with monkeypatch.context() as patch:
        patch.setattr(place, name, _panic)
        engine.thread.submit([new("a", 5)], inbox)
        assert isinstance(inbox.next(), Admitted)
        assert isinstance(inbox.next(), EngineStepError)
        wait_until(engine.is_free)
    engine.check_serves()
    engine.thread.close()


def test_a_core_that_cannot_even_give_up_is_unhealthy_and_answers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Inbox(), Inbox()
    monkeypatch.setattr(engine.core, "step", _raise)
    monkeypatch.setattr(engine.core, "abort", _raise)
    engine.thread.submit([new("a", 5)], first)
    assert isinstance(first.next(), Admitted)
    assert isinstance(first.next(), EngineStepError)
    wait_until(lambda: not engine.thread.healthy)
    engine.thread.submit([new("b", 5)], second)
    assert isinstance(second.next(), EngineClosedError)
    engine.thread.close()


def test_a_receiver_that_raises_loses_its_requests_only(engine: Engine) -> None:
    inbox = Inbox()
    with engine.gate.held():
        engine.thread.submit([new("a", 20)], _raise)
        engine.thread.submit([new("b", 3)], inbox)
    assert isinstance(inbox.next(), Admitted)
    assert inbox.outputs()[-1].finish_reason == "length"
    wait_until(engine.is_free)
    engine.check_serves()
    engine.thread.close()


def test_close_tells_those_who_wait_and_refuses_those_who_come(engine: Engine) -> None:
    inbox = Inbox()
    with engine.gate.held():
        engine.thread.submit([new("a", 50)], inbox)
        engine.gate.wait_for_step()
        closing = threading.Thread(target=engine.thread.close)
        closing.start()
        wait_until(lambda: not engine.thread.healthy)
    closing.join()
    engine.thread.close()
    events = list(inbox.events.queue)
    assert isinstance(events[-1], EngineClosedError)
    assert engine.is_free()
    assert not engine.thread.healthy
    with pytest.raises(EngineClosedError):
        engine.thread.submit([new("b", 1)], inbox)


class Panic(BaseException):
    pass


def _panic(*arguments: object) -> None:
    raise Panic("planted")


def _raise(*arguments: object) -> None:
    raise RuntimeError("planted")
