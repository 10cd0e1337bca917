"""`meshrl doctor` on runs that are ill on purpose and on runs that are well.

The runs of tests/golden/runs are real; scripts/record_runs.py makes them. Illnesses that no small run has by itself are
those of a recorded run whose metrics are changed here.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zstandard
from click.testing import CliRunner

from meshrl.cli.main import main
from meshrl.cli.run_folder import RunFolder
from meshrl.diagnosis.causes import CAUSES, Observed, diagnose
from meshrl.diagnosis.history import RunSeries
from meshrl.diagnosis.outcome import slower_half

RUNS = Path(__file__).parents[2] / "golden/runs"
WELL = sorted(path.name.partition(".")[0] for path in RUNS.glob("well_*"))
ILL = {
    "zero_learning_rate": "zero_learning_rate",
    "constant_reward": "constant_reward",
    "truncation": "truncation",
    "high_learning_rate": "reward_collapse",
    "errored_rollouts": "errored_rollouts",
    "reward_hacking": "reward_hacking",
    "empty_slots": "empty_slots",
    "length_drift": "length_drift",
    "repeated_completions": "repeated_completions",
    "stale_rollouts": "stale_rollouts",
    "masked_tokens": "masked_tokens",
    "idle_engines": "idle_engines",
}
"""Under the name of a recorded run, the cause that comes first."""
Record = dict[str, Any]


def records(name: str) -> list[Record]:
    with zstandard.open(RUNS / f"{name}.jsonl.zst", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def observed(lines: list[Record], *, synchronous: bool = False) -> Observed:
    series = RunSeries()
    for line in lines:
        series.take(line)
    return Observed(columns=series.columns, synchronous=synchronous)


def causes_of(lines: list[Record], *, synchronous: bool = False) -> list[str]:
    return [found.cause for found in diagnose(observed(lines, synchronous=synchronous))]


@pytest.mark.parametrize(("name", "cause"), ILL.items())
def test_the_cause_of_an_ill_run_comes_first(name: str, cause: str) -> None:
    assert causes_of(records(name))[:1] == [cause]


@pytest.mark.parametrize("name", WELL)
def test_a_run_that_is_well_has_no_cause_at_any_of_its_steps(name: str) -> None:
    lines = records(name)
    for end in range(1, len(lines) + 1):
        assert causes_of(lines[:end], synchronous="synchronous" in name) == [], f"after {end} records"


def test_five_runs_are_well_and_twelve_ill() -> None:
    assert len(WELL) >= 5
    assert len(ILL) >= 12


def later(change: Callable[[Record, int], None]) -> Callable[[Record, int], None]:
    """The change in the last ten steps alone."""

    def changed(record: Record, step: int) -> None:
        if step > 50:
            change(record, step)

    return changed


CHANGED: dict[str, Callable[[Record, int], None]] = {
    "slow_weights": lambda record, step: record.update({"weights/lag_s": 2.5}),
    "mismatch_growth": lambda record, step: record.update({"mismatch_kl/all/mean": 1e-4 * 1.2**step}),
    "starved_trainer": lambda record, step: record.update({"time/wait_for_batch": 3.5, "time/train_step": 4.0}),
    "entropy_collapse": lambda record, step: record.update(
        {"entropy/all/mean": 0.3 * 0.9**step, "reward/all/mean": 0.5}
    ),
    "stale_engine": lambda record, step: record.update({"weights/engines": 3.0 if step < 58 else 2.0}),
    "diverged": later(lambda record, step: record.update({"optim/grad_norm": None, "loss/mean": None})),
    "exploding_gradient": later(lambda record, step: record.update({"optim/grad_norm": 500.0})),
    "zero_gradient": lambda record, step: record.update({"optim/grad_norm": 0.0}),
    "slow_checkpoints": lambda record, step: record.update({"time/save_ckpt": 0.0 if step % 5 else 10.0}),
    "empty_rollouts": lambda record, step: record.update({"empty_rollouts/all": 0.6}),
    "zero_signal": lambda record, step: record.update({"filters/zero_signal": 0.97}),
    "flat_reward": lambda record, step: record.update({"reward/all/mean": 0.5 + 0.01 * (step % 3)}),
}


@pytest.mark.parametrize("cause", CHANGED)
def test_the_cause_of_a_run_that_is_made_ill_comes_first(cause: str) -> None:
    lines = records("well_demo")
    for line in lines:
        if "time/step" in line or "eval/version" in line:
            CHANGED[cause](line, line["step"])
    assert causes_of(lines)[:1] == [cause]


def test_every_cause_has_a_run_that_has_it() -> None:
    shown = {*ILL.values(), *CHANGED, "loop_lag"}  # the last is no metric: test_a_late_event_loop_is_named
    assert shown == {cause.name for cause in CAUSES}


@pytest.mark.parametrize(
    ("name", "changed", "half", "shares"),
    [
        ("idle_engines", {}, "trainer", "batches for 0% of the time, no rollout was out for 35% of it"),
        ("empty_slots", {"perf/engines_idle": 0.1}, "engines", "no rollout was out for 10% of it"),
        (
            "well_demo",
            {"time/wait_for_batch": 3.0, "time/train_step": 4.0, "perf/engines_idle": 0.1, "perf/idle_slots": 0.2},
            "engines",
            "batches for 75% of the time",
        ),
    ],
)
def test_the_slower_half_is_moved_by_the_key_of_the_cause_that_comes_first(
    name: str, changed: Record, half: str, shares: str
) -> None:
    run = observed([line | changed if "time/step" in line else line for line in records(name)])
    first = diagnose(run)[0]
    line = slower_half(run)
    assert line.startswith(f"the slower half was the {half}: the trainer waited for ")
    assert shares in line
    assert line.endswith(f"; {first.what_to_do}")


def test_halves_that_are_both_busy_have_no_key_and_a_synchronous_run_takes_turns() -> None:
    busy = {"time/wait_for_batch": 0.01, "time/train_step": 1.0, "perf/engines_idle": 0.02, "time/step": 1.0}
    lines: list[Record] = [busy | {"step": step} for step in range(1, 9)]
    lines[0] |= {"time/wait_for_batch": 1.0}  # warms up
    assert slower_half(observed(lines)) == (
        "both halves were busy: the trainer waited for batches for 1% of the time, no rollout was out for 2% of it"
    )
    turns = slower_half(observed([line | {"perf/engines_idle": 0.6} for line in lines], synchronous=True))
    assert turns.startswith("the halves took turns: ")
    assert turns.endswith("; orchestrator.max_async_level: 1 lets both work at once")
    assert slower_half(observed(lines[:1])) == ""
    assert slower_half(observed([{"step": 1, "time/step": 2.0}, {"step": 2, "time/step": 2.0}])) == ""


def test_one_part_of_a_reward_that_rises_while_another_falls_is_named() -> None:
    lines = records("well_demo")
    for line in lines:
        share = line["step"] / 60
        line |= {"reward_parts/a/right/mean": 0.8 * (1 - share), "reward_parts/a/polite/mean": share}
        line["reward/all/mean"] = 0.8 + 0.2 * share
    (found,) = diagnose(observed(lines))
    assert found.cause == "reward_hacking"
    assert "of a's reward polite rose from" in found.evidence
    assert "while right fell from" in found.evidence


def run_folder(path: Path, lines: list[Record]) -> Path:
    (path / "configs").mkdir()
    (path / "configs/trainer.toml").write_text("[optim]\nlr = 0.0\n")
    (path / "configs/orchestrator.toml").write_text("max_async_level = 2\n")
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_the_command_lists_the_causes_with_the_value_of_the_key(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, records("zero_learning_rate"))
    done = CliRunner().invoke(main, ["doctor", "-o", str(folder)])
    assert "1. zero_learning_rate: flat reward: optim/lr is 0 in steps 36 to 40" in done.output
    assert "trainer.optim.lr is 0.0: raise it" in done.output
    as_json = json.loads(CliRunner().invoke(main, ["doctor", "-o", str(folder), "--json"]).output)
    assert {"what": "zero_learning_rate", "state": "warn"}.items() <= as_json[-2].items()


def test_the_command_finds_nothing_wrong_with_a_run_that_is_well(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [line | {"perf/engines_idle": 0.3} for line in records("well_demo")])
    done = CliRunner().invoke(main, ["doctor", "-o", str(folder)])
    halves = slower_half(RunFolder(folder).observed())
    assert halves.startswith("the slower half was the ")
    assert done.output.endswith(f"nothing is wrong with the run of {folder}\n{halves}\n")


def test_a_run_that_never_made_a_step_is_explained_by_its_ledger(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [])
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("CREATE TABLE rollouts (key TEXT PRIMARY KEY, state TEXT, reason TEXT)")
        rows = [(str(key), "dropped", "zero_signal") for key in range(320)]
        ledger.executemany("INSERT INTO rollouts VALUES (?, ?, ?)", rows)
    (found,) = diagnose(RunFolder(folder).observed())
    assert found.cause == "zero_signal"
    assert "no step has ended, and 320 rollouts were dropped" in found.evidence
