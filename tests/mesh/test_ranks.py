"""A whole run whose trainer is two processes: `rl` starts and ends them, and users see one trainer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from mesh_run import ENDS_S, Run
from ranked_trainer import children

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]


def test_two_training_processes_train_every_step_and_a_killed_one_ends_the_run(start_run: Callable[..., Run]) -> None:
    run = start_run("--max-steps", "500", "--deployment.num-train-gpus", "2")
    run.wait_for(lambda: len(run.steps()) >= 2)
    assert run.steps()[:2] == [1, 2]
    assert "on 2 rank(s)" in run.log("trainer")
    logs = run.output_dir.glob("logs/trainer/torchrun/*/attempt_0/*/stdout.log")
    assert sorted(path.parent.name for path in logs) == ["0", "1"]
    ranks = children(run.pid("trainer"))
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    assert run.finish(ENDS_S) != 0
    console = run.console.read_text()  # the orchestrator, whose step failed, may be gone before the trainer is
    assert "trainer died: ended with exit code" in console or "the trainer stopped" in console
    assert "of trainer was killed by SIGKILL" in run.log("trainer")
    assert not run.left_running()
