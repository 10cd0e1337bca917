"""A run that is interrupted leaves nothing, and one begins in no folder that another user made."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh_run import RUN_TOML, Run
from meshrl.core.private_folders import versions_folder
from other_user import OTHER

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]


def test_an_interrupt_of_a_mesh_without_a_run_given_twice_leaves_neither_processes_nor_memory(
    start_run: Callable[..., Run],
) -> None:
    hosts = '[trainer.model.lora]\n[[rollout.env]]\nid = "reverse_text"\n'
    text = RUN_TOML.partition("[orchestrator]")[0] + hosts
    run = start_run("--trainer.max-concurrent-runs", "2", "--weights.transport", "filesystem", text=text)
    in_memory = versions_folder(run.output_dir)
    run.wait_for(in_memory.is_dir)
    assert "a mesh without a run" in run.log("rl")
    os.kill(run.pid("trainer"), signal.SIGSTOP)  # as in a step that takes long: it will not tidy up by itself
    for word in ("draining; a second", "leaving at once"):
        run.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 90.0
        while word not in run.log("rl") and time.monotonic() < deadline:
            time.sleep(0.05)
    assert run.finish() == 128 + signal.SIGINT
    deadline = time.monotonic() + 90.0
    while (run.left_running() or in_memory.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not run.left_running()
    assert not in_memory.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a folder of another user")
def test_an_output_folder_that_another_user_has_made_is_refused(start_run: Callable[..., Run], tmp_path: Path) -> None:
    out = tmp_path / "theirs"
    out.mkdir()
    os.chown(out, OTHER, OTHER)
    run = start_run("--dry-run", output_dir=out)
    assert run.finish() != 0
    assert f"belongs to user {OTHER}, who could read and replace what this user (0) writes there" in (
        run.console.read_text()
    )
    assert list(out.iterdir()) == []
