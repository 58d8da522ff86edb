"""Sizes the control plane works within."""

from dataclasses import dataclass, fields

_LOWEST = {
    **dict.fromkeys(("page_size", "num_pages", "num_slots", "max_batch", "max_step_tokens", "max_context"), 1),
    **dict.fromkeys(("context_tokens", "num_drafts", "state_interval", "num_snapshots", "num_host_snapshots"), 0),
}


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Limits of one engine.

    Args:
        page_size: tokens a KV page holds.
        num_pages: pages of the pool, numbered from 0.
        num_slots: slots for running requests. Each running request holds one, also under a model without recurrent
            state. Slots are numbered from 0 to `pool_slots` - 1.
        max_batch: requests that run at once.
        max_step_tokens: tokens one step runs, decodes and prefill chunks together; at least max_batch, so that a step
            always has room for every decode and still moves a prefill.
        max_context: tokens a request may have, prompt and generated together.
        context_tokens: how many tokens before a row's first one the plan repeats (the n-gram size less one).
        seed: where the seeds of requests that name none come from.
        num_drafts: most tokens an executor guesses ahead.
        prefix_cache: keep what finished requests computed, for those that begin with the same tokens.
        state_interval: tokens between state snapshots during prefill, whose chunks end there; 0 takes snapshots only
            where a request ends or is preempted.
        num_snapshots: slots of the pool beyond num_slots, so that snapshots have room while all requests run.
        num_host_snapshots: snapshots in host memory, for those that lost their slot; numbered from 0.
        has_state: whether the model keeps a state by slot. Without one, every position whose KV is there can be reused.
        overlap: begin a step before the text of the one before it is made. Of use where `Executor.submit` returns
            before the device is done; else it only makes outputs come a step later.

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
    num_drafts: int = 0
    prefix_cache: bool = False
    state_interval: int = 0
    num_snapshots: int = 0
    num_host_snapshots: int = 0
    has_state: bool = True
    overlap: bool = False

    @property
    def pool_slots(self) -> int:
        """Slots of the recurrent-state pool."""
        return self.num_slots + self.num_snapshots

    def __post_init__(self) -> None:
        for field in fields(self):
            low = _LOWEST.get(field.name)
            value = getattr(self, field.name)
            if low is not None and value < low:
                raise ValueError(f"{field.name}: expected at least {low}, got {value}")
        if self.prefix_cache and self.has_state and not self.num_snapshots:
            raise ValueError("num_snapshots: expected at least 1 for the prefix cache of a model with state, got 0")
        if self.max_step_tokens < self.max_batch:
            raise ValueError(
                f"max_step_tokens: expected at least max_batch ({self.max_batch}), got {self.max_step_tokens}"
            )
