"""The trace of a commit is drawn from the durations that engines report."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshrl.core.telemetry.tracing import SpanIds
from meshrl.weights.spans import record_sync
from meshrl.wire.trace import sync_context
from meshrl.wire.types import Activation, ApplyReport, EngineReport, Transport, VersionInfo, VersionState

TRACE, SPAN = "a" * 32, "b" * 16


def commit(*, lag_s: float, prepare_s: float, pause_s: float) -> Activation:
    info = VersionInfo(
        run_id="run",
        epoch=1,
        version=4,
        artifact_id="artifact",
        state=VersionState.COMMITTED,
        num_bytes=8,
        transport=Transport.STREAM,
        traceparent=f"00-{TRACE}-{SPAN}-01",
    )
    report = ApplyReport(version=4, root=b"", pause_s=pause_s, prepare_s=prepare_s, requests_kept=2)
    return Activation(version=info, engines=(EngineReport(engine_id="e0", applied=report),), commit_s=0.1, lag_s=lag_s)


def spans_of(activation: Activation) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(id_generator=SpanIds())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    record_sync(provider.get_tracer("test"), activation, 100.0)
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return (pytest.approx(span.start_time / 1e9), pytest.approx(span.end_time / 1e9))


def test_prepare_begins_with_the_seal_and_the_pause_ends_with_the_commit() -> None:
    spans = spans_of(commit(lag_s=2.0, prepare_s=1.5, pause_s=0.25))
    assert seconds(spans["rl.sync"]) == (98.0, 100.0)
    assert seconds(spans["rl.sync.prepare"]) == (98.0, 99.5)
    assert seconds(spans["rl.sync.pause"]) == (99.75, 100.0)
    (link,) = spans["rl.sync"].links
    assert (link.context.trace_id, link.context.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert spans["rl.sync.pause"].parent == spans["rl.sync"].context
    assert spans["rl.sync.pause"].attributes == {"meshrl.engine_id": "e0", "meshrl.requests_kept": 2}


def test_whoever_knows_version_and_root_knows_the_span_of_its_commit() -> None:
    spans = spans_of(commit(lag_s=1.0, prepare_s=0.5, pause_s=0.25))
    expected, found = sync_context(4, b""), spans["rl.sync"].context
    assert found is not None
    assert (found.trace_id, found.span_id) == (expected.trace_id, expected.span_id)
    assert sync_context(5, b"").span_id != expected.span_id != sync_context(4, b"other").span_id
    pause = spans["rl.sync.pause"].context
    assert pause is not None
    assert pause.span_id != expected.span_id


def test_prepare_that_followed_an_upload_begins_before_the_seal() -> None:
    spans = spans_of(commit(lag_s=1.0, prepare_s=5.0, pause_s=0.25))
    assert seconds(spans["rl.sync"]) == (99.0, 100.0)
    assert seconds(spans["rl.sync.prepare"]) == (94.75, 99.75)
