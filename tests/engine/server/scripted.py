"""A server whose model says what a test wants it to say."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.engine.server.running import RunningServer
from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.control import Accepted, PendingStep, Row, StepPlan, StepResult
from tokenspeed_engine.llm import EngineOptions
from tokenspeed_engine.server.options import ServerOptions


class Scripted:
    """An executor that gives every request the same tokens, then the end token."""

    def __init__(self, end: int) -> None:
        self.script: list[int] = []
        self._end = end

    def submit(self, plan: StepPlan) -> PendingStep:
        return _Done(StepResult(tuple(Accepted(self._next(row)) for row in plan.rows)))

    def _next(self, row: Row) -> tuple[int, ...]:
        if row.sample is None:
            return ()
        return ((*self.script, self._end)[min(row.sample.index, len(self.script))],)


class _Done:
    def __init__(self, found: StepResult) -> None:
        self._found = found

    def result(self) -> StepResult:
        return self._found


class ScriptedServer(RunningServer):
    """Says `text`, whatever it is asked."""

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(AsyncLLM(None, EngineOptions(max_batch=4, max_context=512)), options)
        (end, *_) = self.engine._llm.description.config.eos_token_ids
        self._scripted = Scripted(end)
        self.gate._executor = self._scripted

    def says(self, text: str) -> None:
        assert self.engine.tokenizer is not None
        self._scripted.script = self.engine.tokenizer.encode(text, add_special_tokens=False)


@contextmanager
def scripted_server(options: ServerOptions) -> Iterator[ScriptedServer]:
    server = ScriptedServer(options)
    try:
        yield server
    finally:
        server.close()
