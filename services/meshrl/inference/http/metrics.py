"""An engine's counters in Prometheus' text format, for GET /metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshrl.inference.engine import Engine, EngineStats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class EngineMetrics(Collector):
    """The metrics of one engine at one moment; totals count from its start."""

    def __init__(self, stats: EngineStats, version: int | None) -> None:
        """`version` is the version of the policy that is served; None is told as -1."""
        self._stats, self._version = stats, version

    def collect(self) -> list[Metric]:
        """Returns a family with one sample for each metric."""
        stats = self._stats
        gauges = (
            ("requests_running", "Requests that hold a slot", stats.running),
            ("requests_waiting", "Requests that wait for a slot", stats.waiting),
            ("slots", "Requests that can run at once", stats.slots),
            ("kv_tokens", "Tokens that the KV cache has room for", stats.kv_tokens),
            ("last_pause_seconds", "Length of the last pause for new weights", stats.last_pause_s),
            ("policy_version", "Version of the weights; -1 for none", -1 if self._version is None else self._version),
        )
        counters = (
            ("generated_tokens", "Tokens sampled", stats.generated_tokens),
            ("prefilled_tokens", "Prompt tokens computed", stats.prefilled_tokens),
            ("shared_prompt_tokens", "Prompt tokens taken over from another request", stats.shared_prompt_tokens),
            ("finished_requests", "Requests that came to their end", stats.finished_requests),
            ("steps", "Steps of the decoding loop", stats.steps),
            ("busy_seconds", "Seconds in which the loop had work", stats.busy_s),
        )
        return [
            *(GaugeMetricFamily(f"meshrl_engine_{name}", what, value) for name, what, value in gauges),
            *(CounterMetricFamily(f"meshrl_engine_{name}", what, value) for name, what, value in counters),
        ]

    @staticmethod
    def of(engine: Engine) -> Collector:
        """A collector that looks at the engine anew for each scrape."""
        return _Live(engine)

    def text(self) -> bytes:
        """Returns the body of the answer."""
        return generate_latest(self)


class _Live(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> list[Metric]:
        return EngineMetrics(self._engine.stats(), self._engine.version).collect()
