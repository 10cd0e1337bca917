"""What the ledger file holds, as rows and as dataclasses.

runs      one row for each run that began in this folder; the last one may go on
groups    what a group was dispatched with, and how it ended
rollouts  the state of each rollout
payloads  a finished rollout, until its step is durable or it is dropped
steps     what each step took, and its totals
parts     the messages of a step's batch as they are uploaded, until the step is durable

Payloads, records of steps and parts have a digest (`seal`), checked at every reading.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

from meshrl.core.sqlite_files import seal
from meshrl.orchestrator.ledger.rules import LedgerEntry, RolloutState
from meshrl.orchestrator.work.screening import DropReason, RunTotals
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef

LAYOUT = 3
"""The `user_version` of the file; one of another layout is refused."""
UNSEEDED = -1
"""Stands for a group's missing seed."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
  run INTEGER PRIMARY KEY, run_id TEXT NOT NULL, session TEXT NOT NULL, epoch INTEGER NOT NULL,
  first_step INTEGER NOT NULL, metrics_offset INTEGER NOT NULL, began_s REAL NOT NULL, ended TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS groups (
  group_id TEXT PRIMARY KEY, run INTEGER NOT NULL, sequence INTEGER NOT NULL, environment TEXT NOT NULL,
  task_index INTEGER NOT NULL, size INTEGER NOT NULL, for_step INTEGER NOT NULL, min_version INTEGER NOT NULL,
  active_version INTEGER NOT NULL, seed INTEGER NOT NULL, replaces TEXT NOT NULL DEFAULT '',
  over INTEGER NOT NULL DEFAULT 0,
  cancelled INTEGER NOT NULL DEFAULT 0, sampled_tokens INTEGER NOT NULL DEFAULT 0, seconds REAL NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rollouts (
  key TEXT PRIMARY KEY, run INTEGER NOT NULL, group_id TEXT NOT NULL, environment TEXT NOT NULL,
  task_index INTEGER NOT NULL, for_step INTEGER NOT NULL, state TEXT NOT NULL, rollout_id TEXT NOT NULL,
  oldest_version INTEGER, step INTEGER, reason TEXT NOT NULL, updated_s REAL NOT NULL,
  trace_id TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS rollouts_by_step ON rollouts (run, step) WHERE step IS NOT NULL;
CREATE TABLE IF NOT EXISTS payloads (
  rollout_id TEXT PRIMARY KEY, data BLOB NOT NULL, seal BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS steps (
  run INTEGER NOT NULL, step INTEGER NOT NULL, digest TEXT NOT NULL, record TEXT NOT NULL,
  seal BLOB NOT NULL, PRIMARY KEY (run, step)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS parts (
  run INTEGER NOT NULL, step INTEGER NOT NULL, part INTEGER NOT NULL, data BLOB NOT NULL,
  seal BLOB NOT NULL, PRIMARY KEY (run, step, part)
);
"""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    run: int
    run_id: str
    session: str
    epoch: int
    first_step: int
    metrics_offset: int
    ended: str = ""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The groups of a step. `progress`, `drawn` (tasks) and `algorithms` (their state) are as of after it."""

    step: int
    digest: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]  # (group_id, rollout ids), in order
    advantages: Mapping[str, float]
    untrainable: tuple[str, ...]
    truncated_samples: int
    dropped_samples: int
    longest_row: int
    dp_size: int
    progress: RunTotals
    drawn: Mapping[str, int]
    algorithms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepRecord:
        values = json.loads(text)
        values.pop("micro_batches", None)  # of records that older code wrote
        groups = tuple((group_id, tuple(rollouts)) for group_id, rollouts in values.pop("groups"))
        untrainable, progress = tuple(values.pop("untrainable")), RunTotals(**values.pop("progress"))
        return cls(groups=groups, untrainable=untrainable, progress=progress, **values)


@dataclass(frozen=True, kw_only=True)
class Past:
    """An earlier process's state. `entries` are open, or trained by a step that may still be forgotten."""

    run: RunRow
    entries: tuple[LedgerEntry, ...] = ()
    ended: Mapping[tuple[RolloutState, str], int] = field(default_factory=dict)
    groups: Mapping[str, RolloutGroup] = field(default_factory=dict)  # of `entries` and `in_flight`, without rollouts
    in_flight: frozenset[str] = frozenset()  # groups that had not ended
    successors: Mapping[str, str] = field(default_factory=dict)  # group that was cut off -> the one that completes it
    steps: Mapping[int, StepRecord] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()  # steps whose batch is here
    payloads: frozenset[str] = frozenset()
    damaged: frozenset[str] = frozenset()  # rollouts whose payload is not as it was written
    damaged_steps: frozenset[int] = frozenset()  # steps whose record or batch is not as it was written
    drawn: Mapping[str, int] = field(default_factory=dict)  # tasks by environment
    next_sequence: int = 0

    def without(self, rollouts: Collection[str], steps: Collection[int]) -> Past:
        """A copy without what is damaged."""
        return replace(
            self,
            payloads=self.payloads - frozenset(rollouts),
            kept=self.kept - frozenset(steps),
            damaged=self.damaged | frozenset(rollouts),
            damaged_steps=self.damaged_steps | frozenset(steps),
        )

    def latest(self, group_id: str) -> str:
        """The group that has this one's rollouts: itself, or the last that completes it."""
        while group_id in self.successors:
            group_id = self.successors[group_id]
        return group_id


def _rows(connection: sqlite3.Connection, sql: str, *values: object) -> list[sqlite3.Row]:
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor.execute(sql, values).fetchall()


def last_run(connection: sqlite3.Connection) -> RunRow | None:
    columns = "run, run_id, session, epoch, first_step, metrics_offset, ended"
    rows = _rows(connection, f"SELECT {columns} FROM runs ORDER BY run DESC LIMIT 1")
    return RunRow(**rows[0]) if rows else None


def read_past(connection: sqlite3.Connection, run: RunRow, *, trainer_step: int) -> Past:
    """What a run needs to go on with a trainer at `trainer_step`. Rollouts dropped because the run ended are open
    again."""
    cut_off = f"(state = 'dropped' AND reason = '{DropReason.RUN_ENDED.value}')"
    forgotten = f"(state = 'trained' AND step > {int(trainer_step)})"
    wanted = f"(state IN ('dispatched', 'finished', 'batched') OR {cut_off} OR {forgotten})"
    rows = _rows(
        connection,
        "SELECT key, group_id, environment, task_index, for_step, state, rollout_id, oldest_version, step, reason,"
        f" trace_id FROM rollouts WHERE run = ? AND {wanted}",
        run.run,
    )
    ended = connection.execute(
        f"SELECT state, reason, COUNT(*) FROM rollouts WHERE run = ? AND NOT {wanted} GROUP BY state, reason",
        (run.run,),
    ).fetchall()
    entries = tuple(sorted(map(_entry, rows), key=lambda entry: entry.place))
    steps, damaged_steps = _records(connection, run, trainer_step)
    kept = connection.execute("SELECT DISTINCT step FROM parts WHERE run = ?", (run.run,)).fetchall()
    payloads = {entry.rollout_id for entry in entries}
    payloads &= {rollout_id for (rollout_id,) in connection.execute("SELECT rollout_id FROM payloads")}
    running = connection.execute("SELECT group_id FROM groups WHERE run = ? AND NOT over", (run.run,))
    in_flight = frozenset(group_id for (group_id,) in running)
    replaced = connection.execute(
        "SELECT replaces, group_id FROM groups WHERE run = ? AND replaces != ''", (run.run,)
    ).fetchall()
    drawn = connection.execute(
        "SELECT environment, COUNT(DISTINCT sequence) FROM groups WHERE run = ? GROUP BY environment", (run.run,)
    ).fetchall()
    next_sequence = connection.execute("SELECT MAX(sequence) + 1 FROM groups WHERE run = ?", (run.run,)).fetchone()[0]
    past = Past(
        run=run,
        entries=entries,
        ended=Counter({(RolloutState(state), reason): count for state, reason, count in ended}),
        in_flight=in_flight,
        successors=dict(replaced),
        steps=steps,
        damaged_steps=damaged_steps,
        kept=frozenset(step for (step,) in kept),
        payloads=frozenset(payloads),
        drawn=dict(drawn),
        next_sequence=next_sequence or 0,
    )
    groups = read_groups(connection, in_flight | {past.latest(entry.group_id) for entry in entries})
    return replace(past, groups=groups)


def _records(
    connection: sqlite3.Connection, run: RunRow, trainer_step: int
) -> tuple[dict[int, StepRecord], frozenset[int]]:
    """Records from the trainer's step on and of steps whose batch is kept, and the steps with a damaged one. Others are
    not needed, and each names every rollout of its step."""
    columns = "SELECT step, record, seal FROM steps WHERE run = :run"
    kept = "SELECT DISTINCT step FROM parts WHERE run = :run AND step < :step"
    rows = connection.execute(
        f"{columns} AND step >= :step UNION ALL {columns} AND step IN ({kept})", {"run": run.run, "step": trainer_step}
    )
    records, damaged = {}, set()
    for step, text, found in rows:
        if found == seal(text.encode(), run.run, step):
            records[step] = StepRecord.from_json(text)
        else:
            damaged.add(step)
    return records, frozenset(damaged)


def read_groups(connection: sqlite3.Connection, group_ids: Iterable[str]) -> dict[str, RolloutGroup]:
    """The known ones of these groups, without their rollouts."""
    columns = "group_id, size, for_step, min_version, active_version, sequence, seed, environment, task_index"
    sql = f"SELECT {columns}, cancelled, sampled_tokens, seconds FROM groups WHERE group_id = ?"
    found = {}
    for group_id in group_ids:
        for row in _rows(connection, sql, group_id):
            ticket = GroupTicket(
                group_id=group_id,
                task=TaskRef(environment=row["environment"], index=row["task_index"]),
                size=row["size"],
                for_step=row["for_step"],
                min_version=row["min_version"],
                active_version=row["active_version"],
                seed=None if row["seed"] == UNSEEDED else row["seed"],
                sequence=row["sequence"],
            )
            came = {name: row[name] for name in ("cancelled", "sampled_tokens", "seconds")}
            found[group_id] = RolloutGroup(ticket=ticket, **came)
    return found


def _entry(row: sqlite3.Row) -> LedgerEntry:
    entry = LedgerEntry(**{**row, "state": RolloutState(row["state"])})
    if entry.state is RolloutState.DROPPED:  # cut off by the end of the run
        state = RolloutState.FINISHED if entry.step is None else RolloutState.BATCHED
        return replace(entry, state=state, reason="")
    return entry
