"""The trace of a step: `rl.step`, from the first rollout dispatched for it to its version committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace

from meshrl.core.telemetry.tracing import BATCH_SPAN, STEP_SPAN, traceparent_of


class StepTraces:
    """One open span a step that has work; groups, batch and version of the step are traced under it."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._open: dict[int, trace.Span] = {}

    def span(self, step: int) -> trace.Span:
        """The span of a step, to make current around calls that belong to it; it starts with the first call."""
        if step not in self._open:
            self._open[step] = self._tracer.start_span(STEP_SPAN, attributes={"rl.step": step})
        return self._open[step]

    def traceparent(self, step: int) -> str:
        """W3C context of the step's span, for what carries it over queues and restarts."""
        return traceparent_of(self.span(step))

    @contextmanager
    def batch(self, step: int) -> Iterator[trace.Span]:
        """The span of making the step's batch, for as long as the block runs."""
        inside = trace.set_span_in_context(self.span(step))
        with self._tracer.start_as_current_span(BATCH_SPAN, context=inside, attributes={"rl.step": step}) as span:
            yield span

    def end(self, step: int, attributes: Mapping[str, float]) -> None:
        """The step's version is committed, or was skipped."""
        if span := self._open.pop(step, None):
            span.set_attributes(dict(attributes))
            span.end()

    def close(self) -> None:
        """The run is over: ends the spans of steps that were not finished."""
        for span in self._open.values():
            span.set_status(trace.Status(trace.StatusCode.ERROR, "the run ended first"))
            span.end()
        self._open.clear()
