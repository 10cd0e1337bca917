"""Each completion has a span: how long it waited, was prefilled and decoded, its tokens, and its version's commit."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from meshrl.inference.agent.agent import apply_span
from meshrl.inference.agent.version_loader import PreparedVersion
from meshrl.inference.engine import GenerateRequest, SamplingParams
from meshrl.inference.http.runs import VERSION_HEADER
from meshrl.inference.http.spans import CompletionSpans
from meshrl.wire.completion_frame import MEDIA_TYPE
from meshrl.wire.errors import MeshError
from meshrl.wire.trace import parse_traceparent, sync_context
from meshrl.wire.types import Manifest, Transport, VersionSpan

ROOT = b"r" * 32


@pytest.fixture
def finished() -> tuple[TracerProvider, InMemorySpanExporter]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


def request(*prompt: int, stream: bool = False) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", prompt_ids=prompt, sampling=SamplingParams(max_tokens=6, ignore_eos=True), stream=stream
    )


def the_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    assert span.kind is SpanKind.SERVER
    return span


async def test_a_completion_says_its_tokens_its_versions_and_where_its_time_went(start_engine, finished) -> None:
    provider, exporter = finished
    engine = await start_engine()
    await engine.adopt(3, ROOT)
    spans = CompletionSpans(engine, "tiny", provider.get_tracer("test"))
    async with aclosing(spans.generate(request(5, 6, 7))) as chunks:
        assert [len(chunk.token_ids) async for chunk in chunks] == [6]
    span = the_span(exporter)
    assert span.name == "text_completion tiny"
    attributes = dict(span.attributes or {})
    times_s = [attributes.pop(f"meshrl.{part}_s") for part in ("queue", "prefill", "decode")]
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ("length",),
        "meshrl.versions": (3,),
    }
    assert all(seconds >= 0.0 for seconds in times_s)
    assert sum(times_s) <= (span.end_time - span.start_time) / 1e9 + 0.001
    assert parse_traceparent(spans.syncs([VersionSpan(start=0, end=6, version=3)])) == sync_context(3, ROOT)
    assert spans.syncs([VersionSpan(start=0, end=6, version=2)]) == ""


async def test_completions_that_fail_or_are_left_are_recorded_as_such(start_engine, finished) -> None:
    provider, exporter = finished
    spans = CompletionSpans(await start_engine(), "tiny", provider.get_tracer("test"))
    with pytest.raises(MeshError):
        await anext(spans.generate(request()))
    failed = the_span(exporter)
    assert not failed.status.is_ok
    assert "the prompt has 0 tokens" in (failed.status.description or "")
    exporter.clear()
    async with aclosing(spans.generate(request(5, stream=True))) as chunks:
        await anext(chunks)
    left = the_span(exporter)
    assert left.attributes is not None
    assert left.attributes["meshrl.left"] is True


async def test_an_answer_names_the_commit_that_its_version_came_by(start_engine, serve) -> None:
    engine = await start_engine()
    await engine.adopt(3, ROOT)
    client = await serve(engine)
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "logprobs": 1}}
    reply = await client.post("/inference/v1/generate", json=body, headers={"Accept": MEDIA_TYPE})
    assert reply.headers[VERSION_HEADER] == "3"
    assert parse_traceparent(reply.headers["X-Policy-Syncs"]) == sync_context(3, ROOT)


def test_the_swap_of_a_version_is_in_the_trace_of_its_commit(
    finished: tuple[TracerProvider, InMemorySpanExporter],
) -> None:
    provider, exporter = finished
    manifest = Manifest(
        run_id="main", epoch=1, version=3, transport=Transport.STREAM, result_root=ROOT, layout_signature=b"",
        tensors=(), chunks=(),
    )  # fmt: skip
    prepared = PreparedVersion(
        manifest=manifest,
        artifact_id="artifact",
        adopt=False,
        prepare_s=0.25,
        parts={"fetched": 0.125, "staged": 0.0625},
    )
    with apply_span(3, prepared, "e0", provider.get_tracer("test")) as span:
        assert trace.get_current_span() is span
    (found,), commit = exporter.get_finished_spans(), sync_context(3, ROOT)
    assert found.name == "rl.sync.apply"
    assert found.parent == commit
    assert found.attributes == {
        "meshrl.version": 3, "meshrl.engine_id": "e0", "meshrl.artifact_id": "artifact", "meshrl.prepare_s": 0.25,
        "meshrl.prepare.fetched_s": 0.125, "meshrl.prepare.staged_s": 0.0625,
    }  # fmt: skip
