"""The hub's decision log: a SQLite file with a row for the run, one for each version and one for each group of engines.

Each row has a digest of its content and key (`seal`), and the run's row one of all others' as well, so that a damaged,
lost or older row is an error.

`NAME-lock` beside it is locked by the hub at work and holds the number of the last write that outlives a power cut:
SQLite takes damage at the end of its WAL for a torn write, which would undo decisions in silence.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshrl.core import durable
from meshrl.core.sqlite_files import network_file_system, prepare, seal
from meshrl.weights.coordinator.states import Key, Save
from meshrl.wire.values import JsonObject

LAYOUT = 4
"""The `user_version` of the file. Layout 1 was `decisions.log`, a file of entries."""
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE run (one INTEGER PRIMARY KEY, writes INTEGER NOT NULL, row TEXT NOT NULL, seal BLOB NOT NULL);
CREATE TABLE versions (
  run_id TEXT NOT NULL, epoch INTEGER NOT NULL, version INTEGER NOT NULL, row TEXT NOT NULL, seal BLOB NOT NULL,
  state TEXT AS (json_extract(row, '$.state')), PRIMARY KEY (run_id, epoch, version)
) WITHOUT ROWID;
CREATE TABLE groups (generation INTEGER PRIMARY KEY, row TEXT NOT NULL, seal BLOB NOT NULL);
PRAGMA user_version = {LAYOUT};
COMMIT;
"""
_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_IOERR: errno.EIO, sqlite3.SQLITE_READONLY: errno.EACCES,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES, sqlite3.SQLITE_PERM: errno.EACCES,
}  # fmt: skip
_KEYS = {"versions": "run_id, epoch, version", "groups": "generation"}


class LogError(Exception):
    """The log cannot be used; the message names the remedy."""


class DecisionLog:
    """Saves rows durably, on one thread of one process. After an error of `save` it must not be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_path = path.with_name(path.name + "-lock")
        self._thread = ThreadPoolExecutor(1, "decision-log")
        self._lock = -1
        self._file: sqlite3.Connection | None = None
        self._always_synced = True
        self._writes = 0
        self._seals: dict[tuple[object, ...], bytes] = {}  # of every row but the run's, by key

    async def open(self) -> Save | None:
        """Opens or creates the log and returns all rows, None if there are none. Raises LogError, OSError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._open)

    async def save(self, rows: Save) -> None:
        """Returns once all rows outlive this process and, where they must, a power cut. Raises LogError, OSError."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._save, rows)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    # --- on the thread ------------------------------------------------------------------------------

    def _open(self) -> Save | None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            last_write = self._take_lock()
            self._file = file = sqlite3.connect(self.path, isolation_level=None)
            file.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._check_layout(file, last_write)
            prepare(file, self.path, outlives_power_cuts=True)
            self._always_synced = network_file_system(self.path) is not None
            saved = self._read(file)
            if self._writes < last_write:
                raise self._damaged(f"its last write is number {self._writes} of {last_write}")
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._note_write()
            os.fsync(self._lock)
            durable.flush(self.path.parent)
        except (sqlite3.Error, ValueError) as error:  # ValueError: SQLite quotes damaged text in its message
            self._close()
            raise self._trouble(error) from error
        except BaseException:
            self._close()
            raise
        return saved

    def _take_lock(self) -> int:
        self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LogError(
                f"{self.path} is in use by another hub; stop it or give this one its own spool_dir"
            ) from error
        number, _, sealed = os.pread(self._lock, 256, 0).strip().partition(b" ")
        return int(number) if sealed == seal(number).hex().encode() else 0  # a power cut may have torn it

    def _note_write(self) -> None:
        number = b"%020d" % self._writes
        os.pwrite(self._lock, number + b" " + seal(number).hex().encode() + b"\n", 0)

    def _check_layout(self, file: sqlite3.Connection, last_write: int) -> None:
        layout: int = file.execute("PRAGMA user_version").fetchone()[0]
        if layout == LAYOUT:
            return
        path, tables = self.path, file.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if not layout and (tables or last_write):
            raise self._damaged("it has no layout")
        if not layout:
            path, layout = path.with_name("decisions.log"), 1
            if not path.exists():
                file.executescript(_SCHEMA)
                return
        raise LogError(
            f"{path} has layout {layout}, but this version of meshrl reads layout {LAYOUT} alone; choose another"
            f" output_dir, or move it and the files {path.name}-* away and start a new run: engines are seeded again"
        )

    def _read(self, file: sqlite3.Connection) -> Save | None:
        rows: dict[str, dict[tuple[Any, ...], JsonObject]] = {}
        for table, columns in _KEYS.items():
            found = file.execute(f"SELECT {columns}, row, seal FROM {table}").fetchall()
            rows[table] = {tuple(key): self._unsealed(row, sealed, table, *key) for *key, row, sealed in found}
            self._seals.update({(table, *key): sealed for *key, _, sealed in found})
        runs = file.execute("SELECT writes, row, seal FROM run").fetchall()
        if not runs and not self._seals:
            return None
        if len(runs) != 1:
            raise self._damaged(f"it has {len(runs)} rows of the run")
        [(writes, row, sealed)] = runs
        run, self._writes = self._unsealed(row, sealed, "run", writes), writes
        versions = {Key(*key): row for key, row in rows["versions"].items()}
        return Save(run=run, versions=versions, groups={number: row for (number,), row in rows["groups"].items()})

    def _seal(self, row: str, table: str, *key: object) -> bytes:
        others = b"".join(sorted(self._seals.values())) if table == "run" else b""
        return seal(row.encode() + others, table, *key)

    def _unsealed(self, row: object, sealed: bytes, table: str, *key: object) -> JsonObject:
        if not isinstance(row, str) or sealed != self._seal(row, table, *key):
            raise self._damaged(f"a row of its table {table} does not have the digest that it was written with")
        content: JsonObject = json.loads(row)
        return content

    def _save(self, rows: Save) -> None:
        assert self._file is not None
        file, groups = self._file, {(generation,): row for generation, row in rows.groups.items()}
        synced = rows.outlives_power_cut or self._always_synced
        try:
            file.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            file.execute("BEGIN IMMEDIATE")
            for table, changes in (("versions", rows.versions), ("groups", groups)):
                for key, row in changes.items():
                    self._put(file, table, key, row)
            self._writes += 1
            run = json.dumps(rows.run)
            sealed = self._seal(run, "run", self._writes)
            file.execute("INSERT OR REPLACE INTO run VALUES (1, ?, ?, ?)", (self._writes, run, sealed))
            file.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._trouble(error) from error
        if synced:
            self._note_write()

    def _put(self, file: sqlite3.Connection, table: str, key: tuple[Any, ...], row: JsonObject | None) -> None:
        marks = ", ".join("?" * len(key))
        if row is None:
            file.execute(f"DELETE FROM {table} WHERE ({_KEYS[table]}) = ({marks})", key)
            self._seals.pop((table, *key), None)
            return
        text = json.dumps(row)
        sealed = self._seals[table, *key] = self._seal(text, table, *key)
        file.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks}, ?, ?)", (*key, text, sealed))

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock >= 0:
            os.close(self._lock)  # drops the lock, too
            self._lock = -1

    def _trouble(self, error: Exception) -> LogError | OSError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest is where in SQLite
        if code in _ERRNO:
            return OSError(_ERRNO[code], os.strerror(_ERRNO[code]), str(self.path))
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return LogError(f"{self.path} is in use ({error}); end the program that reads it and start again")
        return self._damaged(str(error))

    def _damaged(self, why: str) -> LogError:
        return LogError(
            f"{self.path} is damaged: {why}; restore it with the files {self.path.name}-* beside it from a copy, or"
            " move all of them away and start a new run (engines will be seeded again)"
        )
