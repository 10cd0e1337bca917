"""A run that may restart its programs outlives their deaths; the ledger adds up all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from ledger_audit import audit
from mesh_run import Run, check_kill

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


def test_a_killed_engine_that_may_restart_catches_up_and_one_that_may_not_any_more_ends_the_run(
    start_run: Callable[..., Run],
) -> None:
    run = start_run("--max-steps", "500", "--engine-restarts", "1")
    run.wait_for(lambda: len(run.steps()) >= 2)
    first = run.pid("inference")
    os.kill(first, signal.SIGKILL)
    trained = len(run.steps())
    run.wait_for(lambda: len(run.steps()) >= trained + 4)
    assert run.pid("inference") != first
    assert [step for step in run.steps() if run.steps().count(step) > 1] == []
    check_kill(run, "inference")  # its one restart is used up
