"""Looks at the end of metrics.jsonl when an orchestrator starts: which steps were logged, and which evaluated."""

from __future__ import annotations

import os
from pathlib import Path

from meshrl.wire.growing_file import json_records, lines_from_the_end, whole_size


def end_whole(path: Path) -> int:
    """Cuts off a last line that a killed process left half written; returns the size of the file then."""
    size = whole_size(path)
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)
    return size


def last_logged_step(path: Path, offset: int) -> int:
    """The last step with a record after `offset`, 0 without one; evaluations have records of their own.

    Read from the end: records of steps that were done again follow those of later steps, and have a flag.
    """
    for record in json_records(lines_from_the_end(path, offset)):
        if "time/step" in record and "progress/redone" not in record:
            return int(record["step"])
    return 0


def last_evaluated_step(path: Path, offset: int) -> int:
    """The step of the last record of an evaluation after `offset`, 0 without one."""
    lines = (line for line in lines_from_the_end(path, offset) if b'"eval/version"' in line)
    return next((int(record["step"]) for record in json_records(lines)), 0)
