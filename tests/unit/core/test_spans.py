"""The spans of a run: ids that were chosen, sampling of whole traces, and room for the links of a batch."""

from opentelemetry import context, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshrl.core.telemetry.tracing import MAX_LINKS, SpanProvider, chosen_ids
from meshrl.wire.trace import sync_context


def made_by(make):
    """The spans that `make` ends, in this order."""
    exporter, provider = InMemorySpanExporter(), SpanProvider(Resource({"service.name": "trainer"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    make(provider.get_tracer("meshrl", "1.0"))
    provider.shutdown()
    return exporter.get_finished_spans()


def test_a_span_links_to_every_rollout_of_a_large_batch():
    def make(tracer):
        links = [trace.Link(sync_context(number, b"root")) for number in range(MAX_LINKS)]
        tracer.start_span("rl.train", links=links).end()

    (span,) = made_by(make)
    assert (len(span.links), span.dropped_links) == (MAX_LINKS, 0)


def test_half_of_the_traces_are_sampled_whole(monkeypatch):
    """The other half is known by its traceparent, so that nobody further on records a part of it."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")

    def make(tracer):
        for _ in range(400):
            with tracer.start_as_current_span("rl.rollout"):
                tracer.start_span("chat").end()

    spans = made_by(make)
    assert 200 < len(spans) < 600, "400 are expected"
    traces = {span.context.trace_id for span in spans}
    assert len(spans) == 2 * len(traces)


def test_a_span_has_the_ids_that_were_chosen_for_it():
    chosen = sync_context(7, b"root")

    def make(tracer):
        with chosen_ids(chosen):
            sync = tracer.start_span("rl.sync", context=context.Context())
        tracer.start_span("rl.sync.pause", context=trace.set_span_in_context(sync)).end()
        sync.end()

    pause, sync = made_by(make)
    assert (sync.context.trace_id, sync.context.span_id) == (chosen.trace_id, chosen.span_id)
    assert (pause.context.trace_id, pause.parent.span_id) == (chosen.trace_id, chosen.span_id)
