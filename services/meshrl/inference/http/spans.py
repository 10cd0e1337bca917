"""The trace of each completion: a span with its waiting, prefill and decoding times, its tokens and versions.

Attributes follow OpenTelemetry's conventions for generative AI; others begin with `meshrl.`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from meshrl.inference.engine import Engine, GenerateRequest, TokenChunk
from meshrl.wire.trace import format_traceparent, sync_context
from meshrl.wire.types import VersionSpan

REMEMBERED_VERSIONS = 64


class CompletionSpans:
    def __init__(self, engine: Engine, model_name: str, tracer: trace.Tracer | None = None) -> None:
        self._engine = engine
        self._model_name = model_name
        self._tracer = tracer or trace.get_tracer("meshrl.inference")
        self._syncs: dict[int, str] = {}

    def syncs(self, versions: Sequence[VersionSpan]) -> str:
        """Of the commits that brought these versions, for the answer's header."""
        known = (self._syncs.get(span.version, "") for span in versions)
        return ",".join(dict.fromkeys(traceparent for traceparent in known if traceparent))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yields the engine's chunks. A failed or abandoned completion is recorded as such."""
        self._note_version()
        span = self._tracer.start_span(f"text_completion {self._model_name}", kind=SpanKind.SERVER)
        tokens, versions = 0, list[int]()
        last: TokenChunk | None = None
        try:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for last in chunks:
                    tokens += len(last.token_ids)
                    versions += [each.version for each in last.version_spans]
                    if last.finish_reason is not None:
                        self._note_version()
                    yield last
        except Exception as error:  # whatever it is: the span says so, and it goes on to who asked
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            if span.is_recording():
                span.set_attributes(
                    {
                        "gen_ai.operation.name": "text_completion",
                        "gen_ai.usage.input_tokens": len(request.prompt_ids),
                        "gen_ai.usage.output_tokens": tokens,
                        "meshrl.versions": list(dict.fromkeys(versions)),
                    }
                )
                if last is None or last.finish_reason is None:
                    span.set_attribute("meshrl.left", True)
                else:
                    span.set_attribute("gen_ai.response.finish_reasons", (last.finish_reason.value,))
                if last is not None and last.times is not None:
                    for part, seconds in asdict(last.times).items():
                        span.set_attribute(f"meshrl.{part}", round(seconds, 4))
            span.end()

    def _note_version(self) -> None:
        served = [(self._engine.version, self._engine.root)]
        served += [(adapter.version, adapter.root) for adapter in self._engine.runs.values()]
        for version, root in served:
            if version is not None and root:  # else it was loaded by hand: no hub brought it
                self._syncs.setdefault(version, format_traceparent(sync_context(version, root)))
        while len(self._syncs) > REMEMBERED_VERSIONS:
            del self._syncs[min(self._syncs)]
