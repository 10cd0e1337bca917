"""The trace of a step: an `rl.train` span linked to every rollout in its batch, with a child for each stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from meshrl.wire.types import Batch

TRAIN_SPAN = "rl.train"
_W3C = TraceContextTextMapPropagator()


class StepSpan:
    """The span of one step; `traceparent` goes with its events and its version."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, clock_ns: Callable[[], int]) -> None:
        self._tracer = tracer
        self._span = span
        self._clock_ns = clock_ns
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, context=trace.set_span_in_context(span))
        self.traceparent = carrier.get("traceparent", "")

    def child(self, name: str, length_s: float, *, before_s: float = 0.0) -> None:
        """Records a stage that took `length_s` and ended `before_s` ago."""
        end = self._clock_ns() - int(before_s * 1e9)
        context = trace.set_span_in_context(self._span)
        stage = self._tracer.start_span(f"{TRAIN_SPAN}.{name}", context=context, start_time=end - int(length_s * 1e9))
        stage.end(end_time=end)

    def fail(self, message: str) -> None:
        """Ends the span as an error."""
        self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.end()

    def end(self) -> None:
        """Ends the span."""
        self._span.end()


class StepSpans:
    """Starts the span of each step."""

    def __init__(self, tracer: trace.Tracer, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer = tracer
        self._clock_ns = clock_ns

    def start(self, batch: Batch) -> StepSpan:
        """A span under the batch's trace context, with one link for each distinct rollout."""
        rollouts = dict.fromkeys(parent for row in batch.micro_batches for parent in row.traceparents if parent)
        attributes: Mapping[str, str | int] = {
            "rl.run_id": batch.run_id,
            "rl.step": batch.step,
            "rl.version": batch.step,
            "rl.batch.loss_tokens": batch.loss_tokens,
            "rl.batch.micro_batches": len(batch.micro_batches),
        }
        span = self._tracer.start_span(
            TRAIN_SPAN,
            context=_W3C.extract({"traceparent": batch.traceparent}) if batch.traceparent else None,
            kind=SpanKind.CONSUMER,
            links=[Link(context) for context in map(_span_context, rollouts) if context.is_valid],
            attributes=attributes,
        )
        return StepSpan(self._tracer, span, self._clock_ns)


def _span_context(traceparent: str) -> trace.SpanContext:
    return trace.get_current_span(_W3C.extract({"traceparent": traceparent})).get_span_context()
