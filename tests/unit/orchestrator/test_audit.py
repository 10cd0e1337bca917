"""Each rule of the audit is broken once, in a copy of a run that keeps to all of them."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from ledger_audit import audit, main
from meshrl.core.paths import Layout
from meshrl.orchestrator.ledger.journal import Journal, StartingPoint
from meshrl.orchestrator.ledger.rows import RunRow
from meshrl.orchestrator.ledger.rules import Ledger
from meshrl.orchestrator.ledger.store import LedgerStore


@pytest.fixture
async def run(tmp_path: Path, finish_group, batch_group) -> Path:
    """Two steps of one group each, a group without signal and one that was cancelled; ended."""
    layout = Layout(tmp_path)
    store = LedgerStore(layout.ledger)
    store.open()
    store.begin(RunRow(run=0, run_id="main", session="", epoch=1, first_step=1, metrics_offset=0))
    start = StartingPoint(recorded=0, logged=0, unlogged_from=1, records={}, drawn={}, next_sequence=0)
    journal = Journal(Ledger(store.record), store, start, layout=layout, durable=0, checkpoints=False)

    lines = []
    for step in (1, 2):
        await batch_group(journal, finish_group(journal, f"g{step}", 2), step)
        journal.ledger.train(step)
        journal.logged(step)
        counted = {f"progress/{name}": float(count) for name, count in asdict(journal.progress(step)).items()}
        lines.append({"step": step, "time/step": 1.0, **counted, "progress/total_tokens": 10.0 * step})
    for rollout in finish_group(journal, "g3", 2).rollouts:
        journal.ledger.drop(rollout.rollout_id, "zero_signal")
    lines.append({"step": 2, "eval/echo/avg@1": 0.5})
    layout.metrics_jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    journal.end()
    journal.close()
    return tmp_path


def sql(statement: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection, connection:
            assert connection.execute(statement).rowcount > 0

    return change


def lines(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "metrics.jsonl"
        path.write_text("".join(change(path.read_text().splitlines(keepends=True))))

    return apply


def total(step: int, name: str, value: float | None) -> Callable[[Path], None]:
    def change(kept: list[str]) -> list[str]:
        records = [json.loads(line) for line in kept]
        for record in records:
            if record["step"] == step and "time/step" in record:
                record[name] = value
        return [json.dumps(record) + "\n" for record in records]

    return lines(change)


def test_a_run_that_keeps_to_the_rules_is_exact(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = audit(run)
    assert report.violations == ()
    assert dict(report.counts) == {
        ("trained", ""): 4,
        ("dropped", "zero_signal"): 2,
        ("failed", "LOST"): 3,
    }
    assert (report.first_step, report.last_step, report.ended) == (1, 2, "run_ended")
    assert main([str(run)]) == 0
    assert "zero_signal" in capsys.readouterr().out


BREAKS: list[tuple[Callable[[Path], None], str]] = [
    (sql("UPDATE rollouts SET reason = '' WHERE state = 'dropped'"), "g3/0: dropped without a reason"),
    (sql("UPDATE rollouts SET reason = '' WHERE state = 'failed'"), "g1/2: failed without a reason"),
    (
        sql("UPDATE rollouts SET reason = 'orchestrator_restarted' WHERE key = 'g3/1'"),
        "g3/1: dropped for 'orchestrator_restarted', which is neither",
    ),
    (sql("UPDATE rollouts SET state = 'batched' WHERE step = 2"), "g2/0: batched although its run has ended"),
    (sql("UPDATE rollouts SET state = 'lost' WHERE key = 'g3/0'"), "g3/0: 'lost' is no state"),
    (
        sql("UPDATE rollouts SET rollout_id = 'g10' WHERE key = 'g2/0'"),
        "rollout g10: 2 rows, counted more than once",
    ),
    (sql("DELETE FROM rollouts WHERE key = 'g3/1'"), "group g3: 2 rows for 3 rollouts, some are lost"),
    (
        sql("UPDATE steps SET record = replace(record, '\"g21\"', '\"g11\"') WHERE step = 2"),
        "rollout g11: trained by steps 1, 2",
    ),
    (
        sql("UPDATE steps SET record = replace(record, '\"g21\"', '\"other\"') WHERE step = 2"),
        "rollout g21: trained by step 2, but no step names it",
    ),
    (
        sql("UPDATE rollouts SET step = 1 WHERE key = 'g2/0'"),
        "rollout g20: trained by step 1, but step 2 names it",
    ),
    (
        sql("UPDATE rollouts SET state = 'dropped', reason = 'stale' WHERE step = 1"),
        "steps 1: not trained, but later ones are",
    ),
    (lines(lambda kept: kept[:1] + kept[2:]), "step 2: trained, but without a record in metrics.jsonl"),
    (
        total(2, "progress/samples", 1.0),
        "step 2: progress/samples is 1, after 2 at step 1",
    ),
    (total(2, "progress/samples", 5.0), "step 2: progress/samples is 5.0 in metrics.jsonl, and 4 in the ledger"),
    (total(1, "progress/tokens", 3.0), "step 1: progress/tokens is 3.0 in metrics.jsonl, and 10 in the ledger"),
    (total(2, "progress/problems", None), "step 2: progress/problems is None in metrics.jsonl, and 2 in the"),
    (total(2, "progress/total_tokens", 9.0), "step 2: progress/total_tokens is 9, after 10 at step 1"),
    (
        sql("UPDATE steps SET record = replace(record, '\"samples\": 4', '\"samples\": 3') WHERE step = 2"),
        "step 2: samples in the ledger grew by 1, but the step took 2",
    ),
    (
        sql("UPDATE steps SET record = replace(record, '\"tokens\": 20', '\"tokens\": 9') WHERE step = 2"),
        "step 2: tokens in the ledger fell from 10 to 9",
    ),
    (lines(lambda kept: [*kept, "{\n"]), "metrics.jsonl: record 4 of the run cannot be read"),
    (lines(lambda kept: kept[:2] + kept[1:]), "step 2: 2 records in metrics.jsonl that do not say it was done"),
]
"""How a rule is broken, and the beginning of the violation."""


def test_each_broken_rule_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (breaks, says) in enumerate(BREAKS):
        broken = tmp_path / f"broken_{number}"
        shutil.copytree(run, broken, ignore=shutil.ignore_patterns("broken_*"))
        breaks(broken)
        report = audit(broken)
        assert any(text.startswith(says) for text in report.violations), (says, report.violations)
        assert main([str(broken)]) == 1
        assert f"VIOLATION {says}" in capsys.readouterr().out


def test_steps_done_again_and_runs_under_way_break_no_rule(run: Path) -> None:
    again = [
        {"step": step, "time/step": 1.0, "progress/redone": 1.0, "progress/samples": 2.0 * step} for step in (1, 2)
    ]
    lines(lambda kept: [*kept, *(json.dumps(record) + "\n" for record in again)])(run)
    report = audit(run)
    assert (report.violations, report.redone) == ((), 2)
    sql("UPDATE runs SET ended = ''")(run)
    sql("UPDATE rollouts SET state = 'batched' WHERE step = 2")(run)
    assert audit(run).ok


def test_a_folder_without_a_ledger_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "does not exist; give the output_dir of a run" in capsys.readouterr().err
    assert main([]) == 2
