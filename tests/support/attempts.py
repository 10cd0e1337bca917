"""Tries of an attacker, each of which must be refused, beside the controls that show what is refused else works."""

from __future__ import annotations

import os
from pathlib import Path


class Attempts:
    """Checks each try, and appends it to the file that MESHRL_TRIES_LOG names, if any."""

    def __init__(self, how: str) -> None:
        """how: in what surroundings, for the log."""
        self.lines: list[str] = []
        self._write(f"# Tried {how}")

    def refused(self, what: str, succeeded: bool, said: str) -> None:
        """A try that must not have succeeded."""
        self._write(f"{'SUCCEEDED' if succeeded else 'refused'}: {what!r}: {said[:300]}")
        assert not succeeded, f"{what}: {said}"

    def control(self, what: str, succeeded: bool, said: str) -> None:
        """Something that must succeed, so that the tries are refused for what they are."""
        self._write(f"{'works' if succeeded else 'FAILED'}: {what!r}: {said[:300]}")
        assert succeeded, f"{what}: {said}"

    def _write(self, line: str) -> None:
        self.lines.append(line)
        log = os.environ.get("MESHRL_TRIES_LOG")
        if log:
            with Path(log).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
