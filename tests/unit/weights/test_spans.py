"""The trace of a commit is drawn from the durations that engines report."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshrl.core.telemetry.tracing import SpanIds
from meshrl.weights.spans import describe, record_sync
from meshrl.wire.trace import sync_context
from meshrl.wire.types import (
    Activation,
    ApplyReport,
    EngineReport,
    Manifest,
    TensorEntry,
    Transport,
    VersionInfo,
    VersionKind,
    VersionState,
)

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


def test_the_span_of_an_upload_has_the_base_of_a_delta() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tensor = TensorEntry(name="w", dtype="F32", shape=(4,), offset=0, num_bytes=16, digest=b"")
    of_delta = {"kind": VersionKind.DELTA, "base_version": 3, "base_root": b"r"}
    for more in ({}, of_delta):
        manifest = Manifest(run_id="run", epoch=1, version=4, transport=Transport.STREAM, result_root=b"",
                            layout_signature=b"", tensors=(tensor,), chunks=(), **more)  # fmt: skip
        with provider.get_tracer("test").start_as_current_span("CreateVersion"):
            describe(manifest, "artifact")
    full, delta = (dict(span.attributes or {}) for span in exporter.get_finished_spans())
    assert full == {
        "meshrl.run_id": "run", "meshrl.version": 4, "meshrl.artifact_id": "artifact", "meshrl.kind": "full",
        "meshrl.full_bytes": 16,
    }  # fmt: skip
    assert delta == {**full, "meshrl.kind": "delta", "meshrl.base_version": 3}


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
