"""One look of `meshrl watch`: within the width, without colour, and in letters where there are no block characters."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from made_run import make_run
from meshrl.cli.main import main
from meshrl.cli.status import RunStatus, ServiceRow
from meshrl.cli.watch import BLOCKS, LETTERS, screen, sparkline
from meshrl.diagnosis.history import MetricsHistory


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=200)


def test_a_curve_rises_from_the_lowest_to_the_highest_character() -> None:
    assert sparkline([0.0, 0.5, 1.0], BLOCKS) == "▁▅█"
    assert sparkline([0.0, 0.5, 1.0], LETTERS) == ".+@"
    assert sparkline([2.0, 2.0], BLOCKS) == "▁▁", "one that does not move"


def row(service: str, state: str) -> ServiceRow:
    return ServiceRow(service=service, address="127.0.0.1:1", state=state, version=7, lag=2, detail="x" * 200)


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_longer_than_the_terminal(run_path: Path, width: int) -> None:
    history = MetricsHistory(run_path / "metrics.jsonl")
    history.read_on()
    rows = (row("trainer", "serving"), row("weights", "not answering"), row("orchestrator", "running"))
    status = RunStatus(
        output_dir="x", step=9, max_steps=10, headline="x: running", rows=rows, waiting="trainer waits for " + "y" * 99
    )
    lines = list(screen(status, history, ["truncation: " + "z" * 99], width=width, letters=True))
    assert max(map(len, lines)) <= width
    assert all(line.isascii() for line in lines)
    assert lines[1].startswith("now: trainer waits for")
    (reward,) = [line for line in lines if line.startswith("reward")]
    assert reward.split()[1] == "20"
    assert reward.endswith("@")
    assert [line.split()[0] for line in lines if "127.0.0.1:1" in line] == ["trainer", "weights", "orchestrator"]
    assert "serving v7 (-2): xxx" in next(line for line in lines if line.startswith("trainer"))
    assert "! truncation:" in "\n".join(lines[-4:])


def test_a_run_that_is_over_has_no_rows_of_services_that_are_gone(run_path: Path) -> None:
    (run_path / "configs/orchestrator.toml").write_text("max_steps = 200\n")
    (run_path / "configs/weights.toml").write_text('[server]\nhost = "127.0.0.1"\nport = 1\n')
    done = CliRunner().invoke(main, ["watch", "-o", str(run_path), "--count", "1"])
    assert done.exit_code == 0, done.output
    assert "finished, step 200 of 200" in " ".join(done.output.split())
    assert "not answering" not in done.output
    assert "\x1b[3" not in done.output, "no colour"
    status = CliRunner().invoke(main, ["status", "-o", str(run_path)]).output
    assert "ended" in status
    assert "not answering" not in status
