"""What an engine has done since its start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counters:
    """Running totals.

    Args:
        steps: steps an executor was given.
        prompt_tokens: prompt tokens of requests that were given pages and a slot.
        cached_tokens_device: those of them that the prefix cache had, with the state on the device (or no state).
        cached_tokens_host: those of them that the prefix cache had, with the state in host memory.
        generated_tokens: tokens sampled, without those behind an end.
        draft_steps: rows that ran drafts; each yields one token more than the drafts it accepts.
        drafts_proposed: drafts that were run.
        drafts_accepted: drafts that the model agreed with.
        preemptions: requests that gave their pages back to be resumed later.
        snapshots_saved: states kept for reuse.
        snapshots_offloaded: kept states that moved to host memory.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens_device: int = 0
    cached_tokens_host: int = 0
    generated_tokens: int = 0
    draft_steps: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    preemptions: int = 0
    snapshots_saved: int = 0
    snapshots_offloaded: int = 0
