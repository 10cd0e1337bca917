"""Audits the ledger of a run against its metrics: was every rollout counted once? Read-only; run by a person or a test.

    python -m meshrl.orchestrator.audit OUTPUT_DIR

prints a table of the last run and exits with 1 when a rule is broken:

    state     each rollout has one row and one state; lost ones say why, and a restart is no reason to drop one
    trained   a step trains what its record names, no rollout is named by two steps
    steps     trained steps follow one another without a gap, and each has its record in metrics.jsonl, once but for
              those that were done again
    end       a run that has ended leaves nothing open, and neither does one before the last
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from meshrl.core.paths import Layout
from meshrl.orchestrator.groups import DropReason
from meshrl.orchestrator.ledger import OPEN_STATES, RolloutState
from meshrl.orchestrator.ledger_rows import RunRow, StepRecord, last_run

_LOST = (RolloutState.DROPPED, RolloutState.FAILED, RolloutState.CANCELLED)
_STATES = frozenset(state.value for state in RolloutState)
_REASONS = frozenset(reason.value for reason in DropReason if reason is not DropReason.RESTARTED)
SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the ledger."""

    key: str
    run: int
    group_id: str
    state: str
    rollout_id: str
    step: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What an audit found. `counts` are of the last run, by state and reason."""

    path: Path
    runs: int
    ended: str
    counts: Mapping[tuple[str, str], int]
    first_step: int
    last_step: int
    redone: int
    violations: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.violations

    def table(self) -> str:
        """The report as lines of text."""
        lines = [
            f"ledger   {self.path}",
            f"runs     {self.runs}, the last {self.ended or 'has not ended'}",
            f"steps    {self.first_step} to {self.last_step} trained, {self.redone} records of steps done again",
            f"rollouts {sum(self.counts.values())}",
        ]
        lines += [f"  {state:<10} {reason:<24} {count:>8}" for (state, reason), count in sorted(self.counts.items())]
        lines += [f"VIOLATION {text}" for text in self.violations[:SHOWN]]
        if len(self.violations) > SHOWN:
            lines.append(f"... and {len(self.violations) - SHOWN} more")
        lines.append("exact" if self.ok else f"{len(self.violations)} violations")
        return "\n".join(lines)


def audit(output_dir: Path) -> AuditReport:
    """Reads ledger and metrics of `output_dir`. Raises FileNotFoundError without one, sqlite3.Error."""
    layout = Layout(output_dir)
    if not layout.ledger.exists():
        raise FileNotFoundError(f"{layout.ledger} does not exist; give the output_dir of a run")
    with closing(sqlite3.connect(f"file:{layout.ledger}?mode=ro", uri=True)) as connection:
        run = last_run(connection)
        if run is None:
            raise FileNotFoundError(f"{layout.ledger} holds no run")
        found = connection.execute("SELECT key, run, group_id, state, rollout_id, step, reason FROM rollouts")
        names = tuple(Row.__dataclass_fields__)
        rows = [Row(**dict(zip(names, values, strict=True))) for values in found]
        sizes = dict(connection.execute("SELECT group_id, size FROM groups WHERE run = ?", (run.run,)))
        texts = connection.execute("SELECT record FROM steps WHERE run = ? ORDER BY step", (run.run,))
        records = [StepRecord.from_json(text) for (text,) in texts]
        runs = connection.execute("SELECT COUNT(*) FROM runs").fetchone()[0]
    ours = [row for row in rows if row.run == run.run]
    lines = list(_step_lines(layout.metrics_jsonl, run.metrics_offset))
    trained = sorted({row.step for row in ours if row.state == RolloutState.TRAINED.value and row.step is not None})
    return AuditReport(
        path=layout.ledger,
        runs=runs,
        ended=run.ended,
        counts=Counter((row.state, row.reason) for row in ours),
        first_step=run.first_step,
        last_step=max(trained, default=0),
        redone=sum(redone for _, redone in lines),
        violations=(
            *_states(rows, run),
            *_whole_groups(ours, sizes),
            *_trained(ours, records),
            *_steps(trained, lines, run),
        ),
    )


def _step_lines(path: Path, offset: int) -> Iterator[tuple[int, bool]]:
    """(step, done again) of each step's record since the run began; a half-written last line is none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if line.endswith(b"\n") and "time/step" in (record := json.loads(line)):
                yield int(record["step"]), "progress/redone" in record


def _states(rows: Sequence[Row], run: RunRow) -> Iterator[str]:
    open_states = {state.value for state in OPEN_STATES}
    lost = {state.value for state in _LOST}
    for row in rows:
        if row.state not in _STATES:
            yield f"{row.key}: {row.state!r} is no state"
        if row.state in lost and not row.reason:
            yield f"{row.key}: {row.state} without a reason"
        if row.state == RolloutState.DROPPED.value and row.reason and row.reason not in _REASONS:
            yield f"{row.key}: dropped for {row.reason!r}, which is neither the law nor a filter nor the run's end"
        if row.state in open_states and (run.ended or row.run != run.run):
            yield f"{row.key}: {row.state} although its run has ended"
    for rollout_id, count in Counter(row.rollout_id for row in rows if row.rollout_id).items():
        if count > 1:
            yield f"rollout {rollout_id}: {count} rows, counted more than once"


def _whole_groups(rows: Sequence[Row], sizes: Mapping[str, int]) -> Iterator[str]:
    found = Counter(row.group_id for row in rows)
    for group_id, size in sizes.items():
        if found[group_id] < size:
            yield f"group {group_id}: {found[group_id]} rows for {size} rollouts, some are lost"


def _trained(rows: Sequence[Row], records: Sequence[StepRecord]) -> Iterator[str]:
    named: dict[str, list[int]] = {}
    for record in records:
        untrainable = set(record.untrainable)
        for _, rollout_ids in record.groups:
            for rollout_id in rollout_ids:
                if rollout_id not in untrainable:
                    named.setdefault(rollout_id, []).append(record.step)
    for row in rows:
        if row.state != RolloutState.TRAINED.value:
            continue
        steps = named.get(row.rollout_id, [])
        if len(steps) > 1:
            yield f"rollout {row.rollout_id}: trained by steps {', '.join(map(str, steps))}"
        elif steps != [row.step]:
            said = f"step {steps[0]}" if steps else "no step"
            yield f"rollout {row.rollout_id}: trained by step {row.step}, but {said} names it"


def _steps(trained: Sequence[int], lines: Sequence[tuple[int, bool]], run: RunRow) -> Iterator[str]:
    if not trained:
        return
    missing = sorted(set(range(run.first_step, max(trained) + 1)) - set(trained))
    if missing:
        yield f"steps {', '.join(map(str, missing))}: not trained, but later ones are"
    first = Counter(step for step, redone in lines if not redone)
    for step in trained:
        if not first[step] and run.ended:
            yield f"step {step}: trained, but without a record in metrics.jsonl"
    for step, count in first.items():
        if count > 1:
            yield f"step {step}: {count} records in metrics.jsonl that do not say it was done again"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report of an output_dir; returns 0 when the ledger is exact, 1 when not, 2 when there is none."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 1:
        sys.stderr.write("usage: python -m meshrl.orchestrator.audit OUTPUT_DIR\n")
        return 2
    try:
        report = audit(Path(given[0]))
    except (FileNotFoundError, sqlite3.Error) as error:
        sys.stderr.write(f"audit: {error}\n")
        return 2
    sys.stdout.write(report.table() + "\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
