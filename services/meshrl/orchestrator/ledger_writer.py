"""Commits changes to the ledger file in order, many a transaction, on a thread of its own; fed by the store."""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Protocol

Change = Callable[[sqlite3.Connection], object]


class Writer(Protocol):
    """Applies changes in the order in which they are put, whole transactions at a time."""

    def start(self) -> None: ...

    def put(self, change: Change) -> None: ...

    def flush(self) -> Future[None]: ...

    def close(self, deadline_s: float) -> None: ...


class ThreadedWriter:
    """`put` never blocks. An error surfaces at the next call, and nothing after it is written."""

    def __init__(self, path: Path, *, flush_interval_s: float = 0.2) -> None:
        self._path = path
        self._flush_interval_s = flush_interval_s
        self._queue: queue.SimpleQueue[Change | Future[None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write_all, name="ledger", daemon=True)

    def start(self) -> None:
        """The file is there: changes may be written."""
        self._thread.start()

    def put(self, change: Change) -> None:
        """Queues a change. Raises what an earlier one failed with."""
        self._check()
        self._queue.put(change)

    def flush(self) -> Future[None]:
        """Done when everything put before is committed."""
        self._check()
        done: Future[None] = Future()
        self._queue.put(done)
        return done

    def close(self, deadline_s: float) -> None:
        """Commits what is queued and stops. Raises sqlite3.Error when something could not be written."""
        if not self._thread.is_alive():
            return
        self._queue.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise sqlite3.OperationalError(f"ledger {self._path} was not written within {deadline_s:g} s")
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_all(self) -> None:
        waiting: list[Future[None]] = []
        connection = sqlite3.connect(self._path, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            ended = False
            while not ended:
                changes, waiting, ended = self._next_changes()
                connection.execute("BEGIN IMMEDIATE")
                for change in changes:
                    change(connection)
                connection.execute("COMMIT")
                for done in waiting:
                    if done.set_running_or_notify_cancel():
                        done.set_result(None)
                waiting = []
        except Exception as error:  # noqa: BLE001  # surfaces at the next call: the run must not go on uncounted
            self._error = error
            self._fail(waiting, error)
        finally:
            connection.close()

    def _fail(self, waiting: list[Future[None]], error: Exception) -> None:
        with suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, Future):
                    waiting.append(item)
        for done in waiting:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)

    def _next_changes(self) -> tuple[list[Change], list[Future[None]], bool]:
        """Waits for a change, then gathers what comes within the flush interval, or until someone waits for it."""
        changes: list[Change] = []
        waiting: list[Future[None]] = []
        item = self._queue.get()
        flush_at = time.monotonic() + self._flush_interval_s
        while item is not None:
            if isinstance(item, Future):
                waiting.append(item)
            else:
                changes.append(item)
            left_s = 0.0 if waiting else max(0.0, flush_at - time.monotonic())
            try:
                item = self._queue.get(timeout=left_s) if left_s else self._queue.get_nowait()
            except queue.Empty:  # the interval is over
                return changes, waiting, False
        return changes, waiting, True
