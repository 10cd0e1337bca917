"""Starts a program's watch and serves its metrics to Prometheus at GET /metrics, where `log.metrics_port` is set.

A thread serves them, also while the event loop is stuck. `metrics_targets/PROGRAM.json` has the address, in the form of
Prometheus' file_sd_configs.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler

from loguru import logger
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from meshrl.core.config.shared import LogConfig
from meshrl.core.durable import write_file
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.telemetry.monitor import Sink
from meshrl.core.telemetry.waits import Waits
from meshrl.core.telemetry.watchdog import ProgramWatch

TARGETS = "metrics_targets"
SCRAPE_S = 20.0


class WatchMetrics(Collector):
    def __init__(self, watch: ProgramWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterable[Family]:
        state = self._watch.state()
        lag = Family("meshrl_loop_lag_seconds", "How late the event loop answered lately, at most", "gauge")
        lag.add_sample(lag.name, {}, state.loop_lag_s)
        waiting = Family("meshrl_waiting_seconds", "How long the oldest wait of a kind lasts", "gauge")
        overdue = Family("meshrl_waiting_overdue", "1 where it lasts unusually long", "gauge")
        longest = {wait.name: wait for wait in reversed(state.waits)}  # the longest comes first
        for name, wait in longest.items():
            waiting.add_sample(waiting.name, {"wait": name}, wait.seconds)
            overdue.add_sample(overdue.name, {"wait": name}, float(wait.overdue))
        return lag, waiting, overdue


class RecordMetrics(Collector, Sink):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._step = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._step = max(step, self._step)
            self._values.update(metrics)

    def collect(self) -> Iterable[Family]:
        with self._lock:
            values, step = dict(self._values), self._step
        families = {"meshrl_step": Family("meshrl_step", "Last step that has a record", "gauge")}
        families["meshrl_step"].add_sample("meshrl_step", {}, float(step))
        for name, value in values.items():
            named = CATALOGUE.parts(name)
            if named is None:
                continue
            metric, labels = named
            family = families.setdefault(metric.exported, Family(metric.exported, metric.meaning, "gauge"))
            family.add_sample(metric.exported, labels, value)
        return families.values()


def registry_of(tracer: Tracer) -> CollectorRegistry:
    found = getattr(tracer, "registry", None)
    return found if isinstance(found, CollectorRegistry) else CollectorRegistry()


@contextmanager
def observed(
    program: str,
    waits: Waits,
    registry: CollectorRegistry,
    log: LogConfig,
    output_dir: Path,
    *,
    on_lost_folder: Callable[[], None] | None = None,
) -> Iterator[ProgramWatch]:
    """Entered on the program's event loop."""
    watch = ProgramWatch(program, waits, output_dir, on_lost_folder=on_lost_folder)
    watch.start()
    try:
        if log.metrics_port is None:
            yield watch
            return
        with _served(program, watch, registry, log, output_dir):
            yield watch
    finally:
        watch.stop()


class _BoundedHandler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self._limit = threading.Timer(SCRAPE_S, self.connection.shutdown, (socket.SHUT_RDWR,))
        self._limit.daemon = True
        self._limit.start()

    def finish(self) -> None:
        self._limit.cancel()
        super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        """Scrapes are not logged."""


@contextmanager
def _served(
    program: str, watch: ProgramWatch, registry: CollectorRegistry, log: LogConfig, output_dir: Path
) -> Iterator[None]:
    assert log.metrics_port is not None  # it is set
    for make in (ProcessCollector, PlatformCollector, GCCollector):
        make(registry=registry)
    registry.register(WatchMetrics(watch))
    try:
        server, thread = start_http_server(log.metrics_port, log.metrics_host, registry)
    except OSError as error:  # no metrics are worth a run
        logger.warning(
            "no /metrics on {}:{}: {}; set log.metrics_port to 0, which takes a free port",
            log.metrics_host, log.metrics_port, error.strerror,
        )  # fmt: skip
        yield
        return
    server.RequestHandlerClass = _BoundedHandler
    target = f"{log.metrics_host}:{server.server_port}"
    logger.info("metrics at http://{}/metrics", target)
    path = output_dir / TARGETS / f"{program}.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps([{"targets": [target], "labels": {"program": program}}]))
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        with suppress(OSError):
            path.unlink(missing_ok=True)
