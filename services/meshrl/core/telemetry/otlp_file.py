"""Writes spans as OTLP JSON lines: one ExportTraceServiceRequest a line, each line a zstd frame of its own.

OTLP's mapping to JSON is protobuf's (64-bit integers as strings, enums as numbers), but for the ids of traces and
spans, which are hexadecimal. It is made from the spans directly in 16 us each, where protobuf messages take 112 us.
"""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from io import FileIO
from json.encoder import encode_basestring_ascii as _text
from pathlib import Path

import zstandard
from loguru import logger
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext, StatusCode

from meshrl.core.durable import append_whole


class JsonLinesSpanExporter(SpanExporter):
    """Appends each batch of spans to a file as one frame, on the thread of its span processor.

    With `max_bytes` the file is moved to `NAME.1.jsonl.zst` when it holds half of that: the two hold the latest spans.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file: FileIO | None = None
        self._size = 0
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """A full disk loses the batch, but never stops the program."""
        try:
            frame = zstandard.ZstdCompressor().compress(f"{export_line(spans)}\n".encode())
            if self._file is None:
                self._open()
            if self._max_bytes is not None and self._size and self._size + len(frame) > self._max_bytes // 2:
                self._rotate(self._max_bytes)
            assert self._file is not None  # opened above
            append_whole(self._file, frame)
            self._size += len(frame)
        except OSError as error:  # telemetry is not worth a run
            if not self._failing:  # said once, not every second
                logger.warning(
                    "{} spans could not be written to {} ({}); free some space there, those made until then are lost",
                    len(spans), self._path, error.strerror,
                )  # fmt: skip
            self._failing = True
            return SpanExportResult.FAILURE
        self._failing = False
        return SpanExportResult.SUCCESS

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        self._size = self._path.stat().st_size

    def _rotate(self, max_bytes: int) -> None:
        earlier = self._path.with_name(self._path.name.replace(".jsonl", ".1.jsonl"))
        with suppress(FileNotFoundError):
            until = datetime.fromtimestamp(earlier.stat().st_mtime).astimezone()
            logger.info(
                "traces: the spans before {:%Y-%m-%d %H:%M:%S} are removed, {} and {} keep the latest {:g} MiB"
                " (log.traces_max_mib)",
                until, earlier.name, self._path.name, max_bytes / 2**20,
            )  # fmt: skip
        self.shutdown()
        self._path.replace(earlier)
        self._open()

    def shutdown(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Each frame is written at once."""
        return True


def export_line(spans: Sequence[ReadableSpan]) -> str:
    """The spans are of one provider."""
    if not spans:
        return '{"resourceSpans":[]}'
    scopes: defaultdict[str, list[str]] = defaultdict(list)
    for span in spans:
        scopes[span.instrumentation_scope.name if span.instrumentation_scope else ""].append(_span(span))
    of_scopes = ",".join(
        f'{{"scope":{{"name":{_text(name)}}},"spans":[{",".join(found)}]}}' for name, found in scopes.items()
    )
    resource = _attributes(spans[0].resource.attributes)
    return f'{{"resourceSpans":[{{"resource":{{"attributes":{resource}}},"scopeSpans":[{of_scopes}]}}]}}'


def _span(span: ReadableSpan) -> str:
    parts = [f"{{{_ids(span.get_span_context())}"]
    if span.parent is not None:
        parts.append(f'"parentSpanId":"{span.parent.span_id:016x}"')
    parts.append(  # OTLP's kinds begin with one for what is not said
        f'"name":{_text(span.name)},"kind":{span.kind.value + 1},'
        f'"startTimeUnixNano":"{span.start_time or 0}","endTimeUnixNano":"{span.end_time or 0}"'
    )
    if attributes := span.attributes:
        parts.append(f'"attributes":{_attributes(attributes)}')
    if events := span.events:
        parts.append(f'"events":[{",".join(map(_event, events))}]')
    if links := span.links:
        parts.append(f'"links":[{",".join(map(_link, links))}]')
    if (code := span.status.status_code) is not StatusCode.UNSET:
        message = f',"message":{_text(span.status.description)}' if span.status.description else ""
        parts.append(f'"status":{{"code":{code.value}{message}}}')
    for name, lost in (("Attributes", span.dropped_attributes), ("Links", span.dropped_links)):
        if lost:
            parts.append(f'"dropped{name}Count":{lost}')
    return ",".join(parts) + "}"


def _event(event: Event) -> str:
    attributes = _attributes(event.attributes)
    return f'{{"timeUnixNano":"{event.timestamp}","name":{_text(event.name)},"attributes":{attributes}}}'


def _link(link: Link) -> str:
    attributes = f',"attributes":{_attributes(link.attributes)}' if link.attributes else ""
    return f"{{{_ids(link.context)}{attributes}}}"


def _ids(context: SpanContext | None) -> str:
    assert context is not None  # the SDK's spans have one
    ids = f'"traceId":"{context.trace_id:032x}","spanId":"{context.span_id:016x}"'
    return f'{ids},"traceState":{_text(context.trace_state.to_header())}' if context.trace_state else ids


def _attributes(attributes: Mapping[str, object] | None) -> str:
    pairs = [f'{{"key":{_text(key)},"value":{_value(value)}}}' for key, value in (attributes or {}).items()]
    return f"[{','.join(pairs)}]"


def _value(value: object) -> str:
    match value:
        case str():
            return f'{{"stringValue":{_text(value)}}}'
        case bool():
            return f'{{"boolValue":{"true" if value else "false"}}}'
        case int():
            return f'{{"intValue":"{int(value)}"}}'
        case float() if math.isfinite(value):
            return f'{{"doubleValue":{float.__repr__(value)}}}'
        case float():
            return f'{{"doubleValue":"{"NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}"}}'
        case bytes():
            return f'{{"bytesValue":"{base64.b64encode(value).decode()}"}}'
        case Mapping():
            return f'{{"kvlistValue":{{"values":{_attributes(value)}}}}}'
        case Sequence():
            return f'{{"arrayValue":{{"values":[{",".join(map(_value, value))}]}}}}'
    return "{}"
