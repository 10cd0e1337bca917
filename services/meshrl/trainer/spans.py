"""The trace of a step: a span with a child for each stage."""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from meshrl.core.telemetry.tracing import TRAIN_SPAN
from meshrl.wire.trace import context_from, format_traceparent, links_from
from meshrl.wire.types import Batch


class TrainSpan:
    def __init__(self, tracer: trace.Tracer, batch: Batch) -> None:
        """Starts under the batch's trace context, linked to each of its rollouts."""
        rollouts = dict.fromkeys(parent for row in batch.micro_batches for parent in row.traceparents if parent)
        attributes: Mapping[str, str | int] = {
            "rl.run_id": batch.run_id,
            "rl.step": batch.step,
            "rl.version": batch.step,
            "rl.batch.loss_tokens": batch.loss_tokens,
            "rl.batch.micro_batches": len(batch.micro_batches),
        }
        self._tracer = tracer
        self._span = tracer.start_span(
            TRAIN_SPAN,
            context=context_from(batch.traceparent),
            kind=SpanKind.CONSUMER,
            links=links_from(rollouts),
            attributes=attributes,
        )
        self.traceparent = format_traceparent(self._span.get_span_context())

    def child(self, name: str, length_s: float, *, before_s: float = 0.0) -> None:
        """Records a stage that took `length_s` and ended `before_s` ago."""
        end = time.time_ns() - int(before_s * 1e9)
        context = trace.set_span_in_context(self._span)
        stage = self._tracer.start_span(f"{TRAIN_SPAN}.{name}", context=context, start_time=end - int(length_s * 1e9))
        stage.end(end_time=end)

    def fail(self, message: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.end()

    def end(self) -> None:
        self._span.end()
