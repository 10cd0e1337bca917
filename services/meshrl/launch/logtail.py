"""Shows a log file as it grows, and reads the last lines of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from meshrl.wire.growing_file import GrowingFile

LAST_LINES = 20
_LAST_BYTES = 64 * 1024
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
    """The last lines of a file, none from before byte `start`, and none of a report of leaks."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - _LAST_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if not line.startswith(_LEAK_REPORT)][-LAST_LINES:]
