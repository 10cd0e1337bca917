"""Keeps the ledger in SQLite: one writer thread, many entries a transaction; fed by the ledger's rules."""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

from meshrl.orchestrator.ledger import Entry

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
  key TEXT PRIMARY KEY,
  group_id TEXT NOT NULL,
  environment TEXT NOT NULL,
  task_index INTEGER NOT NULL,
  for_step INTEGER NOT NULL,
  state TEXT NOT NULL,
  rollout_id TEXT NOT NULL,
  oldest_version INTEGER,
  step INTEGER,
  reason TEXT NOT NULL,
  updated_s REAL NOT NULL
) WITHOUT ROWID
"""
_UPSERT = """
INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET state = excluded.state, rollout_id = excluded.rollout_id,
  oldest_version = excluded.oldest_version, step = excluded.step, reason = excluded.reason,
  updated_s = excluded.updated_s
"""
_OPEN_STATES = "('dispatched', 'finished', 'batched')"


class LedgerStore:
    """A ledger file in WAL mode. `record` never blocks; `close` returns when everything is on disk."""

    def __init__(self, path: Path, *, flush_interval_s: float = 0.2) -> None:
        self._path = path
        self._flush_interval_s = flush_interval_s
        self._queue: queue.SimpleQueue[tuple[Entry, float] | None] = queue.SimpleQueue()
        self._error: sqlite3.Error | None = None
        self._thread = threading.Thread(target=self._write_all, name="ledger", daemon=True)

    def open(self, *, trained_step: int = 0) -> int:
        """Creates or reopens the file and starts the writer; returns how many rollouts an earlier process left open.

        Those that a step up to `trained_step` took are trained; the others are dropped, since their payloads are gone.
        Raises sqlite3.Error when the file cannot be used.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(_SCHEMA)
            trained = connection.execute(
                "UPDATE rollouts SET state = 'trained' WHERE state = 'batched' AND step <= ?", (trained_step,)
            ).rowcount
            dropped = connection.execute(
                "UPDATE rollouts SET state = 'dropped', reason = 'orchestrator_restarted'"
                f" WHERE state IN {_OPEN_STATES}"
            ).rowcount
        self._thread.start()
        return trained + dropped

    def record(self, entry: Entry) -> None:
        """Queues an entry. Raises sqlite3.Error when an earlier one could not be written."""
        if self._error is not None:
            raise self._error
        self._queue.put((entry, time.time()))

    def close(self, deadline_s: float = 30.0) -> None:
        """Writes what is queued and stops. Raises sqlite3.Error when something could not be written."""
        if not self._thread.is_alive():
            return
        self._queue.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise sqlite3.OperationalError(f"ledger {self._path} was not written within {deadline_s:g} s")
        if self._error is not None:
            raise self._error

    def _write_all(self) -> None:
        connection = sqlite3.connect(self._path)
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            ended = False
            while not ended:
                rows, ended = self._next_rows()
                with connection:
                    connection.executemany(_UPSERT, rows)
        except sqlite3.Error as error:  # surfaces at the next record or close: the run must not go on uncounted
            self._error = error
        finally:
            connection.close()

    def _next_rows(self) -> tuple[list[tuple[object, ...]], bool]:
        """Waits for an entry, then gathers what comes within the flush interval; True when the store is closing."""
        items = [self._queue.get()]
        flush_at = time.monotonic() + self._flush_interval_s
        while items[-1] is not None and (left := flush_at - time.monotonic()) > 0:
            try:
                items.append(self._queue.get(timeout=left))
            except queue.Empty:  # the interval is over
                break
        return [_row(*item) for item in items if item is not None], items[-1] is None


def _row(entry: Entry, at_s: float) -> tuple[object, ...]:
    return (
        entry.key,
        entry.group_id,
        entry.environment,
        entry.task_index,
        entry.for_step,
        entry.state.value,
        entry.rollout_id,
        entry.oldest_version,
        entry.step,
        entry.reason,
        at_s,
    )
