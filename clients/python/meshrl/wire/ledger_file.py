"""Opens the ledger of a run to read it, for the commands that show a run."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path


def open_to_read(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing, except that it rolls back the half-written work of a killed orchestrator,
    without which a ledger with a rollback journal (on a network file system) cannot be read. Raises
    sqlite3.OperationalError for a missing or unreadable file."""
    journal = path.with_name(f"{path.name}-journal")
    half_written = journal.exists() and journal.stat().st_size > 0 and os.access(path, os.W_OK)
    mode = "rw" if half_written else "ro"
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, timeout=5.0)
