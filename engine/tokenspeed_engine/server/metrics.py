"""What /metrics shows: counters and times of requests, and what the engine holds."""

import time
from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenspeed_engine.async_llm import AsyncLLM
from tokenspeed_engine.control import RequestOutput

_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_TOTALS = {
    "steps": "Steps of the engine.",
    "draft_steps": "Rows that verified drafts; each yields one token more than the drafts it accepts.",
    "drafts_proposed": "Drafts that were verified.",
    "drafts_accepted": "Drafts that the model agreed with.",
    "preemptions": "Requests that gave their pages back to be resumed later.",
    "snapshots_saved": "States kept for reuse.",
    "snapshots_offloaded": "Kept states that moved to host memory.",
}


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "tokenspeed_requests",
            "Requests by how they ended; each choice of n is one. Abort: the client left.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("stop", "length", "abort", "error", "timeout"):
            self._requests.labels(outcome)
        self.refused = Counter(
            "tokenspeed_refused_requests", "HTTP requests answered with an error.", ["status"], registry=registry
        )
        self._prompt_tokens = Counter("tokenspeed_prompt_tokens", "Prompt tokens of requests.", registry=registry)
        self._generated_tokens = Counter("tokenspeed_generated_tokens", "Tokens generated.", registry=registry)
        self._first_token = Histogram(
            "tokenspeed_time_to_first_token_seconds",
            "From the whole body received to the first token.",
            buckets=_FIRST_TOKEN_SECONDS,
            registry=registry,
        )
        self._inter_token = Histogram(
            "tokenspeed_inter_token_seconds",
            "Between tokens of one request; tokens that come together share the time.",
            buckets=_INTER_TOKEN_SECONDS,
            registry=registry,
        )
        registry.register(_EngineTotals(engine))
        for name, documentation in {
            "num_running": "Requests that hold pages and a slot.",
            "num_waiting": "Requests that wait for them.",
            "num_free_pages": "KV pages that no request holds.",
            "num_pages": "KV pages of the pool.",
            "num_free_slots": "Recurrent-state slots that no request holds.",
            "num_slots": "Recurrent-state slots of the pool.",
        }.items():
            gauge = Gauge(f"tokenspeed_{name}", documentation, registry=registry)
            gauge.set_function(partial(_read, engine, name))

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def track(self, num_requests: int, num_prompt_tokens: int, started: float) -> "Tracker":
        """Follows requests that were admitted; `started` is time.perf_counter() at their arrival."""
        self._prompt_tokens.inc(num_prompt_tokens)
        return Tracker(self, num_requests, started)


def _read(engine: AsyncLLM, name: str) -> float:
    return float(getattr(engine.stats, name))


class _EngineTotals(Collector):
    """The engine's own running totals, read when they are asked for."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        counters = self._engine.stats.counters
        for name, documentation in _TOTALS.items():
            yield CounterMetricFamily(f"tokenspeed_{name}", documentation, value=getattr(counters, name))
        cached = CounterMetricFamily(
            "tokenspeed_cached_tokens",
            "Prompt tokens that the prefix cache had, by where the state was that they go on from.",
            labels=["state"],
        )
        cached.add_metric(["device"], counters.cached_tokens_device)
        cached.add_metric(["host"], counters.cached_tokens_host)
        yield cached


class Tracker:
    """The requests of one HTTP request."""

    def __init__(self, metrics: Metrics, num_requests: int, started: float) -> None:
        self._metrics = metrics
        self._last = [started] * num_requests
        self._has_tokens = [False] * num_requests
        self._unfinished = num_requests

    def observe(self, index: int, output: RequestOutput) -> None:
        """Count an output of request `index`."""
        metrics = self._metrics
        if count := len(output.token_ids):
            now = time.perf_counter()
            passed, self._last[index] = now - self._last[index], now
            metrics._generated_tokens.inc(count)
            if not self._has_tokens[index]:
                metrics._first_token.observe(passed)
                self._has_tokens[index] = True
            else:
                for _ in range(count):
                    metrics._inter_token.observe(passed / count)
        if output.finish_reason is not None:
            self._unfinished -= 1
            metrics._requests.labels(output.finish_reason).inc()

    def end(self, outcome: str) -> None:
        """Those that have not finished ended with `outcome`."""
        self._metrics._requests.labels(outcome).inc(self._unfinished)
        self._unfinished = 0
