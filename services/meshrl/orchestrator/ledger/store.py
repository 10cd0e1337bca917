"""Keeps the ledger in SQLite. What is committed outlives the process, however it ends: see `core.sqlite_files`."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

from google.protobuf.message import DecodeError
from loguru import logger

from meshrl.core.sqlite_files import network_file_system, seal
from meshrl.orchestrator.ledger.rows import (
    LAYOUT,
    SCHEMA,
    UNSEEDED,
    Past,
    RunRow,
    StepRecord,
    last_run,
)
from meshrl.orchestrator.ledger.rows import read_groups as rows_of_groups
from meshrl.orchestrator.ledger.rows import read_past as rows_of_past
from meshrl.orchestrator.ledger.rules import LedgerEntry, RolloutState
from meshrl.orchestrator.ledger.writer import LedgerWriter, ledger_file, unusable
from meshrl.orchestrator.work.screening import DropReason
from meshrl.sampling.groups import GroupTicket, RolloutGroup
from meshrl.v1 import rollout_pb2, trainer_pb2
from meshrl.wire import convert
from meshrl.wire.errors import MeshError
from meshrl.wire.types import Batch, Rollout

_UPSERT = """
INSERT INTO rollouts (key, run, group_id, environment, task_index, for_step, state, rollout_id, oldest_version, step,
  reason, updated_s, trace_id) VALUES (:key, :run, :group_id, :environment, :task_index, :for_step, :state, :rollout_id,
  :oldest_version, :step, :reason, :updated_s, :trace_id)
ON CONFLICT (key) DO UPDATE SET state = excluded.state, rollout_id = excluded.rollout_id,
  oldest_version = excluded.oldest_version, step = excluded.step, reason = excluded.reason,
  updated_s = excluded.updated_s, trace_id = excluded.trace_id
"""
_ANY_LENGTH = 2**62
_UNREADABLE = (ValueError, TypeError, DecodeError, MeshError)
"""A wrong digest, bytes that are no message, or a wrong message."""


class LedgerStore:
    """A ledger file. Changes never block; `flush` and `close` return once they are on disk. Reading blocks: call it
    beside an event loop. Everything raises LedgerFileError when the file cannot be used."""

    def __init__(self, path: Path, writer: LedgerWriter | None = None) -> None:
        self._path = path
        self._writer = LedgerWriter(path) if writer is None else writer
        self._put = self._writer.put
        self._run = 0
        self._forgotten = 0  # no payload of a step up to this one is left

    # --- beginning and end ----------------------------------------------------------------------

    def open(self) -> RunRow | None:
        """Creates or reopens the file; returns the last run in it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(self._path, error) from error
        with ledger_file(self._path) as connection:
            if (name := network_file_system(self._path)) is not None:
                logger.info("{} is on a network file system ({}) and is kept without a WAL", self._path, name)
            connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {LAYOUT}; COMMIT;")
            return last_run(connection)

    def begin(self, run: RunRow) -> None:
        """Starts a run; open rollouts of earlier ones are superseded."""
        superseded = DropReason.SUPERSEDED.value
        with ledger_file(self._path) as connection:
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

    def resume(self, run: RunRow, *, trainer_step: int) -> Past:
        """`run` has the new session and epoch."""
        with ledger_file(self._path) as connection:
            connection.execute(
                "UPDATE runs SET session = ?, epoch = ?, first_step = ?, ended = '' WHERE run = ?",
                (run.session, run.epoch, run.first_step, run.run),
            )
            try:
                past = rows_of_past(connection, run, trainer_step=trainer_step)
            except (ValueError, TypeError, KeyError) as error:  # a row says what no row can say
                raise unusable(self._path, error) from error
        self._run = run.run
        self._writer.start()
        return past

    def end(self, reason: str) -> None:
        self._put(lambda db: db.execute("UPDATE runs SET ended = ? WHERE run = ?", (reason, self._run)))

    def close(self, deadline_s: float = 30.0) -> None:
        self._writer.close(deadline_s)

    # --- changes ----------------------------------------------------------------------------------

    def record(self, entry: LedgerEntry) -> None:
        """The payload of a dropped rollout goes, unless the run may yet go on with it."""
        row = {**vars(entry), "run": self._run, "state": entry.state.value, "updated_s": time.time()}
        gone = entry.state is RolloutState.DROPPED and entry.reason != DropReason.RUN_ENDED.value

        def change(db: sqlite3.Connection) -> None:
            db.execute(_UPSERT, row)
            if gone:
                db.execute("DELETE FROM payloads WHERE rollout_id = ?", (entry.rollout_id,))

        self._put(change)

    def keep(self, rollout: Rollout) -> None:
        """Keeps a payload, serialised on the writer's thread. Call it before the state is recorded."""

        def change(db: sqlite3.Connection) -> None:
            data = convert.to_proto(rollout.without_routes()).SerializeToString()
            row = (rollout.rollout_id, data, seal(data, rollout.rollout_id))
            db.execute("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?)", row)

        self._put(change)

    def dispatched(self, ticket: GroupTicket) -> None:
        seed = UNSEEDED if ticket.seed is None else ticket.seed
        row = {**vars(ticket), "run": self._run, "seed": seed, **vars(ticket.task)}
        sql = (
            "INSERT INTO groups (group_id, run, sequence, environment, task_index, size, for_step, min_version,"
            " active_version, seed, replaces) VALUES (:group_id, :run, :sequence, :environment, :index, :size,"
            " :for_step, :min_version, :active_version, :seed, :replaces)"
        )

        def change(db: sqlite3.Connection) -> None:
            db.execute(sql, row)
            db.execute("UPDATE groups SET over = 1 WHERE group_id = :replaces", row)

        self._put(change)

    def over(self, group: RolloutGroup) -> None:
        row = (group.cancelled, group.sampled_tokens, group.seconds, group.ticket.group_id)
        sql = "UPDATE groups SET over = 1, cancelled = ?, sampled_tokens = ?, seconds = ? WHERE group_id = ?"
        self._put(lambda db: db.execute(sql, row))

    def batched(self, record: StepRecord, batch: Batch) -> None:
        """Replaces an earlier batch. Routes of experts, most of its bytes, are left out: the batch of the same digest
        then trains without replay."""

        run, step, text = self._run, record.step, record.to_json()

        def change(db: sqlite3.Connection) -> None:
            row = (run, step, record.digest, text, seal(text.encode(), run, step))
            db.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)", row)
            db.execute("DELETE FROM parts WHERE run = ? AND step = ?", (run, step))
            for part, message in enumerate(convert.batch_to_messages(batch.without_routes())):
                data = message.SerializeToString()
                sealed = seal(data, run, step, part)
                db.execute("INSERT INTO parts VALUES (?, ?, ?, ?, ?)", (run, step, part, data, sealed))

        self._put(change)

    def released(self, step: int) -> None:
        """The step gets another batch. Call it before its rollouts are finished again."""

        def change(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM parts WHERE run = ? AND step = ?", (self._run, step))
            db.execute("DELETE FROM steps WHERE run = ? AND step = ?", (self._run, step))

        self._put(change)

    def forget(self, step: int) -> None:
        """Steps up to this one are durable: their payloads and batches go."""
        after, self._forgotten = self._forgotten, max(self._forgotten, step)

        def change(db: sqlite3.Connection) -> None:
            durable = "SELECT rollout_id FROM rollouts WHERE run = ? AND step > ? AND step <= ?"
            db.execute(f"DELETE FROM payloads WHERE rollout_id IN ({durable})", (self._run, after, step))
            db.execute("DELETE FROM parts WHERE run = ? AND step <= ?", (self._run, step))

        self._put(change)

    def flush(self) -> Future[None]:
        return self._writer.flush()

    # --- reading ----------------------------------------------------------------------------------

    def batch(self, record: StepRecord) -> Batch | None:
        """As it was recorded; None when it is damaged or no longer kept."""
        with ledger_file(self._path) as connection:
            parts = connection.execute(
                "SELECT part, data, seal FROM parts WHERE run = ? AND step = ? ORDER BY part", (self._run, record.step)
            ).fetchall()
        if not parts:
            return None
        try:
            reader = convert.BatchReader(seq_len=_ANY_LENGTH, dp_size=record.dp_size)
            for part, data, found in parts:
                if found != seal(data, self._run, record.step, part):
                    raise ValueError(f"part {part} does not have the digest that it was written with")
                reader.feed(trainer_pb2.SubmitBatchRequest.FromString(data))
            batch = reader.finish()
            if reader.header is not None and reader.header.digest != record.digest:
                raise ValueError("it is not the batch that the step's record names")
            return batch
        except _UNREADABLE as error:
            logger.warning("the recorded batch of step {} in {} is damaged: {}", record.step, self._path, error)
            return None

    def rollouts(self, rollout_ids: Iterable[str]) -> dict[str, Rollout]:
        """The payloads that are kept and whole, by id."""
        found = {}
        with ledger_file(self._path) as connection:
            for rollout_id in rollout_ids:
                sql = "SELECT data, seal FROM payloads WHERE rollout_id = ?"
                if (row := connection.execute(sql, (rollout_id,)).fetchone()) is None:
                    continue
                try:
                    data, sealed = row
                    if sealed != seal(data, rollout_id):
                        raise ValueError("it does not have the digest that it was written with")
                    found[rollout_id] = convert.from_proto(Rollout, rollout_pb2.Rollout.FromString(data))
                except _UNREADABLE as error:
                    logger.warning("the payload of rollout {} in {} is damaged: {}", rollout_id, self._path, error)
        return found

    def groups(self, group_ids: Sequence[str]) -> dict[str, RolloutGroup]:
        """By id, without their rollouts."""
        with ledger_file(self._path) as connection:
            return rows_of_groups(connection, group_ids)
