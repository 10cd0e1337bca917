"""What the ledger file holds, as rows and as dataclasses; read once when an orchestrator starts, written by the store.

runs      one row for each run that began in this folder; the last one may go on
groups    what a group was dispatched with, and how it ended
rollouts  the state of each rollout
payloads  a finished rollout, until its step is durable or it is dropped
steps     what each step took, and its totals
parts     the messages of a step's batch as they are uploaded, until the step is durable

Payloads, records of steps and parts have a digest (`seal`), which is checked whenever they are read.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace

from meshrl.core.sqlite_files import seal
from meshrl.orchestrator.ledger.rules import LedgerEntry, RolloutState
from meshrl.orchestrator.work.screening import DropReason, RunTotals
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef

LAYOUT = 3
"""The `user_version` of the file; one of another layout is refused."""
UNSEEDED = -1
"""The seed that a row has of a group without one."""
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
    """What a step took. `progress` counts it and every step before; `drawn` are the tasks drawn by then, `algorithms`
    what the algorithms of the environments remember."""

    step: int
    digest: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]  # (group_id, rollout ids), in order
    advantages: Mapping[str, float]
    untrainable: tuple[str, ...]
    truncated_samples: int
    dropped_samples: int
    micro_batches: int
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
        groups = tuple((group_id, tuple(rollouts)) for group_id, rollouts in values.pop("groups"))
        untrainable, progress = tuple(values.pop("untrainable")), RunTotals(**values.pop("progress"))
        return cls(groups=groups, untrainable=untrainable, progress=progress, **values)


@dataclass(frozen=True, kw_only=True)
class PastGroup:
    """A group of an earlier process; `over` when it had ended. `group` has no rollouts."""

    group: RolloutGroup
    over: bool


@dataclass(frozen=True, kw_only=True)
class Past:
    """What an earlier process of the run left. `entries` are open, or trained by a step that may still be forgotten."""

    run: RunRow
    entries: tuple[LedgerEntry, ...] = ()
    ended: Mapping[tuple[RolloutState, str], int] = field(default_factory=dict)
    groups: Mapping[str, PastGroup] = field(default_factory=dict)  # those of `entries` and those in flight
    successors: Mapping[str, str] = field(default_factory=dict)  # group that was cut off -> the one that completes it
    steps: Mapping[int, StepRecord] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()  # steps whose batch is here
    payloads: frozenset[str] = frozenset()
    damaged: frozenset[str] = frozenset()  # rollouts whose payload is not as it was written
    damaged_steps: frozenset[int] = frozenset()  # steps whose record or batch is not as it was written
    drawn: Mapping[str, int] = field(default_factory=dict)  # tasks by environment
    next_sequence: int = 0

    def without(self, rollouts: Collection[str], steps: Collection[int]) -> Past:
        """The same, but for payloads of rollouts and batches of steps that turned out to be damaged."""
        return replace(
            self,
            payloads=self.payloads - frozenset(rollouts),
            kept=self.kept - frozenset(steps),
            damaged=self.damaged | frozenset(rollouts),
            damaged_steps=self.damaged_steps | frozenset(steps),
        )

    def latest(self, group_id: str) -> str:
        """The group that has the rollouts of this one: itself, or the last that completes it."""
        while group_id in self.successors:
            group_id = self.successors[group_id]
        return group_id


def last_run(connection: sqlite3.Connection) -> RunRow | None:
    row = connection.execute(
        "SELECT run, run_id, session, epoch, first_step, metrics_offset, ended FROM runs ORDER BY run DESC LIMIT 1"
    ).fetchone()
    if row is None:
        return None
    names = ("run", "run_id", "session", "epoch", "first_step", "metrics_offset", "ended")
    return RunRow(**dict(zip(names, row, strict=True)))


def read_past(connection: sqlite3.Connection, run: RunRow, *, trainer_step: int) -> Past:
    """Everything a run needs to go on with a trainer at `trainer_step`. What its end cut off (dropped because the run
    ended) is open again: the run goes on."""
    cut_off = f"(state = 'dropped' AND reason = '{DropReason.RUN_ENDED.value}')"
    forgotten = f"(state = 'trained' AND step > {int(trainer_step)})"
    wanted = f"(state IN ('dispatched', 'finished', 'batched') OR {cut_off} OR {forgotten})"
    rows = connection.execute(
        "SELECT key, group_id, environment, task_index, for_step, state, rollout_id, oldest_version, step, reason,"
        " trace_id"
        f" FROM rollouts WHERE run = ? AND {wanted}",
        (run.run,),
    ).fetchall()
    ended = connection.execute(
        f"SELECT state, reason, COUNT(*) FROM rollouts WHERE run = ? AND NOT {wanted} GROUP BY state, reason",
        (run.run,),
    ).fetchall()
    entries = tuple(sorted(map(_entry, rows), key=lambda entry: entry.place))
    steps, damaged_steps = _records(connection, run, trainer_step)
    kept = connection.execute("SELECT DISTINCT step FROM parts WHERE run = ?", (run.run,)).fetchall()
    payloads = {entry.rollout_id for entry in entries}
    payloads &= {rollout_id for (rollout_id,) in connection.execute("SELECT rollout_id FROM payloads")}
    in_flight = connection.execute("SELECT group_id FROM groups WHERE run = ? AND NOT over", (run.run,)).fetchall()
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
        successors=dict(replaced),
        steps=steps,
        damaged_steps=damaged_steps,
        kept=frozenset(step for (step,) in kept),
        payloads=frozenset(payloads),
        drawn=dict(drawn),
        next_sequence=next_sequence or 0,
    )
    group_ids = {past.latest(entry.group_id) for entry in entries} | {group_id for (group_id,) in in_flight}
    return replace(past, groups=read_groups(connection, sorted(group_ids)))


def _records(
    connection: sqlite3.Connection, run: RunRow, trainer_step: int
) -> tuple[dict[int, StepRecord], frozenset[int]]:
    """Records from the trainer's step on and of steps whose batch is kept, and the steps whose record is damaged. No
    other record is needed, or read: each names every rollout of its step."""
    columns = "SELECT step, record, seal FROM steps WHERE run = ?1"
    kept = "SELECT DISTINCT step FROM parts WHERE run = ?1 AND step < ?2"
    rows = connection.execute(
        f"{columns} AND step >= ?2 UNION ALL {columns} AND step IN ({kept})", (run.run, trainer_step)
    )
    records, damaged = {}, set()
    for step, text, found in rows:
        if found == seal(text.encode(), run.run, step):
            records[step] = StepRecord.from_json(text)
        else:
            damaged.add(step)
    return records, frozenset(damaged)


def read_groups(connection: sqlite3.Connection, group_ids: list[str]) -> dict[str, PastGroup]:
    found = {}
    for group_id in group_ids:
        row = connection.execute(
            "SELECT environment, task_index, size, for_step, min_version, active_version, seed, sequence, over,"
            " cancelled, sampled_tokens, seconds FROM groups WHERE group_id = ?",
            (group_id,),
        ).fetchone()
        if row is None:
            continue
        ticket = GroupTicket(
            group_id=group_id,
            task=TaskRef(environment=row[0], index=row[1]),
            size=row[2],
            for_step=row[3],
            min_version=row[4],
            active_version=row[5],
            seed=None if row[6] == UNSEEDED else row[6],
            sequence=row[7],
        )
        group = RolloutGroup(ticket=ticket, cancelled=row[9], sampled_tokens=row[10], seconds=row[11])
        found[group_id] = PastGroup(group=group, over=bool(row[8]))
    return found


def _entry(row: tuple[str, str, str, int, int, str, str, int | None, int | None, str, str]) -> LedgerEntry:
    key, group_id, environment, task_index, for_step, state, rollout_id, oldest_version, step, reason, trace_id = row
    if state == RolloutState.DROPPED.value:  # cut off by the end of the run
        state, reason = ("finished" if step is None else "batched"), ""
    return LedgerEntry(
        key=key,
        group_id=group_id,
        environment=environment,
        task_index=task_index,
        for_step=for_step,
        state=RolloutState(state),
        rollout_id=rollout_id,
        oldest_version=oldest_version,
        step=step,
        reason=reason,
        trace_id=trace_id,
    )
