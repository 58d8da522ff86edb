"""Sizes the control plane works within."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Limits of one engine.

    Args:
        page_size: tokens a KV page holds.
        num_pages: pages of the pool, numbered from 0.
        num_slots: slots of the recurrent-state pool, numbered from 0. Each running request holds one, also under a
            model without recurrent state.
        max_batch: requests that run at once.
        max_step_tokens: tokens one step runs, decodes and prefill chunks together; at least max_batch, so that a step
            always has room for every decode and still moves a prefill.
        max_context: tokens a request may have, prompt and generated together.
        context_tokens: how many tokens before a row's first one the plan repeats (the n-gram size less one).
        seed: where the seeds of requests that name none come from.

    Raises:
        ValueError: a field is out of range; the message begins with its name.
    """

    page_size: int
    num_pages: int
    num_slots: int
    max_batch: int
    max_step_tokens: int
    max_context: int
    context_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            low = {"context_tokens": 0, "seed": None}.get(field.name, 1)
            value = getattr(self, field.name)
            if low is not None and value < low:
                raise ValueError(f"{field.name}: expected at least {low}, got {value}")
        if self.max_step_tokens < self.max_batch:
            raise ValueError(
                f"max_step_tokens: expected at least max_batch ({self.max_batch}), got {self.max_step_tokens}"
            )
