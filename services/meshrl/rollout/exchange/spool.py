"""The file in which a worker keeps its results until the orchestrator has them; written before anything is sent.

One process at a time has it open. Its calls block. An abandoned write goes on in its thread, and `close` waits for it:
SQLite crashes when a file is closed under a statement.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from meshrl.core.config import ConfigError
from meshrl.core.sqlite_files import prepare
from meshrl.rollout.exchange.outbox import SpooledEvent


class ResultSpool:
    """A write that has returned survives a power cut. Raises ConfigError on opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._in_use = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"exchange.spool {path} cannot be opened: {error}; name a file that can be") from error
        try:
            self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
            prepare(self._file, path, outlives_power_cuts=True)
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS events (call_id TEXT, seq INTEGER, message BLOB, is_end INTEGER,"
                " PRIMARY KEY (call_id, seq))"
            )
            self._file.execute("BEGIN IMMEDIATE")
            self._file.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            self._file.close()
            raise ConfigError(
                f"exchange.spool {path} cannot be used: {error}; where another worker has it, give this one an"
                " exchange.name of its own, and where it is damaged, move it away"
            ) from error

    def read(self) -> list[SpooledEvent]:
        rows = self._file.execute("SELECT call_id, seq, message, is_end FROM events ORDER BY call_id, seq")
        return [SpooledEvent(call_id, seq, message, bool(is_end)) for call_id, seq, message, is_end in rows]

    def write(self, events: Sequence[SpooledEvent], forget: Iterable[tuple[str, int | None]] = ()) -> None:
        """Adds events and removes, per call, those up to a number (None: all), at once and on disk on return. Raises
        OSError or sqlite3.Error if the disk refuses, or the spool is closed."""
        with self._in_use, self._file:
            self._file.execute("BEGIN IMMEDIATE")
            rows = [(event.call_id, event.seq, event.message, event.is_end) for event in events]
            self._file.executemany("INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?)", rows)
            for call_id, seq in forget:
                upto = 2**62 if seq is None else seq
                self._file.execute("DELETE FROM events WHERE call_id = ? AND seq <= ?", (call_id, upto))

    def close(self) -> None:
        with self._in_use:
            self._file.close()
