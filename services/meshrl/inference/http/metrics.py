"""An engine's counters in Prometheus' text format, for GET /metrics."""

from __future__ import annotations

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshrl.inference.engine import Engine


class EngineMetrics(Collector):
    """Read anew for each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> list[Metric]:
        """A run's adapter has its version in place of the base's."""
        stats, version, runs = self._engine.stats(), self._engine.version, self._engine.runs
        gauges = (
            ("requests_running", "Requests that hold a slot", stats.running),
            ("requests_waiting", "Requests that wait for a slot", stats.waiting),
            ("slots", "Requests that can run at once", stats.slots),
            ("kv_tokens", "Tokens that the KV cache has room for", stats.kv_tokens),
            ("last_pause_seconds", "Length of the last pause for new weights", stats.last_pause_s),
        )
        versions = GaugeMetricFamily(
            "meshrl_engine_policy_version", "Version of the weights; -1 for none", labels=["run"] if runs else []
        )
        for run_id, adapter in runs.items():
            versions.add_metric([run_id], adapter.version)
        if not runs:
            versions.add_metric([], -1 if version is None else version)
        counters = (
            ("generated_tokens", "Tokens sampled", stats.generated_tokens),
            ("prefilled_tokens", "Prompt tokens computed", stats.prefilled_tokens),
            ("shared_prompt_tokens", "Prompt tokens taken over from another request", stats.shared_prompt_tokens),
            ("finished_requests", "Requests that came to their end", stats.finished_requests),
            ("preempted_requests", "Requests that lost their room in the KV cache", stats.preempted),
            ("steps", "Steps of the decoding loop", stats.steps),
            ("busy_seconds", "Seconds in which the loop had work", stats.busy_s),
        )
        return [
            versions,
            *(GaugeMetricFamily(f"meshrl_engine_{name}", what, value) for name, what, value in gauges),
            *(CounterMetricFamily(f"meshrl_engine_{name}", what, value) for name, what, value in counters),
        ]
