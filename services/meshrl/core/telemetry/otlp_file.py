"""Writes spans as OTLP JSON lines: one ExportTraceServiceRequest a line, which collectors read as it is.

Fed by the tracing of every program. OTLP's mapping to JSON is protobuf's (bytes in base64, 64-bit integers as strings,
enums as numbers), but for the ids of traces and spans, which are hexadecimal.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from google.protobuf.json_format import MessageToDict
from loguru import logger
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_IDS = frozenset({"traceId", "spanId", "parentSpanId"})
"""Protobuf's JSON has these in base64, OTLP's in hexadecimal."""


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
    """Returns an ExportTraceServiceRequest as OTLP writes it in JSON."""
    request: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for of_resource in request.get("resourceSpans", ()):
        for of_scope in of_resource["scopeSpans"]:
            for span in of_scope["spans"]:
                for holder in (span, *span.get("links", ())):
                    for key in _IDS & holder.keys():
                        holder[key] = base64.b64decode(holder[key]).hex()
    return request
