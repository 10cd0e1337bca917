"""Reads the spans that programs write below traces/: OTLP JSON lines, each a zstd frame of its own.

Files of earlier versions are plain lines. An incomplete frame is left for the next look, a damaged one is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import zstandard

from meshrl.wire.values import JsonObject

PATTERNS = ("*.jsonl", "*.jsonl.zst")
_FRAME = b"\x28\xb5\x2f\xfd"
_FIRST_BYTES = 4096
"""The end of a frame is looked for in these first; what is behind it is copied."""


def trace_files(folder: Path) -> list[Path]:
    """By name; what stands before the first dot names the program."""
    return sorted(path for pattern in PATTERNS for path in folder.glob(pattern))


def read_lines(path: Path, begin: int = 0) -> tuple[list[bytes], int]:
    """The readable whole lines from byte `begin` on, and where to read on."""
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


def spans_of(lines: list[bytes]) -> Iterator[JsonObject]:
    """In OTLP's JSON form; a line that is none is left out."""
    for line in lines:
        try:
            exported = json.loads(line)
        except ValueError:  # cut off by a full disk
            continue
        for resource in exported.get("resourceSpans", ()):
            about = resource.get("resource", {}).get("attributes", ())
            process = next((int(one["value"]["intValue"]) for one in about if one["key"] == "process.pid"), 0)
            for scope in resource.get("scopeSpans", ()):
                for span in scope.get("spans", ()):
                    span["process"] = process
                    yield span
