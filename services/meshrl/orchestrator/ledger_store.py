"""Keeps the ledger in SQLite; fed by the ledger's rules and the journal, read when a process goes on.

The file is in WAL mode with synchronous = NORMAL: what is committed outlives the process, whatever ends it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from meshrl.orchestrator.groups import DropReason, Group, GroupTicket
from meshrl.orchestrator.ledger import Entry, RolloutState
from meshrl.orchestrator.ledger_rows import LAYOUT, SCHEMA, Past, PastGroup, RunRow, StepRecord, last_run
from meshrl.orchestrator.ledger_rows import read_groups as rows_of_groups
from meshrl.orchestrator.ledger_rows import read_past as rows_of_past
from meshrl.orchestrator.ledger_writer import ThreadedWriter, Writer
from meshrl.v1 import rollout_pb2, trainer_pb2
from meshrl.wire import convert
from meshrl.wire.types import Batch, Rollout

_UPSERT = """
INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET state = excluded.state, rollout_id = excluded.rollout_id,
  oldest_version = excluded.oldest_version, step = excluded.step, reason = excluded.reason,
  updated_s = excluded.updated_s
"""
_ANY_LENGTH = 2**62


class LedgerStore:
    """A ledger file. What changes it never blocks; `flush` and `close` tell when everything before is on disk.

    Reading blocks: call it beside an event loop. Everything raises sqlite3.Error when the file cannot be used.
    """

    def __init__(self, path: Path, writer: Writer | None = None) -> None:
        """`writer` commits the changes; None is a thread of its own."""
        self._path = path
        self._writer = ThreadedWriter(path) if writer is None else writer
        self._put = self._writer.put
        self._run = 0

    # --- beginning and end ----------------------------------------------------------------------

    def open(self) -> RunRow | None:
        """Creates or reopens the file and returns the last run in it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute("PRAGMA journal_mode = WAL")
            known = connection.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'rollouts'").fetchone()[0]
            if known and connection.execute("PRAGMA user_version").fetchone()[0] != LAYOUT:
                connection.execute(f"ALTER TABLE rollouts RENAME TO rollouts_before_{time.time_ns()}")
            connection.executescript(SCHEMA)
            connection.execute(f"PRAGMA user_version = {LAYOUT}")
            return last_run(connection)

    def begin(self, run: RunRow) -> RunRow:
        """Starts a run of its own: what earlier ones left open ends with a reason. Returns its row."""
        superseded = DropReason.SUPERSEDED.value
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute(
                "UPDATE rollouts SET state = 'cancelled', reason = ? WHERE state = 'dispatched'", (superseded,)
            )
            connection.execute(
                "UPDATE rollouts SET state = 'dropped', reason = ? WHERE state IN ('finished', 'batched')",
                (superseded,),
            )
            connection.execute("DELETE FROM payloads")
            connection.execute("DELETE FROM parts")
            connection.execute("UPDATE runs SET ended = ? WHERE ended = ''", (superseded,))
            cursor = connection.execute(
                "INSERT INTO runs (run_id, session, epoch, first_step, metrics_offset, began_s)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (run.run_id, run.session, run.epoch, run.first_step, run.metrics_offset, time.time()),
            )
            self._run = int(cursor.lastrowid or 0)
        self._writer.start()
        return replace(run, run=self._run)

    def resume(self, run: RunRow, *, trainer_step: int) -> Past:
        """Goes on with the last run; returns what it left. `run` has what may have changed: session and epoch."""
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute(
                "UPDATE runs SET session = ?, epoch = ?, first_step = ?, ended = '' WHERE run = ?",
                (run.session, run.epoch, run.first_step, run.run),
            )
            past = rows_of_past(connection, run, trainer_step=trainer_step)
        self._run = run.run
        self._writer.start()
        return past

    def end(self, reason: str) -> None:
        """The run is over."""
        self._put(lambda db: db.execute("UPDATE runs SET ended = ? WHERE run = ?", (reason, self._run)))

    def close(self, deadline_s: float = 30.0) -> None:
        """Writes what is queued and stops. Raises sqlite3.Error when something could not be written."""
        self._writer.close(deadline_s)

    # --- changes ----------------------------------------------------------------------------------

    def record(self, entry: Entry) -> None:
        """The state of a rollout; the payload of a dropped one goes, unless the run may yet go on with it."""
        row = _row(entry, self._run, time.time())
        gone = entry.state is RolloutState.DROPPED and entry.reason != DropReason.RUN_ENDED.value

        def change(db: sqlite3.Connection) -> None:
            db.execute(_UPSERT, row)
            if gone:
                db.execute("DELETE FROM payloads WHERE rollout_id = ?", (entry.rollout_id,))

        self._put(change)

    def keep(self, rollout: Rollout) -> None:
        """The payload of a rollout; it is serialised on the writer's thread. Call it before the state is recorded."""

        def change(db: sqlite3.Connection) -> None:
            data = convert.rollout_to_proto(rollout).SerializeToString()
            db.execute("INSERT OR REPLACE INTO payloads VALUES (?, ?)", (rollout.rollout_id, data))

        self._put(change)

    def dispatched(self, ticket: GroupTicket) -> None:
        """What a group is dispatched with."""
        row = (
            ticket.group_id, self._run, ticket.sequence, ticket.task.environment, ticket.task.index, ticket.size,
            ticket.for_step, ticket.min_version, ticket.active_version, ticket.seed, ticket.replaces,
        )  # fmt: skip
        sql = (
            "INSERT INTO groups (group_id, run, sequence, environment, task_index, size, for_step, min_version,"
            " active_version, seed, replaces) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        )
        replaced = ticket.replaces

        def change(db: sqlite3.Connection) -> None:
            db.execute(sql, row)
            if replaced:
                db.execute("UPDATE groups SET over = 1 WHERE group_id = ?", (replaced,))

        self._put(change)

    def over(self, group: Group) -> None:
        """How a group ended."""
        row = (group.cancelled, group.sampled_tokens, group.seconds, group.ticket.group_id)
        sql = "UPDATE groups SET over = 1, cancelled = ?, sampled_tokens = ?, seconds = ? WHERE group_id = ?"
        self._put(lambda db: db.execute(sql, row))

    def batched(self, record: StepRecord, batch: Batch) -> None:
        """What a step took and the messages of its batch, in place of what was known of the step."""

        def change(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?)",
                (self._run, record.step, record.digest, record.to_json()),
            )
            db.execute("DELETE FROM parts WHERE run = ? AND step = ?", (self._run, record.step))
            db.executemany(
                "INSERT INTO parts VALUES (?, ?, ?, ?)",
                (
                    (self._run, record.step, place, message.SerializeToString())
                    for place, message in enumerate(convert.batch_to_messages(batch))
                ),
            )

        self._put(change)

    def forget(self, step: int) -> None:
        """Steps up to this one are durable: their payloads and batches go."""

        def change(db: sqlite3.Connection) -> None:
            durable = "SELECT rollout_id FROM rollouts WHERE run = ? AND step <= ?"
            db.execute(f"DELETE FROM payloads WHERE rollout_id IN ({durable})", (self._run, step))
            db.execute("DELETE FROM parts WHERE run = ? AND step <= ?", (self._run, step))

        self._put(change)

    def flush(self) -> Future[None]:
        """Done when everything put before is committed."""
        return self._writer.flush()

    # --- reading ----------------------------------------------------------------------------------

    def batch(self, record: StepRecord) -> Batch | None:
        """The batch of a step as it was recorded; None when it is not kept any more. Blocks."""
        with closing(sqlite3.connect(self._path)) as connection:
            parts = connection.execute(
                "SELECT data FROM parts WHERE run = ? AND step = ? ORDER BY part", (self._run, record.step)
            ).fetchall()
        if not parts:
            return None
        reader = convert.BatchReader(seq_len=_ANY_LENGTH, dp_size=record.dp_size)
        for (data,) in parts:
            reader.feed(trainer_pb2.SubmitBatchRequest.FromString(data))
        return reader.finish()

    def rollouts(self, rollout_ids: Iterable[str]) -> dict[str, Rollout]:
        """The payloads that are kept of these rollouts, by id. Blocks."""
        found = {}
        with closing(sqlite3.connect(self._path)) as connection:
            for rollout_id in rollout_ids:
                row = connection.execute("SELECT data FROM payloads WHERE rollout_id = ?", (rollout_id,)).fetchone()
                if row is not None:
                    found[rollout_id] = convert.rollout_from_proto(rollout_pb2.Rollout.FromString(row[0]))
        return found

    def groups(self, group_ids: Sequence[str]) -> dict[str, PastGroup]:
        """Groups by id, without their rollouts. Blocks."""
        with closing(sqlite3.connect(self._path)) as connection:
            return rows_of_groups(connection, list(group_ids))


def _row(entry: Entry, run: int, at_s: float) -> tuple[object, ...]:
    return (
        entry.key,
        run,
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
