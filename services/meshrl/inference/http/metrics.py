"""An engine's counters in Prometheus' text format, for GET /metrics."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshrl.inference.engine import Engine, EngineStats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class EngineMetrics(Collector):
    """The metrics of one engine at one moment; totals count from its start."""

    def __init__(self, stats: EngineStats, version: int | None, runs: Mapping[str, int] | None = None) -> None:
        """`version` is that of the base model, -1 for None; `runs` has the version of each run's adapter instead."""
        self._stats, self._version, self._runs = stats, version, runs or {}

    def collect(self) -> list[Metric]:
        """Returns a family with one sample for each metric."""
        stats = self._stats
        gauges = (
            ("requests_running", "Requests that hold a slot", stats.running),
            ("requests_waiting", "Requests that wait for a slot", stats.waiting),
            ("slots", "Requests that can run at once", stats.slots),
            ("kv_tokens", "Tokens that the KV cache has room for", stats.kv_tokens),
            ("last_pause_seconds", "Length of the last pause for new weights", stats.last_pause_s),
        )
        by_run = ["run"] if self._runs else []
        versions = GaugeMetricFamily(
            "meshrl_engine_policy_version", "Version of the weights; -1 for none", labels=by_run
        )
        for run_id, version in self._runs.items():
            versions.add_metric([run_id], version)
        if not self._runs:
            versions.add_metric([], -1 if self._version is None else self._version)
        counters = (
            ("generated_tokens", "Tokens sampled", stats.generated_tokens),
            ("prefilled_tokens", "Prompt tokens computed", stats.prefilled_tokens),
            ("shared_prompt_tokens", "Prompt tokens taken over from another request", stats.shared_prompt_tokens),
            ("finished_requests", "Requests that came to their end", stats.finished_requests),
            ("steps", "Steps of the decoding loop", stats.steps),
            ("busy_seconds", "Seconds in which the loop had work", stats.busy_s),
        )
        return [
            versions,
            *(GaugeMetricFamily(f"meshrl_engine_{name}", what, value) for name, what, value in gauges),
            *(CounterMetricFamily(f"meshrl_engine_{name}", what, value) for name, what, value in counters),
        ]

    @staticmethod
    def of(engine: Engine) -> Collector:
        """A collector that looks at the engine anew for each scrape."""
        return _Live(engine)


class _Live(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> list[Metric]:
        adapters = self._engine.adapters
        newest = {} if adapters is None else adapters.newest
        runs = {run_id: adapter.version for run_id, adapter in newest.items()}
        return EngineMetrics(self._engine.stats(), self._engine.version, runs).collect()
