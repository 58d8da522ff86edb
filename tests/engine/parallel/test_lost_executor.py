"""An executor that failed for good: what waits for it is told at once, and nobody is let in any more."""

from dataclasses import replace

from tests.engine.control.fake import VOCAB, FakeExecutor, FakeTokenizer
from tests.engine.server.running import wait_until
from tests.engine.server.test_engine_thread import CONFIG, Inbox, new
from tokenspeed_engine.control import EngineCore, ExecutorLostError, PendingStep, StepPlan
from tokenspeed_engine.engine_thread import Admitted, EngineClosedError, EngineThread

ONE_AT_A_TIME = replace(CONFIG, max_batch=1, num_slots=1)


class Mortal(FakeExecutor):
    """Fails for good at its third step."""

    steps = 0

    def submit(self, plan: StepPlan) -> PendingStep:
        self.steps += 1
        if self.steps > 2:
            raise ExecutorLostError("rank 1 is gone")
        return super().submit(plan)


def test_it_ends_the_engine_for_all() -> None:
    config = ONE_AT_A_TIME
    thread = EngineThread(EngineCore(config, Mortal(config), vocab_size=VOCAB, tokenizer=FakeTokenizer()))
    inbox, late = Inbox(), Inbox()
    thread.submit([new("runs", 40), new("waits", 4)], inbox)
    assert isinstance(inbox.next(), Admitted)
    last = inbox.outputs()[-1]
    assert (last.request_id, last.error) == ("runs", "ExecutorLostError: rank 1 is gone")
    assert isinstance(inbox.next(), EngineClosedError)
    wait_until(lambda: not thread.healthy)
    thread.submit([new("late", 4)], late)
    assert isinstance(late.next(), EngineClosedError)
    stats = thread.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert (stats.num_free_pages, stats.num_free_slots) == (config.num_pages, config.num_slots)
    thread.close()
