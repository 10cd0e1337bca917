"""Reads lines of files that another process appends to: logs, and JSON lines such as metrics.jsonl.

A last line without its end is left: it is being written, or was cut off by a kill.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from meshrl.wire.values import JsonObject

_BLOCK_BYTES = 2**14
_READ_BYTES = 2**22


class GrowingFile:
    """Not for several threads."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        """Where the next line begins."""

    def shrank(self) -> bool:
        """Whether it was begun anew, and is read from its beginning."""
        try:
            return self.path.stat().st_size < self.offset
        except FileNotFoundError:
            return self.offset > 0

    def read_on(self) -> Iterator[bytes]:
        """New whole lines, without their ends; none of a missing file."""
        if self.shrank():
            self.offset = 0
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                rest = b""
                while data := file.read(_READ_BYTES):
                    whole, end, rest = (rest + data).rpartition(b"\n")
                    self.offset += len(whole) + len(end)
                    if end:
                        yield from whole.split(b"\n")
        except FileNotFoundError:
            return


def whole_size(path: Path) -> int:
    """Up to the end of the last whole line; 0 without a file."""
    try:
        with path.open("rb") as file:
            for start, block in _blocks_from_the_end(file, 0):
                if (end := block.rfind(b"\n")) >= 0:
                    return start + end + 1
    except FileNotFoundError:
        pass
    return 0


def lines_from_the_end(path: Path, offset: int = 0) -> Iterator[bytes]:
    """The whole lines after `offset`, the last first; none of a missing file."""
    try:
        with path.open("rb") as file:
            rest = b""
            torn = True  # what follows the last end of a line
            for start, block in _blocks_from_the_end(file, offset):
                lines = (block + rest).split(b"\n")
                rest = b"" if start == offset else lines.pop(0)  # its beginning is in the block before
                if torn and lines:
                    lines.pop()
                    torn = False
                yield from reversed(lines)
    except FileNotFoundError:
        return


def json_records(lines: Iterable[bytes]) -> Iterator[JsonObject]:
    """Skips what is no JSON object: damaged lines, or those cut off by a full disk."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def _blocks_from_the_end(file: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """After `offset`, the last block first, each with its offset."""
    end = file.seek(0, os.SEEK_END)
    while end > offset:
        start = max(offset, end - _BLOCK_BYTES)
        file.seek(start)
        yield start, file.read(end - start)
        end = start
