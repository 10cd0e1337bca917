"""`meshrl doctor --drift` on a real run that is over: at learning rate 0 the mismatch is noise alone."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from mesh_run import Run

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(900)]


def test_the_noise_floor_of_a_run_is_below_its_mismatch(start_run: Callable[..., Run]) -> None:
    run = start_run("--max-steps", "3", "--trainer.optim.lr", "1e-2")
    assert run.finish() == 0, run.console.read_text()
    command = [sys.executable, "-m", "meshrl.cli.main", "doctor", "--drift", "--steps", "2", "--json"]
    done = subprocess.run(
        [*command, "--vary", "trainer.model.attn=sdpa", "-o", str(run.output_dir)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    own, changed = json.loads(done.stdout)
    assert (own["steps"], own["changed"], changed["changed"]) == (2, "-", "trainer.model.attn=sdpa")
    assert changed["kernel"] == "sdpa"
    assert own["most_abs"] < 1e-4 < own["before"], "rollouts of older versions differ more than engine and trainer"
    assert {path.name for path in (run.output_dir / "drift").iterdir()} == {"1", "2"}
