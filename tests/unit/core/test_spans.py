"""Our tracer makes the spans that OpenTelemetry's own makes, under the same environment variables."""

from contextlib import suppress

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from meshrl.core.telemetry.spans import SpanProvider
from meshrl.core.telemetry.tracing import MAX_LINKS, SpanIds, chosen_ids
from meshrl.wire.trace import context_from, links_from, sync_context

REMOTE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
RESOURCE = Resource({"service.name": "trainer"})
NOBODY = trace.SpanContext(0, 0, is_remote=True)


class CountedIds(RandomIdGenerator):
    """Ids that two tracers give alike."""

    def __init__(self):
        self.last = 0

    def generate_trace_id(self):
        return self.generate_span_id() << 64

    def generate_span_id(self):
        self.last += 1
        return self.last


def ours(ids=None):
    return SpanProvider(RESOURCE, SpanLimits(max_links=MAX_LINKS), ids or CountedIds())


def theirs():
    limits = SpanLimits(max_links=MAX_LINKS)
    return TracerProvider(resource=RESOURCE, span_limits=limits, id_generator=CountedIds(), shutdown_on_exit=False)


def made_by(provider, make):
    """The spans that `make` ends, in this order."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    make(provider.get_tracer("meshrl", "1.0"))
    provider.shutdown()
    return exporter.get_finished_spans()


def told(span):
    """Everything that an exporter reads of a span but for the times that a clock gave."""
    parent = span.parent and (span.parent.span_id, span.parent.is_remote)
    events = [
        (event.name, {key: value for key, value in event.attributes.items() if key != "exception.stacktrace"})
        for event in span.events
    ]
    links = [(link.context, dict(link.attributes or {})) for link in span.links]
    lost = (span.dropped_attributes, span.dropped_events, span.dropped_links)
    scope = span.instrumentation_scope
    return {
        "what": (span.name, span.kind, span.context, parent, span.resource, scope.name, scope.version),
        "attributes": dict(span.attributes),
        "events": events,
        "links": links,
        "status": (span.status.status_code, span.status.description),
        "lost": lost,
    }


def a_rollout(tracer):
    rollout = tracer.start_span(
        "rl.rollout",
        context=context.Context(),
        links=[*links_from([REMOTE]), trace.Link(NOBODY)],
        attributes={"meshrl.environment": "e"},
    )
    inside = trace.set_span_in_context(rollout)
    with tracer.start_as_current_span("chat", context=inside, kind=trace.SpanKind.CLIENT) as chat:
        chat.set_attributes({"gen_ai.operation.name": "chat", "meshrl.versions": (1, 2), "share": 0.5, "left": True})
        tracer.start_span("turn").end()
    rollout.add_link(sync_context(3, b"root"), {"rl.version": 3})
    rollout.add_link(NOBODY)
    rollout.add_event("scored", {"reward": 1.0})
    rollout.update_name("rl.rollout.renamed")
    rollout.set_status(trace.StatusCode.OK)
    rollout.set_status(trace.StatusCode.ERROR, "too late")
    rollout.end()


def a_failure(tracer):
    with suppress(ValueError), tracer.start_as_current_span("rl.train") as span:
        span.set_status(trace.Status(trace.StatusCode.UNSET))
        raise ValueError("bad")
    with tracer.start_as_current_span("rl.batch") as span:
        span.set_status(trace.StatusCode.ERROR, "no rows")


def under_a_remote_parent(tracer):
    for traceparent in (REMOTE, UNSAMPLED):
        span = tracer.start_span("rpc", context=context_from(traceparent), kind=trace.SpanKind.SERVER)
        with trace.use_span(span, end_on_exit=True):
            tracer.start_span("inner").end()


def more_than_the_limits(tracer):
    attributes = {f"key {number}": "x" * 50 for number in range(200)}
    links = [trace.Link(sync_context(number, b"root")) for number in range(MAX_LINKS + 5)]
    span = tracer.start_span("large", attributes=attributes, links=links)
    for number in range(200):
        span.add_event(f"event {number}")
    span.end()


MADE = [a_rollout, a_failure, under_a_remote_parent, more_than_the_limits]
VARIABLES = [
    {},
    {"OTEL_TRACES_SAMPLER": "always_off"},
    {"OTEL_TRACES_SAMPLER": "always_on"},
    {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"},
    {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "3", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "10"},
    {"OTEL_SDK_DISABLED": "true"},
]


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("variables", VARIABLES, ids=lambda variables: ",".join(variables.values()) or "no variables")
def test_a_span_is_the_one_that_opentelemetrys_own_tracer_makes(monkeypatch, make, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    expected = [told(span) for span in made_by(theirs(), make)]
    assert [told(span) for span in made_by(ours(), make)] == expected


def test_half_of_the_traces_are_sampled_whole(monkeypatch):
    """The other half is known by its traceparent, so that nobody further on records a part of it."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")

    def make(tracer):
        for _ in range(400):
            with tracer.start_as_current_span("rl.rollout"):
                tracer.start_span("chat").end()

    spans = made_by(ours(SpanIds()), make)
    assert 200 < len(spans) < 600, "400 are expected"
    traces = {span.context.trace_id for span in spans}
    assert len(spans) == 2 * len(traces)


def test_times_are_those_that_were_given_or_the_clocks():
    def make(tracer):
        tracer.start_span("told", start_time=5).end(7)
        tracer.start_span("clock").end()

    told_times, clock = made_by(ours(), make)
    assert (told_times.start_time, told_times.end_time) == (5, 7)
    assert told_times.end_time < clock.start_time <= clock.end_time


def test_what_is_set_after_the_end_is_ignored_and_a_span_ends_once():
    def make(tracer):
        span = tracer.start_span("rl.step")
        assert span.is_recording()
        span.end()
        assert not span.is_recording()
        span.set_attribute("late", 1)
        span.set_attributes({"later": 2})
        span.add_event("late")
        span.add_link(sync_context(1, b"root"))
        span.update_name("late")
        span.set_status(trace.StatusCode.ERROR)
        span.end()

    (span,) = made_by(ours(), make)
    assert (span.name, dict(span.attributes), span.events, span.links) == ("rl.step", {}, (), ())
    assert span.status.status_code is trace.StatusCode.UNSET


def test_a_span_has_the_ids_that_were_chosen_for_it():
    chosen = sync_context(7, b"root")

    def make(tracer):
        with chosen_ids(chosen):
            sync = tracer.start_span("rl.sync", context=context.Context())
        tracer.start_span("rl.sync.pause", context=trace.set_span_in_context(sync)).end()
        sync.end()

    pause, sync = made_by(ours(SpanIds()), make)
    assert (sync.context.trace_id, sync.context.span_id) == (chosen.trace_id, chosen.span_id)
    assert (pause.context.trace_id, pause.parent.span_id) == (chosen.trace_id, chosen.span_id)
