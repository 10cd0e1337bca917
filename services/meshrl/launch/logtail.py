"""Shows a log file as it grows, and reads the last lines of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from meshrl.wire.growing_file import GrowingFile, lines_from_the_end

LAST_LINES = 20
_LEAK_REPORT = ("nanobind: ", " - leaked ", " - ... skipped", "See https://nanobind.")
"""First words of lines that a library of vLLM writes when Python ends, after the error that explains the end."""


class LogTail:
    def __init__(self, path: Path, show: Callable[[str], object]) -> None:
        self._file = GrowingFile(path, path.stat().st_size if path.exists() else 0)
        self._show = show

    async def follow(self, poll_s: float) -> None:
        while True:
            self.read()
            await asyncio.sleep(poll_s)

    def read(self) -> None:
        for line in self._file.read_on():
            self._show(line.decode(errors="replace") + "\n")


def last_lines(path: Path, start: int = 0) -> list[str]:
    """The last whole lines of a file, none from before byte `start`, and none of a report of leaks."""
    lines = (line.decode(errors="replace") for line in lines_from_the_end(path, start))
    return [*islice((line for line in lines if not line.startswith(_LEAK_REPORT)), LAST_LINES)][::-1]
