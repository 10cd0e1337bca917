"""What a restarted orchestrator reads of a run that has come far."""

import json
import sqlite3
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshrl.core.paths import Layout
from meshrl.core.sqlite_files import seal
from meshrl.orchestrator.ledger.journal import Journal
from meshrl.orchestrator.ledger.open_run import end_whole, last_logged_step, open_journal
from meshrl.orchestrator.ledger.rows import StepRecord
from meshrl.orchestrator.work.screening import RunTotals
from meshrl.wire.types import RunInfo, TrainerInfo

ROLLOUTS = 64


def opened(folder: Path, trainer_step: int) -> Journal:
    run = RunInfo(run_id="main", step=trainer_step, version=trainer_step, epoch=1, revision=0, durable_step=0)
    trainer = TrainerInfo(
        world_size=1, dp_size=1, seq_len=64, pad_multiple=1, objective="", model="", runs=(run,), max_queued_batches=2
    )
    return open_journal(Layout(folder), trainer, run, session="one", least_rollouts={"echo": 2}, checkpoints=False)


def run_of(folder: Path, steps: int) -> None:
    """A ledger and metrics as `steps` steps leave them."""
    opened(folder, 0).close()
    layout = Layout(folder)
    record = StepRecord(
        step=0, digest="", groups=(), advantages={}, untrainable=(), truncated_samples=0, dropped_samples=0,
        longest_row=5, dp_size=1, progress=RunTotals(), drawn={},
    )  # fmt: skip
    with closing(sqlite3.connect(layout.ledger)) as connection, connection, layout.metrics_jsonl.open("w") as metrics:
        for step in range(1, steps + 1):
            names = tuple(f"{step:08d}-{place:028d}" for place in range(ROLLOUTS))
            one = replace(
                record,
                step=step,
                groups=((f"g{step}", names),),
                advantages=dict.fromkeys(names, 0.123456789),
                progress=RunTotals(tokens=step * 320, samples=step * ROLLOUTS, problems=step),
            )
            text = one.to_json()
            connection.execute("INSERT INTO steps VALUES (1, ?, '', ?, ?)", (step, text, seal(text.encode(), 1, step)))
            connection.executemany(
                "INSERT INTO rollouts VALUES (?, 1, ?, 'echo', 0, ?, 'trained', ?, 0, ?, '', 0.0, '')",
                [(f"g{step}/{place}", f"g{step}", step, name, step) for place, name in enumerate(names)],
            )
            connection.execute(
                "INSERT INTO groups (group_id, run, sequence, environment, task_index, size, for_step, min_version,"
                " active_version, seed, over) VALUES (?, 1, ?, 'echo', 0, ?, ?, 0, 0, 0, 1)",
                (f"g{step}", step - 1, ROLLOUTS, step),
            )
            line = {"step": step, "time/step": 1.0, **{f"metric/{number}": 0.123456789 for number in range(100)}}
            metrics.write(json.dumps(line | asdict(one.progress)) + "\n")


def peaks_of(folders: Sequence[str]) -> list[int]:
    """Bytes at the most while each run is opened, whose folder is named after its steps."""
    peaks = []
    for folder in map(Path, folders):
        opened(folder, int(folder.name)).close()  # what is loaded once in a process is loaded
        tracemalloc.start()
        opened(folder, int(folder.name)).close()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return peaks


def test_what_is_read_at_a_restart_does_not_grow_with_the_steps_of_the_run(tmp_path: Path) -> None:
    folders = [tmp_path / str(steps) for steps in (20, 300)]
    for folder in folders:
        steps = int(folder.name)
        run_of(folder, steps)
        journal = opened(folder, steps)
        assert (journal.starting_point.logged, journal.starting_point.unlogged_from) == (steps, steps + 1)
        assert journal.starting_point.progress == RunTotals(
            tokens=steps * 320, samples=steps * ROLLOUTS, problems=steps
        )
        assert (journal.starting_point.drawn, journal.starting_point.next_sequence) == ({"echo": steps}, steps)
        assert journal.ledger.balance().trained == steps * ROLLOUTS
        journal.close()
    # In a process of its own: threads of earlier tests would take memory meanwhile.
    alone = subprocess.run([sys.executable, __file__, *folders], capture_output=True, text=True, timeout=120.0)
    assert alone.returncode == 0, alone.stderr
    short, long = json.loads(alone.stdout)
    assert long < 1.2 * short + 50_000


def test_what_a_process_that_was_killed_after_its_last_record_still_kept_goes(tmp_path: Path) -> None:
    run_of(tmp_path, 3)
    ledger = Layout(tmp_path).ledger
    with closing(sqlite3.connect(ledger)) as connection, connection:
        connection.executemany(
            "INSERT INTO payloads VALUES (?, x'', x'')",
            [(f"00000003-{place:028d}",) for place in range(ROLLOUTS)],
        )
    opened(tmp_path, 3).close()
    with closing(sqlite3.connect(ledger)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM payloads").fetchall() == [(0,)]


@pytest.mark.parametrize(
    ("lines", "logged"),
    [
        ([], 0),
        ([{"step": 1, "time/step": 1.0}, {"step": 2, "time/step": 1.0}, {"step": 2, "eval/echo/avg@1": 0.5}], 2),
        (
            [{"step": step, "time/step": 1.0} for step in (1, 2, 3)]
            + [{"step": 2, "time/step": 1.0, "progress/redone": 1.0}],
            3,
        ),
        ([{"step": step, "time/step": 1.0, "pad": "x" * 30_000} for step in range(1, 9)], 8),
        (
            [{"step": 1, "time/step": 1.0}]
            + [{"step": 1, "time/step": 1.0, "progress/redone": 1.0, "pad": "x" * 30_000}] * 9,
            1,
        ),
        ([{"step": 7, "time/step": 1.0, "pad": "x" * 200_000}, {"step": 7, "eval": 1.0, "pad": "x" * 200_000}], 7),
    ],
)
def test_the_last_logged_step_is_found_from_the_end(tmp_path: Path, lines: list[dict], logged: int) -> None:
    path = tmp_path / "metrics.jsonl"
    earlier = json.dumps({"step": 99, "time/step": 1.0}) + "\n"  # of another run
    whole = earlier + "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(whole + '{"step": 100, "time/st' + "e" * 100_000)
    assert end_whole(path) == len(whole)
    assert path.read_text() == whole
    assert last_logged_step(path, len(earlier)) == logged


if __name__ == "__main__":
    print(json.dumps(peaks_of(sys.argv[1:])))
