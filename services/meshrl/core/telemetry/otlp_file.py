"""Writes spans as OTLP JSON lines: one ExportTraceServiceRequest a line, each line a zstd frame of its own.

Fed by the tracing of every program; `zstd -dc` gives the lines, which collectors read as they are. OTLP's mapping to
JSON is protobuf's (64-bit integers as strings, enums as numbers), but for the ids of traces and spans, which are
hexadecimal. It is made from the spans directly: by way of protobuf messages a span costs three times the time.
"""

from __future__ import annotations

import base64
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any

import zstandard
from loguru import logger
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext, StatusCode

from meshrl.core.durable import append_whole


class JsonLinesSpanExporter(SpanExporter):
    """Appends each batch of spans to a file as one frame; runs on the thread of its span processor.

    With `max_bytes` the file is moved to `NAME.1.jsonl.zst` when it holds half of that, in place of the one moved
    before: the two hold the latest spans, at most `max_bytes` of them but for a single frame that is longer. What is
    removed is said in the log.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file: FileIO | None = None
        self._size = 0
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes one frame; a disk that is full loses the batch and says so, but never stops the program."""
        try:
            line = json.dumps(export_request(spans), separators=(",", ":")).encode() + b"\n"
            frame = zstandard.ZstdCompressor().compress(line)
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
        """Moves the full file aside. What it replaces is the oldest there is."""
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
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Does nothing: each frame is written at once."""
        return True


def export_request(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Returns an ExportTraceServiceRequest as OTLP writes it in JSON. The spans are of one provider."""
    scopes: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        scopes[span.instrumentation_scope.name if span.instrumentation_scope else ""].append(_span(span))
    if not spans:
        return {"resourceSpans": []}
    resource = {"attributes": _attributes(spans[0].resource.attributes)}
    of_scopes = [{"scope": {"name": name}, "spans": found} for name, found in scopes.items()]
    return {"resourceSpans": [{"resource": resource, "scopeSpans": of_scopes}]}


def _span(span: ReadableSpan) -> dict[str, Any]:
    written: dict[str, Any] = _ids(span.get_span_context())
    if span.parent is not None:
        written["parentSpanId"] = f"{span.parent.span_id:016x}"
    written |= {
        "name": span.name,
        "kind": span.kind.value + 1,  # OTLP's begin with one for what is not said
        "startTimeUnixNano": str(span.start_time or 0),
        "endTimeUnixNano": str(span.end_time or 0),
    }
    if span.attributes:
        written["attributes"] = _attributes(span.attributes)
    if span.events:
        written["events"] = [
            {"timeUnixNano": str(event.timestamp), "name": event.name, "attributes": _attributes(event.attributes)}
            for event in span.events
        ]
    if span.links:
        written["links"] = [_link(link) for link in span.links]
    if span.status.status_code is not StatusCode.UNSET:
        written["status"] = {"code": span.status.status_code.value}
        if span.status.description:
            written["status"]["message"] = span.status.description
    for name, lost in (("Attributes", span.dropped_attributes), ("Links", span.dropped_links)):
        if lost:
            written[f"dropped{name}Count"] = lost
    return written


def _link(link: Link) -> dict[str, Any]:
    attributes = {"attributes": _attributes(link.attributes)} if link.attributes else {}
    return _ids(link.context) | attributes


def _ids(context: SpanContext | None) -> dict[str, Any]:
    assert context is not None  # the SDK's spans have one
    ids = {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}
    return ids | {"traceState": context.trace_state.to_header()} if context.trace_state else ids


def _attributes(attributes: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in (attributes or {}).items()]


def _value(value: object) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case str():
            return {"stringValue": value}
        case int():
            return {"intValue": str(value)}
        case float() if math.isnan(value):
            return {"doubleValue": "NaN"}
        case float() if math.isinf(value):
            return {"doubleValue": "Infinity" if value > 0 else "-Infinity"}
        case float():
            return {"doubleValue": value}
        case bytes():
            return {"bytesValue": base64.b64encode(value).decode()}
        case Mapping():
            return {"kvlistValue": {"values": _attributes(value)}}
        case Sequence():
            return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {}
