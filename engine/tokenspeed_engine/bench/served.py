"""What servers say of their own speculation, at /metrics."""

from dataclasses import dataclass

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tokenspeed_engine.bench.client import Endpoint

_COUNTERS = (
    ("tokenspeed_draft_steps_total", "tokenspeed_drafts_accepted_total"),
    ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"),
)
"""Steps of a sequence that verified drafts, and drafts accepted in them: this project's names, vllm's."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Running totals: steps of a sequence that verified drafts, and drafts accepted in them."""

    steps: float
    accepted: float

    def __sub__(self, other: "Speculation") -> "Speculation":
        return Speculation(self.steps - other.steps, self.accepted - other.accepted)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a verify step yields: the accepted drafts and one more. None without steps."""
        return 1 + self.accepted / self.steps if self.steps else None


async def speculation(endpoint: Endpoint, client: httpx2.AsyncClient) -> Speculation | None:
    """The totals now, or None where the server does not show them under a known name."""
    try:
        response = await client.get(f"{endpoint.url.removesuffix('/v1')}/metrics")
        families = list(text_string_to_metric_families(response.text)) if response.is_success else []
    except (httpx2.HTTPError, ValueError):
        return None
    totals: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    for steps, accepted in _COUNTERS:
        if steps in totals and accepted in totals:
            return Speculation(totals[steps], totals[accepted])
    return None
