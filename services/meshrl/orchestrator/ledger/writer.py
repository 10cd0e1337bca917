"""Commits changes to the ledger file, several in one transaction, on a thread of its own."""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from meshrl.core.sqlite_files import prepare
from meshrl.orchestrator.ledger.rows import LAYOUT
from meshrl.sampling.retry import RunError

Change = Callable[[sqlite3.Connection], object]


class LedgerFileError(RunError):
    """The ledger's file cannot be read or written; the message names the remedy."""


def unusable(path: Path, error: Exception) -> LedgerFileError:
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF  # the rest says where in SQLite
    if primary == sqlite3.SQLITE_FULL or primary == sqlite3.SQLITE_IOERR:
        return LedgerFileError(
            f"ledger {path} cannot be written ({error}): its disk is full, or fails; free some space and start again:"
            " the run goes on where it stopped"
        )
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LedgerFileError(
            f"ledger {path} is in use ({error}); end the other orchestrator of this output_dir, or choose another one"
        )
    if isinstance(error, OSError) or primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return LedgerFileError(
            f"ledger {path} cannot be written ({error}); output_dir must be a folder that this user may write, on a"
            " disk with room"
        )
    return LedgerFileError(
        f"ledger {path} is damaged ({error}); move it and the files {path.name}-* beside it away and start again with"
        " --ckpt.resume-step -1: the run goes on from its last checkpoint with a new ledger"
    )


def check_layout(connection: sqlite3.Connection, path: Path) -> None:
    """Raises LedgerFileError for a file of another version of meshrl; an empty one passes."""
    layout = connection.execute("PRAGMA user_version").fetchone()[0]
    if layout != LAYOUT and connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
        raise LedgerFileError(
            f"ledger {path} has layout {layout}, but this version of meshrl reads layout {LAYOUT} alone; choose another"
            " output_dir, or move the file away and start again with --ckpt.resume-step -1: the run goes on from its"
            " last checkpoint with a new ledger"
        )


@contextmanager
def ledger_file(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection whose changes are committed at the end. Raises LedgerFileError."""
    try:
        with closing(sqlite3.connect(path)) as connection, connection:
            check_layout(connection, path)
            prepare(connection, path)
            yield connection
    except (sqlite3.Error, OSError) as error:
        raise unusable(path, error) from error


class LedgerWriter:
    """Applies changes in the order of `put`, which never blocks. An error surfaces at the next call, and nothing after
    it is written."""

    def __init__(self, path: Path, *, flush_interval_s: float = 0.2) -> None:
        self._path = path
        self._flush_interval_s = flush_interval_s
        self._queue: queue.SimpleQueue[Change | Future[None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write_all, name="ledger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, change: Change) -> None:
        """Raises the error of an earlier change, LedgerFileError if it was the file's."""
        self._check()
        self._queue.put(change)

    def flush(self) -> Future[None]:
        """Done when everything put before is committed."""
        self._check()
        done: Future[None] = Future()
        self._queue.put(done)
        return done

    def close(self, deadline_s: float) -> None:
        """Commits the queue and stops. Raises LedgerFileError when something could not be written."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise LedgerFileError(f"ledger {self._path} was not written within {deadline_s:g} s; is its disk too slow?")
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_all(self) -> None:
        waiting: list[Future[None]] = []
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(self._path, isolation_level=None)
            prepare(connection, self._path)
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
            self._error = unusable(self._path, error) if isinstance(error, sqlite3.Error) else error
            with suppress(queue.Empty):
                while True:
                    if isinstance(item := self._queue.get_nowait(), Future):
                        waiting.append(item)
            for done in waiting:
                if done.set_running_or_notify_cancel():
                    done.set_exception(self._error)
        finally:
            if connection is not None:
                connection.close()

    def _next_changes(self) -> tuple[list[Change], list[Future[None]], bool]:
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
