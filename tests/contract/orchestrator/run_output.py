"""Reads what a run of the orchestrator left in its folder: records of metrics, rows of the ledger, and its audit."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from ledger_audit import AuditReport, audit


def records(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written yet


def step_records(folder: Path) -> list[dict[str, float]]:
    """Without those of evaluations."""
    return [record for record in records(folder) if "time/step" in record]


def query(folder: Path, sql: str, *values: object) -> list[tuple]:
    """Rows of the ledger; a change is committed."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection, connection:
        return connection.execute(sql, values).fetchall()


def assert_exact(folder: Path, steps: int) -> AuditReport:
    """Every rollout is counted once, and the run has trained steps 1 to `steps`."""
    report = audit(folder)
    assert report.violations == (), report.table()
    assert (report.first_step, report.last_step) == (1, steps)
    return report
