"""`meshrl run` against a trainer that keeps a table of runs and trains nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from meshrl.cli.main import main
from run_table import Runs, serving_runs


@pytest.fixture
def trainer() -> Iterator[tuple[str, Runs]]:
    with serving_runs() as served:
        yield served


def test_a_run_is_made_listed_suspended_resumed_saved_and_deleted(trainer: tuple[str, Runs]) -> None:
    address, runs = trainer

    def meshrl(command: str, *arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["run", command, "--address", address, *arguments])
        assert result.exit_code == code, result.output
        return result

    options = ("--rank", "4", "--target", "q_proj", "--lr", "0.001", "--share", "2")
    assert meshrl("create", "a", *options).output == "the run a is active at step 0\n"
    spec = runs.runs["a"].spec
    assert (spec.adapter.rank, spec.adapter.alpha, list(spec.adapter.target_modules)) == (4, 8.0, ["q_proj"])
    assert (spec.optimizer.learning_rate, spec.share) == (0.001, 2.0)
    header, main_line, line = meshrl("list").output.splitlines()
    assert header.split()[:4] == ["RUN", "STATE", "STEP", "VERSION"]
    assert main_line.split()[:4] == ["main", "active", "7", "7"]
    assert line.split()[:5] == ["a", "active", "0", "0", "2"]
    assert meshrl("suspend", "a", "--message", "too slow").output == "the run a is suspended at step 0\n"
    shown = meshrl("show", "a").output
    assert "suspended           too slow" in shown
    assert "adapter             rank 4, alpha 8.0, target_modules ('q_proj',)" in shown
    assert json.loads(meshrl("show", "a", "--json").output)["phase"] == "suspended"
    assert meshrl("resume", "a").output == "the run a is active at step 0\n"
    assert json.loads(meshrl("checkpoint", "a", "--json").output) == {"step": 0, "path": "/out/a"}
    meshrl("delete", "a", "--keep-checkpoints", "--yes")
    assert list(runs.runs) == ["main"]
    assert "give its --rank" in meshrl("create", "b", "--alpha", "2", code=2).output
    assert "a start must be RUN or RUN@STEP" in meshrl("create", "b", "--start-from", "a@newest", code=2).output
    meshrl("create", "b", "--start-from", "a@40", "--with-optimizer")
    start = runs.runs["b"].spec.start_from
    assert (start.run_id, start.step, start.with_optimizer) == ("a", 40, True)


def test_a_run_is_looked_up_before_one_is_asked_whether_to_delete_it(trainer: tuple[str, Runs]) -> None:
    address, runs = trainer
    delete = ["run", "delete", "--address", address]
    result = CliRunner().invoke(main, [*delete, "mian"], input="y\n")
    assert result.exit_code == 1
    assert "go on?" not in result.output
    assert "mian" in result.output
    result = CliRunner().invoke(main, [*delete, "main"], input="n\n")
    assert result.exit_code == 1
    assert "the run main ends at step 7, and its checkpoints are deleted" in result.output
    assert list(runs.runs) == ["main"]
