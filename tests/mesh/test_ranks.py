"""A whole run whose trainer is two processes: `rl` starts and ends them, and users see one trainer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from mesh_run import ENDS_S, Run
from ranked_trainer import children

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]


def test_a_run_with_two_training_processes_trains_every_step_and_ends_in_order(start_run: Callable[..., Run]) -> None:
    run = start_run("--max-steps", "2", "--deployment.num-train-gpus", "2")
    assert run.finish() == 0, run.console.read_text()
    assert run.steps() == [1, 2]
    assert "on 2 rank(s)" in run.log("trainer")
    ranks = run.output_dir.glob("logs/trainer/torchrun/*/attempt_0/*/stdout.log")
    assert sorted(path.parent.name for path in ranks) == ["0", "1"]
    assert not run.left_running()


def test_a_killed_rank_ends_the_run(start_run: Callable[..., Run]) -> None:
    run = start_run("--max-steps", "500", "--deployment.num-train-gpus", "2")
    run.wait_for(lambda: len(run.steps()) >= 1)
    ranks = children(run.pid("trainer"))
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    assert run.finish(ENDS_S) != 0
    console = run.console.read_text()  # the orchestrator, whose step failed, may be gone before the trainer is
    assert "trainer died: ended with exit code" in console or "the trainer stopped" in console
    assert "of trainer was killed by SIGKILL" in run.log("trainer")
    assert not run.left_running()
