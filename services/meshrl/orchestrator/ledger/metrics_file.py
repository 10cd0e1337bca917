"""Looks at the end of metrics.jsonl: where its last whole line ends, and which step was logged last.

Read when an orchestrator starts; the file may be long, so it is read from its end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BLOCK_BYTES = 2**16


def end_whole(path: Path) -> int:
    """Cuts off a last line that a killed process left half written; returns the size of the file then."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        for start, block in _blocks_from_the_end(file, 0):
            if (end := block.rfind(b"\n")) >= 0:
                whole = start + end + 1
                break
        else:
            whole = 0
        if whole < size:
            file.truncate(whole)
    return whole


def last_logged_step(path: Path, offset: int) -> int:
    """The last step with a record after `offset`, 0 without one; evaluations have records of their own.

    Read from the end: records of steps that were done again follow those of later steps, and say so.
    """
    if not path.exists():
        return 0
    rest = b""
    with path.open("rb") as file:
        for start, block in _blocks_from_the_end(file, offset):
            lines = (block + rest).split(b"\n")
            rest = b"" if start == offset else lines.pop(0)  # its beginning is in the block before
            for line in reversed(lines):
                try:
                    record = json.loads(line) if line else {}
                except ValueError:  # damaged: the audit names it, and the line before it tells as much
                    continue
                if "time/step" in record and "progress/redone" not in record:
                    return int(record["step"])
    return 0


def _blocks_from_the_end(file: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """The bytes after `offset` in blocks, the last one first, with the place where each begins."""
    end = file.seek(0, os.SEEK_END)
    while end > offset:
        start = max(offset, end - _BLOCK_BYTES)
        file.seek(start)
        yield start, file.read(end - start)
        end = start
