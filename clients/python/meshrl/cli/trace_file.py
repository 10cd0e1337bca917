"""Reads the spans in traces/: OTLP JSON lines, each a zstd frame; those of earlier versions are plain.

An incomplete frame is read at the next look, a damaged one is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

from meshrl.wire.values import JsonObject

PATTERNS = ("*.jsonl", "*.jsonl.zst")
_FRAME = b"\x28\xb5\x2f\xfd"
_FIRST_BYTES = 4096
"""Searched first for the end of a frame; bytes behind it are copied."""


@dataclass(frozen=True, kw_only=True)
class RunSpan:
    """Times in seconds since 1970, and in whole microseconds, which nest exactly; ids in hex."""

    program: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    seconds: float
    start_us: int
    end_us: int
    attributes: JsonObject = field(default_factory=dict)
    links: tuple[str, ...] = ()
    process: int = 0
    """0 where no trace has it."""


def trace_files(folder: Path) -> list[Path]:
    """By name, whose first part is the program's."""
    return sorted(path for pattern in PATTERNS for path in folder.glob(pattern))


def read_lines(path: Path, begin: int = 0) -> tuple[list[bytes], int]:
    """The whole lines from byte `begin` on, and where to read on."""
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read()
    if path.suffix != ".zst":
        whole, end, _ = data.rpartition(b"\n")
        return whole.split(b"\n") if end else [], begin + len(whole) + len(end)
    lines, at = list[bytes](), 0
    while at < len(data):
        try:
            frame = _frame(memoryview(data)[at:])
        except zstandard.ZstdError:  # damaged: it goes on with the next frame
            if (found := data.find(_FRAME, at + 1)) < 0:
                break
            at = found
            continue
        if frame is None:  # being written
            break
        text, length = frame
        lines += text.split(b"\n")[:-1]
        at += length
    return lines, begin + at


def _frame(data: memoryview) -> tuple[bytes, int] | None:
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    parts, at, step = list[bytes](), 0, _FIRST_BYTES
    while at < len(data):
        parts.append(decompressor.decompress(data[at : at + step]))
        at = min(at + step, len(data))
        if decompressor.eof:
            return b"".join(parts), at - len(decompressor.unused_data)
        step *= 2
    return None


def spans_of(path: Path, lines: list[bytes]) -> Iterator[RunSpan]:
    """Lines that are not OTLP JSON are left out."""
    program = path.name.partition(".")[0]
    for line in lines:
        try:
            exported = json.loads(line)
        except ValueError:  # cut off by a full disk
            continue
        for resource in exported.get("resourceSpans", ()):
            process = _attributes(resource.get("resource", {})).get("process.pid", 0)
            for scope in resource.get("scopeSpans", ()):
                for span in scope.get("spans", ()):
                    yield _span(program, int(process), span)


def _span(program: str, process: int, raw: JsonObject) -> RunSpan:
    start, end = int(raw["startTimeUnixNano"]), int(raw["endTimeUnixNano"])
    return RunSpan(
        program=program,
        name=raw["name"],
        trace_id=raw["traceId"],
        span_id=raw["spanId"],
        parent_id=raw.get("parentSpanId", ""),
        start_s=start / 1e9,
        seconds=(end - start) / 1e9,
        start_us=start // 1000,
        end_us=end // 1000,
        attributes=_attributes(raw),
        links=tuple(link["spanId"] for link in raw.get("links", ())),
        process=process,
    )


def _attributes(described: JsonObject) -> JsonObject:
    return {pair["key"]: next(iter(pair["value"].values()), None) for pair in described.get("attributes", ())}
