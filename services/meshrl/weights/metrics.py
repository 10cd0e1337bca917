"""A hub's state for Prometheus."""

from __future__ import annotations

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshrl.weights.coordinator.coordinator import Coordinator
from meshrl.weights.coordinator.states import DECIDED


class HubMetrics(Collector):
    """Looks at the lines of versions for each scrape, on a thread of its own. Closed runs have none."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def collect(self) -> list[Metric]:
        newest = GaugeMetricFamily("meshrl_hub_version", "Newest version of a run that was decided", labels=["run"])
        serving = GaugeMetricFamily("meshrl_hub_engines", "Engines that serve it", labels=["run"])
        kept = GaugeMetricFamily("meshrl_hub_bytes", "Bytes of the run's versions that are kept", labels=["run"])
        for line in list(self._coordinator.lines.values()):
            live = list(line.records.live)  # the event loop may change it meanwhile
            kept.add_metric([line.run_id], sum(record.num_bytes for record in live))
            record = max((one for one in live if one.state in DECIDED), key=lambda one: one.key, default=None)
            if record is not None:
                newest.add_metric([line.run_id], record.version)
                engines = [engine.lines.get(line.run_id) for engine in list(self._coordinator.pool.engines.values())]
                serving.add_metric(
                    [line.run_id], sum(engine is not None and engine.serves(record) for engine in engines)
                )
        return [newest, serving, kept]
