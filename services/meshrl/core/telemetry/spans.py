"""A tracer whose spans cost a fraction of OpenTelemetry's own; used by the tracing of every program.

A span is a plain object until it ends, and only then becomes the SDK's `ReadableSpan`, which processors and exporters
get as from any other tracer. What makes it cheap: attributes are not cleaned one by one, there is no lock (a span
belongs to the task that started it) and the default sampler is asked nothing. The sampler and the limits are those of
OpenTelemetry's environment variables.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Decision
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AnyValue, Attributes

ThingT = TypeVar("ThingT")


_UNSET = Status(StatusCode.UNSET)


class SpanProvider(TracerProvider):
    """OpenTelemetry's provider, whose tracers make the spans of this module."""

    def __init__(self, resource: Resource, limits: SpanLimits, ids: IdGenerator) -> None:
        super().__init__(resource=resource, span_limits=limits, id_generator=ids, shutdown_on_exit=False)
        self.limits = limits
        self.processors: tuple[SpanProcessor, ...] = ()

    def add_span_processor(self, span_processor: SpanProcessor) -> None:
        """Adds what gets each span that ends, also those of tracers that exist already."""
        super().add_span_processor(span_processor)
        self.processors += (span_processor,)

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> trace.Tracer:
        """Returns a tracer; with OTEL_SDK_DISABLED, OpenTelemetry's own one that makes nothing."""
        sdk = super().get_tracer(instrumenting_module_name, instrumenting_library_version, schema_url, attributes)
        if isinstance(sdk, trace.NoOpTracer):
            return sdk
        scope = InstrumentationScope(
            instrumenting_module_name, instrumenting_library_version or "", schema_url, attributes
        )
        return SpanTracer(self, scope)


class SpanTracer(trace.Tracer):
    """Starts the spans of one instrumentation scope."""

    def __init__(self, provider: SpanProvider, scope: InstrumentationScope) -> None:
        self.provider = provider
        self.scope = scope

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[trace.Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> trace.Span:
        """Starts a span under the context's one, at `start_time` in nanoseconds or now.

        What is raised is recorded by `start_as_current_span` alone, so that the last two change nothing here.
        """
        parent: SpanContext | None = trace.get_current_span(context).get_span_context()
        ids, sampler = self.provider.id_generator, self.provider.sampler
        if parent is None or not parent.is_valid:
            parent, trace_id, random_id = None, ids.generate_trace_id(), ids.is_trace_id_random()
        else:
            trace_id, random_id = parent.trace_id, bool(parent.trace_flags & TraceFlags.RANDOM_TRACE_ID)
        state = None if parent is None else parent.trace_state
        if sampler is DEFAULT_ON:  # it takes what begins a trace, and otherwise what was decided there
            sampled = recording = parent is None or bool(parent.trace_flags & TraceFlags.SAMPLED)
        else:
            answer = sampler.should_sample(context, trace_id, name, kind, attributes, links)
            sampled = answer.decision is Decision.RECORD_AND_SAMPLE
            recording = answer.decision is not Decision.DROP
            attributes, state = answer.attributes, answer.trace_state
        flags = TraceFlags(sampled * TraceFlags.SAMPLED | random_id * TraceFlags.RANDOM_TRACE_ID)
        own = SpanContext(trace_id, ids.generate_span_id(), False, flags, state)
        if not recording:
            return trace.NonRecordingSpan(own)
        start_ns = time.time_ns() if start_time is None else start_time
        span = RecordedSpan(self, name, own, parent, kind, start_ns)
        if attributes:
            span.set_attributes(attributes)
        if links:
            span.add_links(links)
        return span

    def start_as_current_span(
        self,
        name: str,
        *args: Any,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
        **kwargs: Any,
    ) -> Any:  # what OpenTelemetry returns has no public type
        """Starts a span that is current inside the `with` block, ends with it, and records what it raises."""
        span = self.start_span(name, *args, **kwargs)
        return trace.use_span(span, end_on_exit, record_exception, set_status_on_exception)


class RecordedSpan(trace.Span):
    """A span that goes to the processors when it ends. What is set afterwards is ignored."""

    def __init__(
        self,
        tracer: SpanTracer,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        start_ns: int,
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._context = context
        self._parent = parent
        self._kind = kind
        self._status = _UNSET
        self._start_ns = start_ns
        self._ended = False
        self._attributes: dict[str, AnyValue] = {}
        self._events: list[Event] = []
        self._links: list[trace.Link] = []

    def get_span_context(self) -> SpanContext:
        return self._context

    def is_recording(self) -> bool:
        return not self._ended

    def set_attributes(self, attributes: Mapping[str, AnyValue]) -> None:
        if not self._ended:
            self._attributes.update(attributes)

    def set_attribute(self, key: str, value: AnyValue) -> None:
        if not self._ended:
            self._attributes[key] = value

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        if not self._ended:
            limits = self._tracer.provider.limits
            self._events.append(
                Event(
                    name, _within(attributes or {}, limits.max_event_attributes, limits.max_attribute_length), timestamp
                )
            )

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        self.add_links([trace.Link(context, attributes)])

    def add_links(self, links: Sequence[trace.Link]) -> None:
        """Adds links; one without target and attributes is left out."""
        if self._ended:
            return
        limits = self._tracer.provider.limits
        for link in links:
            if link.attributes:
                attributes = _within(link.attributes, limits.max_link_attributes, limits.max_attribute_length)
                self._links.append(trace.Link(link.context, attributes))
            elif link.context.is_valid:
                self._links.append(link)

    def update_name(self, name: str) -> None:
        if not self._ended:
            self._name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Sets the outcome; OK is final, as OpenTelemetry has it."""
        if isinstance(status, StatusCode):
            status = Status(status, description)
        if not self._ended and not status.is_unset and self._status.status_code is not StatusCode.OK:
            self._status = status

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Adds the event that OpenTelemetry's conventions have for an exception."""
        kind = type(exception)
        described = {
            "exception.type": kind.__qualname__
            if kind.__module__ == "builtins"
            else f"{kind.__module__}.{kind.__qualname__}",
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", {**described, **(attributes or {})}, timestamp)

    def end(self, end_time: int | None = None) -> None:
        """Hands the span to the processors; the second time it does nothing."""
        if self._ended:
            return
        self._ended = True
        provider = self._tracer.provider
        limits = provider.limits
        finished = ReadableSpan(
            self._name,
            self._context,
            self._parent,
            provider.resource,
            _within(self._attributes, limits.max_span_attributes, limits.max_span_attribute_length),
            _last(self._events, limits.max_events),
            _last(self._links, limits.max_links),
            self._kind,
            None,
            self._status,
            self._start_ns,
            time.time_ns() if end_time is None else end_time,
            self._tracer.scope,
        )
        for processor in provider.processors:
            processor.on_end(finished)


def _within(attributes: Mapping[str, AnyValue], most: int | None, longest: int | None) -> Mapping[str, AnyValue]:
    """The attributes as they are, or no more than `most` of them and each cut to `longest` characters."""
    if longest is None and (most is None or len(attributes) <= most):
        return attributes
    return BoundedAttributes(most, attributes, max_value_len=longest)


def _last(things: list[ThingT], most: int | None) -> Sequence[ThingT]:
    """All of them, or the last `most`; what is left out is counted."""
    return things if most is None or len(things) <= most else BoundedList.from_seq(most, things)
