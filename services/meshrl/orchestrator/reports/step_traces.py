"""The trace of a step: `rl.step`, from the first rollout dispatched for it to its version committed."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace

from meshrl.core.telemetry.tracing import STEP_SPAN, traceparent_of


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
