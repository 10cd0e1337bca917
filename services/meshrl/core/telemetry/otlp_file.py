"""Writes spans as OTLP JSON lines: one ExportTraceServiceRequest a line, as collectors and `meshrl trace` read them.

The mapping is OTLP's for JSON: ids in hexadecimal, other bytes in base64, 64-bit integers as strings, enums as numbers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from loguru import logger
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode

_KINDS: Mapping[SpanKind, int] = {
    SpanKind.INTERNAL: 1,
    SpanKind.SERVER: 2,
    SpanKind.CLIENT: 3,
    SpanKind.PRODUCER: 4,
    SpanKind.CONSUMER: 5,
}
_STATUSES: Mapping[StatusCode, int] = {StatusCode.UNSET: 0, StatusCode.OK: 1, StatusCode.ERROR: 2}


class JsonLinesSpanExporter(SpanExporter):
    """Appends each batch of spans to a file as one line; runs on the thread of its span processor.

    With `max_bytes` the file is moved to `NAME.1.jsonl` when it holds half of that, in place of the one moved before:
    the two hold the latest spans, at most `max_bytes` of them but for a single line that is longer. What is removed is
    said in the log.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file: TextIO | None = None
        self._size = 0
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes one line; a disk that is full loses the batch and says so, but never stops the program."""
        try:
            line = json.dumps(export_request(spans), separators=(",", ":")) + "\n"  # ASCII: a character is a byte
            if self._file is None:
                self._open()
            if self._max_bytes is not None and self._size and self._size + len(line) > self._max_bytes // 2:
                self._rotate(self._max_bytes)
            assert self._file is not None  # opened above
            self._file.write(line)
            self._file.flush()
            self._size += len(line)
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
        self._file = self._path.open("a", encoding="utf-8")
        self._size = self._path.stat().st_size

    def _rotate(self, max_bytes: int) -> None:
        """Moves the full file aside. What it replaces is the oldest there is."""
        earlier = self._path.with_suffix(f".1{self._path.suffix}")
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
        """Does nothing: each line is flushed as it is written."""
        return True


def export_request(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Returns an ExportTraceServiceRequest; the spans are of one resource."""
    by_scope: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        scope = span.instrumentation_scope
        by_scope.setdefault(scope.name if scope is not None else "", []).append(span_to_json(span))
    resource = spans[0].resource.attributes if spans else {}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": {"name": name}, "spans": group} for name, group in by_scope.items()],
            }
        ]
    }


def span_to_json(span: ReadableSpan) -> dict[str, Any]:
    """Returns one span in OTLP's JSON form."""
    context = span.get_span_context()
    if context is None:
        raise ValueError(f"span {span.name} has no context")
    out: dict[str, Any] = {
        **_ids(context),
        "flags": int(context.trace_flags),
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_time or 0),
        "endTimeUnixNano": str(span.end_time or 0),
        "attributes": _attributes(span.attributes or {}),
        "status": _status(span),
    }
    if context.trace_state:
        out["traceState"] = context.trace_state.to_header()
    if span.parent is not None:
        out["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.events:
        out["events"] = [
            {
                "timeUnixNano": str(event.timestamp),
                "name": event.name,
                "attributes": _attributes(event.attributes or {}),
            }
            for event in span.events
        ]
    if span.links:
        out["links"] = [_link(link) for link in span.links]
    if span.dropped_links:
        out["droppedLinksCount"] = span.dropped_links
    return out


def _ids(context: SpanContext) -> dict[str, str]:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _link(link: Link) -> dict[str, Any]:
    return {**_ids(link.context), "attributes": _attributes(link.attributes or {})}


def _status(span: ReadableSpan) -> dict[str, Any]:
    status: dict[str, Any] = {"code": _STATUSES[span.status.status_code]}
    if span.status.description:
        status["message"] = span.status.description
    return status


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, bytes):
        return {"bytesValue": base64.b64encode(value).decode()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}
