"""A run that may restart its programs outlives their deaths; the ledger adds up all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from ledger_audit import audit
from mesh_run import Run

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]


def test_killed_programs_come_back_and_every_rollout_is_trained_once(start_run: Callable[..., Run]) -> None:
    run = start_run(
        "--max-steps", "14", "--ckpt.interval", "2", "--ckpt.keep-last", "2", "--restarts", "3",
        "--engine-restarts", "1",
    )  # fmt: skip
    run.wait_for(lambda: len(run.steps()) >= 1)
    engine = run.pid("inference")
    os.kill(engine, signal.SIGKILL)
    trained = len(run.steps())
    run.wait_for(lambda: len(run.steps()) >= trained + 3)  # it has caught up
    assert run.pid("inference") != engine
    assert len(set(run.steps())) == len(run.steps())
    for more, victim in ((1, "trainer"), (3, "orchestrator")):
        run.wait_for(lambda least=trained + 3 + more: len(set(run.steps())) >= least)
        os.kill(run.pid(victim), signal.SIGKILL)
    assert run.finish(deadline_s=360.0) == 0, run.console.read_text()
    assert run.log("rl").count("starting it again") == 3
    assert "programs start " in run.log("rl")
    report = audit(run.output_dir)
    assert report.violations == ()
    assert (report.first_step, report.last_step, report.ended) == (1, 14, "run_ended")
    assert report.counts["trained", ""] == 14 * 16
    assert not run.left_running()
