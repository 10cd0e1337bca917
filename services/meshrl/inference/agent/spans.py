"""The trace of a swap: `rl.sync.apply`, what an engine does between the decision for a version and serving it.

The span is in the trace of the version's `rl.sync`, which the hub writes and which links to the `rl.train` that made
the version: both sides work out its ids alike (`meshrl.wire.trace.sync_context`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context

from meshrl.core.telemetry.tracing import SYNC_APPLY_SPAN
from meshrl.inference.agent.version_loader import PreparedVersion
from meshrl.wire.trace import sync_context


@contextmanager
def apply_span(
    version: int, prepared: PreparedVersion | None, engine_id: str, tracer: trace.Tracer | None = None
) -> Iterator[trace.Span]:
    """The span is current inside, so that what is logged names its trace. Without anything prepared it is alone."""
    parent = None if prepared is None else sync_context(version, prepared.manifest.result_root)
    context = Context() if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent))
    with (tracer or trace.get_tracer("meshrl.inference")).start_as_current_span(
        SYNC_APPLY_SPAN, context=context, attributes={"meshrl.version": version, "meshrl.engine_id": engine_id}
    ) as span:
        if prepared is not None:
            span.set_attribute("meshrl.artifact_id", prepared.artifact_id)
            span.set_attribute("meshrl.prepare_s", round(prepared.prepare_s, 4))
            for part, seconds in prepared.parts.items():
                span.set_attribute(f"meshrl.prepare.{part}_s", round(seconds, 4))
        yield span
