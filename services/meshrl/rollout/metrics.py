"""A rollout service's counters for Prometheus: the rollouts of each run, and failures by reason."""

from __future__ import annotations

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshrl.rollout.groups import Admissions


class RolloutMetrics(Collector):
    """Reads the groups at each scrape, from its thread; totals count from the service's start."""

    def __init__(self, table: Admissions) -> None:
        self._table = table

    def collect(self) -> list[Metric]:
        running = GaugeMetricFamily("meshrl_rollouts_running", "Rollouts of a run that run", labels=["run"])
        waiting = GaugeMetricFamily("meshrl_rollouts_waiting", "Rollouts of a run that wait", labels=["run"])
        ended = CounterMetricFamily("meshrl_rollouts_ended", "Rollouts of a run that ended", labels=["run", "outcome"])
        failed = CounterMetricFamily("meshrl_rollouts_failed", "Rollouts that failed", labels=["reason"])
        for run_id, counts in list(self._table.ended_of.items()):
            running.add_metric([run_id], self._table.running_of(run_id))
            waiting.add_metric([run_id], self._table.waiting_of(run_id))
            for outcome, count in list(counts.items()):
                ended.add_metric([run_id, outcome.value], count)
        for reason, count in list(self._table.failures.items()):
            failed.add_metric([reason], count)
        return [running, waiting, ended, failed]
