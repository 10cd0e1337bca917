"""Sets up tracing for one program: OTLP JSON lines in a file always, OTLP over HTTP where an endpoint is given."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from loguru import logger
from opentelemetry import trace
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from prometheus_client import CollectorRegistry

from meshrl.core.telemetry.otlp_file import JsonLinesSpanExporter
from meshrl.core.telemetry.start import Start
from meshrl.core.telemetry.waits import Waits
from meshrl.wire.trace import format_traceparent

STEP_SPAN = "rl.step"
ROLLOUT_SPAN = "rl.rollout"
BATCH_SPAN = "rl.batch"
TRAIN_SPAN = "rl.train"
EVALUATION_SPAN = "rl.evaluation"
SYNC_SPAN = "rl.sync"
SYNC_PREPARE_SPAN = "rl.sync.prepare"
SYNC_PAUSE_SPAN = "rl.sync.pause"
SYNC_APPLY_SPAN = "rl.sync.apply"

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
COMPRESSION_VARIABLES = ("OTEL_EXPORTER_OTLP_COMPRESSION", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION")
MAX_QUEUE = 16_384
"""Unless OTEL_BSP_MAX_QUEUE_SIZE is set; a large engine ends more spans than OpenTelemetry's own 2,048 while a
collector is busy."""
# A train span links to every rollout of its batch; the SDK's own limit is 128.
MAX_LINKS = 8192
_EXPORT_EVERY_MS = 1000
CLOSE_S = 2.0
"""At the end of a program, for a collector that has not failed before."""


def traceparent_of(span: trace.Span) -> str:
    """W3C's text, or "" while tracing is off."""
    return format_traceparent(span.get_span_context())


_CHOSEN: ContextVar[trace.SpanContext | None] = ContextVar("meshrl_chosen_ids", default=None)


@contextmanager
def chosen_ids(context: trace.SpanContext | None) -> Iterator[None]:
    """The span that is started inside, the root of its trace, has these ids."""
    token = _CHOSEN.set(context)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


class SpanIds(RandomIdGenerator):
    def generate_trace_id(self) -> int:
        chosen = _CHOSEN.get()
        return super().generate_trace_id() if chosen is None else chosen.trace_id

    def generate_span_id(self) -> int:
        chosen = _CHOSEN.get()
        return super().generate_span_id() if chosen is None else chosen.span_id


class SpanProvider(TracerProvider):
    def __init__(self, resource: Resource) -> None:
        limits = SpanLimits(max_links=MAX_LINKS)
        super().__init__(resource=resource, span_limits=limits, id_generator=SpanIds(), shutdown_on_exit=False)
        self.processors: tuple[SpanProcessor, ...] = ()

    def add_span_processor(self, span_processor: SpanProcessor) -> None:
        super().add_span_processor(span_processor)
        self.processors += (span_processor,)


class _LastFailure(logging.Filter):
    """Keeps why the exporter's latest attempt failed, and logs nothing: it has a line for each."""

    text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        text = " ".join(record.getMessage().split())
        if "max retries" not in text:  # that it gives up, after the reason of each attempt
            self.text = text
        return False


class CollectorExporter(SpanExporter):
    """Passes batches on to OpenTelemetry's exporter, which retries, and notes whether the collector takes them."""

    def __init__(self, inner: SpanExporter, failure: _LastFailure) -> None:
        self._inner = inner
        self._failure = failure
        self._fails = False  # the latest batch was given up
        self._sending_since_s: float | None = None
        self.missed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._sending_since_s = time.monotonic()
        result = self._inner.export(spans)
        self._sending_since_s = None
        self._fails = result is not SpanExportResult.SUCCESS
        if self._fails:
            if not self.missed:
                logger.warning(
                    "the collector (OTEL_EXPORTER_OTLP_ENDPOINT, OTLP over HTTP) does not take spans; traces/ of the"
                    " output folder has them all: {}",
                    self._failure.text or "nothing was taken within OTEL_EXPORTER_OTLP_TIMEOUT",
                )
            self.missed += len(spans)
        return result

    def patience_s(self) -> float:
        """CLOSE_S a batch, nothing once one was given up."""
        if self._fails:
            return 0.0
        since_s = self._sending_since_s
        return CLOSE_S if since_s is None else max(0.0, since_s + CLOSE_S - time.monotonic())

    def shutdown(self) -> None:
        self._inner.shutdown()


class Tracing(trace.Tracer):
    """The tracer of a program, with its current waits, its start, and its metrics for Prometheus."""

    def __init__(
        self, tracer: trace.Tracer, provider: SpanProvider | None, collector: CollectorExporter | None = None
    ) -> None:
        self.waits = Waits()
        self.start = Start()
        self.registry = CollectorRegistry()
        self._tracer = tracer
        self._provider = provider
        self._collector = collector

    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        return self._tracer.start_span(*args, **kwargs)

    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:  # what OpenTelemetry returns has no public type
        return self._tracer.start_as_current_span(*args, **kwargs)

    def close(self) -> None:
        """Writes buffered spans to the file, then sends them to the collector, within `patience_s`."""
        if self._provider is None:
            return
        processors = list(self._provider.processors)
        sending = processors.pop() if self._collector is not None else None
        for processor in processors:
            processor.shutdown()
        if self._collector is None or sending is None:
            return
        closing = threading.Thread(target=sending.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(self._collector.patience_s())
        missed = self._collector.missed
        if closing.is_alive() or missed:
            logger.warning(
                "the collector (OTEL_EXPORTER_OTLP_ENDPOINT) missed {} spans; traces/ of the output folder has them",
                f"{missed} or more" if missed else "the last",
            )


def setup_tracing(service_name: str, traces_dir: Path | None, max_mib: int | None = None) -> Tracing:
    """Sets up tracing for the whole process, once, after child processes were started.

    Spans go to `traces_dir/<service_name>.jsonl.zst`, which keeps the latest `max_mib`, and to a collector where
    OTEL_EXPORTER_OTLP_ENDPOINT is set. With neither, tracing stays off.
    """
    exporters: list[SpanExporter] = []
    if traces_dir is not None:
        max_bytes = None if max_mib is None else max_mib * 2**20
        exporters.append(JsonLinesSpanExporter(traces_dir / f"{service_name}.jsonl.zst", max_bytes))
    collector = _collector_exporter(os.environ)
    if collector is not None:
        exporters.append(collector)
    if not exporters:
        return Tracing(trace.get_tracer("meshrl"), None)
    provider = build_provider(service_name, exporters)
    trace.set_tracer_provider(provider)
    return Tracing(provider.get_tracer("meshrl"), provider, collector)


def build_provider(service_name: str, exporters: list[SpanExporter]) -> SpanProvider:
    given = Resource.create({"service.name": service_name, "service.namespace": "meshrl", "process.pid": os.getpid()})
    provider = SpanProvider(Resource({"host.name": socket.gethostname()}).merge(given))
    for exporter in exporters:
        queue = None if os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) else MAX_QUEUE
        provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_EVERY_MS, max_queue_size=queue)
        )
    return provider


def _collector_exporter(environment: Mapping[str, str]) -> CollectorExporter | None:
    if not any(environment.get(name) for name in ENDPOINT_VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http import Compression
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        logger.warning("no traces to the collector: install opentelemetry-exporter-otlp-proto-http")
        return None
    chosen = any(environment.get(name) for name in COMPRESSION_VARIABLES)
    own, failure = logging.getLogger(OTLPSpanExporter.__module__), _LastFailure()
    own.setLevel(logging.WARNING)
    own.addFilter(failure)
    return CollectorExporter(OTLPSpanExporter(compression=None if chosen else Compression.Gzip), failure)
