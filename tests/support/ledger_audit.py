"""Audits the ledger of a run against its metrics: was every rollout counted once? Read-only; run by a person or a test.

    python tests/support/ledger_audit.py OUTPUT_DIR

prints a table of the last run and exits with 1 when a rule is broken:

    state     each rollout has one row and one state; lost ones carry the reason, and a restart is no reason to drop one
    trained   a step trains what its record names, no rollout is named by two steps
    steps     trained steps follow one another without a gap, and each has its record in metrics.jsonl, once but for
              those that were done again
    totals    the totals of a record in metrics.jsonl are those of the ledger, never fall from a step to a later one,
              and grow by what the step took
    end       a run that has ended leaves nothing open, and neither does one before the last
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from meshrl.cli.run_folder import open_to_read
from meshrl.core.paths import Layout
from meshrl.orchestrator.ledger.rows import RunRow, StepRecord, last_run
from meshrl.orchestrator.ledger.rules import OPEN_STATES, RolloutState
from meshrl.orchestrator.ledger.writer import LedgerFileError, check_layout, unusable
from meshrl.orchestrator.work.screening import DropReason, RunTotals
from meshrl.wire.growing_file import GrowingFile
from meshrl.wire.text_table import plain_table

_LOST = (RolloutState.DROPPED, RolloutState.FAILED, RolloutState.CANCELLED)
_STATES = frozenset(state.value for state in RolloutState)
_REASONS = frozenset(reason.value for reason in DropReason if reason is not DropReason.RESTARTED)
_NEVER_FALL = (
    *(f"progress/{name}" for name in RunTotals.__dataclass_fields__),  # the ledger's
    *("progress/total_tokens", "progress/total_samples", "progress/step"),  # the trainer's
)
SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """One row of the ledger."""

    key: str
    run: int
    group_id: str
    state: str
    rollout_id: str
    step: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """A step's record in metrics.jsonl; `totals` has those of `_NEVER_FALL` that it holds."""

    step: int
    redone: bool
    totals: Mapping[str, float | None]


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
        if self.counts:
            counts = [(*kind, count) for kind, count in sorted(self.counts.items())]
            lines.append(plain_table(counts, right={2}, indent="  "))
        lines += [f"VIOLATION {text}" for text in self.violations[:SHOWN]]
        if len(self.violations) > SHOWN:
            lines.append(f"... and {len(self.violations) - SHOWN} more")
        lines.append("exact" if self.ok else f"{len(self.violations)} violations")
        return "\n".join(lines)


def audit(output_dir: Path) -> AuditReport:
    """Reads ledger and metrics of `output_dir`. Raises FileNotFoundError without one, LedgerFileError."""
    layout = Layout(output_dir)
    if not layout.ledger.exists():
        raise FileNotFoundError(f"{layout.ledger} does not exist; give the output_dir of a run")
    try:
        with closing(open_to_read(layout.ledger)) as connection:
            check_layout(connection, layout.ledger)
            return _audit(layout, connection)
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:  # a row says what no row can say
        raise unusable(layout.ledger, error) from error


def _audit(layout: Layout, connection: sqlite3.Connection) -> AuditReport:
    run = last_run(connection)
    if run is None:
        raise FileNotFoundError(f"{layout.ledger} holds no run")
    found = connection.execute("SELECT key, run, group_id, state, rollout_id, step, reason FROM rollouts")
    names = tuple(AuditRow.__dataclass_fields__)
    rows = [AuditRow(**dict(zip(names, values, strict=True))) for values in found]
    sizes = dict(connection.execute("SELECT group_id, size FROM groups WHERE run = ?", (run.run,)))
    texts = connection.execute("SELECT record FROM steps WHERE run = ? ORDER BY step", (run.run,))
    records = [StepRecord.from_json(text) for (text,) in texts]
    runs = connection.execute("SELECT COUNT(*) FROM runs").fetchone()[0]
    ours = [row for row in rows if row.run == run.run]
    lines, unreadable = _step_lines(layout.metrics_jsonl, run.metrics_offset)
    trained = sorted({row.step for row in ours if row.state == RolloutState.TRAINED.value and row.step is not None})
    return AuditReport(
        path=layout.ledger,
        runs=runs,
        ended=run.ended,
        counts=Counter((row.state, row.reason) for row in ours),
        first_step=run.first_step,
        last_step=max(trained, default=0),
        redone=sum(line.redone for line in lines),
        violations=(
            *unreadable,
            *_check_states(rows, run),
            *_check_groups(ours, sizes),
            *_check_trained(ours, records),
            *_check_steps(trained, lines, run),
            *totals(lines, [record for record in records if record.step <= max(trained, default=0)]),
        ),
    )


def _step_lines(path: Path, offset: int) -> tuple[list[StepLine], list[str]]:
    """Each step's record since the run began, and what cannot be read; a half-written last line is none."""
    lines: list[StepLine] = []
    unreadable: list[str] = []
    for number, line in enumerate(GrowingFile(path, offset).read_on(), start=1):
        try:
            record = json.loads(line)
            if "time/step" in record:
                held = {name: record[name] for name in _NEVER_FALL if name in record}
                lines.append(StepLine(step=int(record["step"]), redone="progress/redone" in record, totals=held))
        except (ValueError, KeyError, TypeError) as error:
            unreadable.append(f"{path.name}: record {number} of the run cannot be read ({error})")
    return lines, unreadable


def totals(lines: Sequence[StepLine], records: Sequence[StepRecord]) -> Iterator[str]:
    """What is wrong with the totals in metrics.jsonl and in the ledger's records, which are in order of steps.

    A step that was done again has several lines; the last one is of the batch that the ledger names.
    """
    for before, after in pairwise(lines):
        for name, value in after.totals.items():
            earlier = before.totals.get(name)
            if after.step > before.step and earlier is not None and value is not None and value < earlier:
                yield f"step {after.step}: {name} is {value:g}, after {earlier:g} at step {before.step}"
    last = {line.step: line for line in lines}
    for record in records:
        said = last[record.step].totals if record.step in last else {}
        for name, counted in asdict(record.progress).items():
            if (value := said.get(f"progress/{name}", counted)) != counted:
                yield f"step {record.step}: progress/{name} is {value} in metrics.jsonl, and {counted} in the ledger"
    for earlier_record, record in pairwise(records):
        if record.step == earlier_record.step + 1:
            took = {"samples": sum(len(members) for _, members in record.groups), "problems": len(record.groups)}
            for name, count in took.items():
                grown = getattr(record.progress, name) - getattr(earlier_record.progress, name)
                if grown != count:
                    yield f"step {record.step}: {name} in the ledger grew by {grown}, but the step took {count}"
            before_tokens, tokens = earlier_record.progress.tokens, record.progress.tokens
            if tokens < before_tokens:
                yield f"step {record.step}: tokens in the ledger fell from {before_tokens} to {tokens}"


def _check_states(rows: Sequence[AuditRow], run: RunRow) -> Iterator[str]:
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


def _check_groups(rows: Sequence[AuditRow], sizes: Mapping[str, int]) -> Iterator[str]:
    found = Counter(row.group_id for row in rows)
    for group_id, size in sizes.items():
        if found[group_id] < size:
            yield f"group {group_id}: {found[group_id]} rows for {size} rollouts, some are lost"


def _check_trained(rows: Sequence[AuditRow], records: Sequence[StepRecord]) -> Iterator[str]:
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


def _check_steps(trained: Sequence[int], lines: Sequence[StepLine], run: RunRow) -> Iterator[str]:
    if not trained:
        return
    missing = sorted(set(range(run.first_step, max(trained) + 1)) - set(trained))
    if missing:
        yield f"steps {', '.join(map(str, missing))}: not trained, but later ones are"
    first = Counter(line.step for line in lines if not line.redone)
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
        sys.stderr.write("usage: python tests/support/ledger_audit.py OUTPUT_DIR\n")
        return 2
    try:
        report = audit(Path(given[0]))
    except (FileNotFoundError, LedgerFileError) as error:
        sys.stderr.write(f"audit: {error}\n")
        return 2
    sys.stdout.write(report.table() + "\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
