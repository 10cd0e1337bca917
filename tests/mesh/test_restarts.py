"""A run that may restart its programs outlives their deaths and resumes later; the ledger adds up all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from mesh_run import Run
from meshrl.orchestrator.ledger.audit import audit

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]


def test_killed_trainer_and_orchestrator_come_back_and_every_rollout_is_trained_once(
    start_run: Callable[..., Run],
) -> None:
    run = start_run("--max-steps", "8", "--ckpt.interval", "2", "--ckpt.keep-last", "2", "--restarts", "3")
    for trained, victim in ((1, "orchestrator"), (3, "trainer"), (5, "orchestrator")):
        run.wait_for(lambda least=trained: len(set(run.steps())) >= least)
        os.kill(run.pid(victim), signal.SIGKILL)
    assert run.finish(deadline_s=360.0) == 0, run.console.read_text()
    assert run.log("rl").count("starting it again") == 3
    report = audit(run.output_dir)
    assert report.violations == ()
    assert (report.first_step, report.last_step, report.ended) == (1, 8, "run_ended")
    assert report.counts["trained", ""] == 8 * 16
    assert not run.left_running()


def test_a_run_is_resumed_by_the_next_one(start_run: Callable[..., Run]) -> None:
    first = start_run("--max-steps", "4", "--ckpt.interval", "2")
    assert first.finish() == 0, first.console.read_text()
    second = start_run("--max-steps", "6", "--ckpt.resume-step", "-1")
    assert second.finish() == 0, second.console.read_text()
    assert second.steps() == [1, 2, 3, 4, 5, 6]
    assert "resumed" in second.log("trainer")
    assert audit(second.output_dir).violations == ()
