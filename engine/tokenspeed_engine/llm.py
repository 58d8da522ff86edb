"""The engine in one object: `LLM(folder).generate(prompts)`."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenspeed_engine.building import build_runner, choose_device
from tokenspeed_engine.control import (
    EngineCore,
    Executor,
    FinishReason,
    RequestOutput,
    RequestRefusedError,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from tokenspeed_engine.models.families import read_model
from tokenspeed_engine.options import EngineOptions
from tokenspeed_engine.parallel.executor import ParallelExecutor, launch
from tokenspeed_engine.tokenizer import Tokenizer, read_stop_token_ids

EMBEDDED_MODEL = Path(__file__).parent / "demo" / "checkpoint"
"""The small trained model that ships with the engine."""

Prompt = str | Sequence[int]

__all__ = ["EMBEDDED_MODEL", "LLM", "EngineOptions", "Generation", "Prompt"]


@dataclass(frozen=True)
class Generation:
    """A finished request. `logprobs` has an entry a token where they were asked for; `error` says why one failed."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...]
    usage: Usage
    error: str | None = None


class LLM:
    """A model folder, loaded and ready to generate; without one, the small model that ships with the engine.

    `core` is the control plane, for those that drive it themselves instead of calling `generate` or `stream`.
    Raises `CheckpointError` or `ConfigError` for a folder that cannot be served, each problem by name, and
    `ValueError` for sizes that cannot work.
    """

    def __init__(self, model: str | Path | None = None, options: EngineOptions | None = None) -> None:
        options = options or EngineOptions()
        folder = EMBEDDED_MODEL if model is None else Path(model)
        self.description = read_model(folder)
        self.tokenizer = Tokenizer.from_folder(folder)
        eos_token_ids = read_stop_token_ids(folder, self.description.config.eos_token_ids)
        device = choose_device(options)
        executor: Executor
        self._ranks: ParallelExecutor | None = None
        if options.ranks > 1:
            executor, sizes = launch(folder, self.description, options, device)
            self._ranks = executor
        else:
            executor, sizes = build_runner(folder, self.description, options, device)
        control = sizes.control
        self.core = EngineCore(
            control,
            executor,
            vocab_size=self.description.config.vocab_size,
            eos_token_ids=eos_token_ids,
            tokenizer=self.tokenizer,
        )
        self.num_pages, self.num_slots = control.num_pages, control.pool_slots
        self._numbers = itertools.count()
        self._inboxes: dict[str, deque[RequestOutput]] = {}

    def close(self) -> None:
        """Ends the other ranks; nothing can be generated any more. Without other ranks there is nothing to do."""
        if self._ranks is not None:
            self._ranks.close()

    @property
    def num_free(self) -> tuple[int, int]:
        """Pages and slots that no request holds."""
        return self.core.scheduler.pages.num_free, self.core.scheduler.slots.num_free

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Generation]:
        """Finishes all prompts, batched together, and returns their generations in order.

        `prompts`: text or token ids, one or several; `params`: one for all, or one a prompt. Raises
        `RequestRefusedError`, before any runs, for one that can never be served (longer than the context, say).
        """
        several = _as_prompts(prompts)
        each = [params or SamplingParams()] * len(several) if not isinstance(params, Sequence) else list(params)
        parts: dict[str, list[RequestOutput]] = {}
        for output in self._run(several, each):
            parts.setdefault(output.request_id, []).append(output)
        return [_join(outputs) for _, outputs in sorted(parts.items(), key=lambda item: int(item[0]))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """One prompt's outputs as they come; leaving the loop early aborts the request. Raises as `generate`."""
        return self._run([prompt], [params or SamplingParams()])

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises `RequestRefusedError` for text that is no Unicode, or without a tokenizer."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise RequestRefusedError("prompt: this model folder has no tokenizer, so prompts are token ids")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # such as undecodable bytes of a command line
            raise RequestRefusedError(f"prompt: {error.reason} at character {error.start}") from error
        return self.tokenizer.encode(prompt)

    def _run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[RequestOutput]:
        if len(prompts) != len(params):
            raise ValueError(f"params: expected one for all or one a prompt ({len(prompts)}), got {len(params)}")
        encoded = [self.encode(prompt) for prompt in prompts]
        live = [str(next(self._numbers)) for _ in prompts]
        self._inboxes |= {request: deque() for request in live}
        try:
            for request, ids, each in zip(live, encoded, params, strict=True):
                self.core.add(request, ids, each)
            unfinished = set(live)
            while unfinished:
                for output in self._receive(live):
                    if output.finish_reason is not None:
                        unfinished.discard(output.request_id)
                    yield output
        finally:
            for request in live:
                self.core.abort(request)
                del self._inboxes[request]
            if not self._inboxes:
                self.core.drain()  # a step in flight may hold what was aborted

    def _receive(self, requests: Sequence[str]) -> list[RequestOutput]:
        """What came for these requests; runs a step if nothing has. Steps serve all streams that are open."""
        if not any(self._inboxes[request] for request in requests):
            for output in self.core.step():
                if output.request_id in self._inboxes:  # else its stream was left early
                    self._inboxes[output.request_id].append(output)
        received = [output for request in requests for output in self._inboxes[request]]
        for request in requests:
            self._inboxes[request].clear()
        return received


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _join(outputs: list[RequestOutput]) -> Generation:
    last = outputs[-1]
    assert last.finish_reason is not None
    return Generation(
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        usage=last.usage,
        error=last.error,
    )
