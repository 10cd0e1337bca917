"""The folder of a living run is its own: nobody else writes there, and nothing of it is left in memory afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mesh_run import PACED, WITH_WORKERS, Run, environ
from meshrl.core.private_folders import versions_folder
from other_user import OTHER

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]


def second(run: Run, *flags: str) -> subprocess.CompletedProcess[str]:
    """The same `rl` once more, on the folder of `run`."""
    assert isinstance(run.process.args, list)
    command = [str(part) for part in run.process.args]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=240, env=environ())


def open_to_others(folder: Path) -> list[Path]:
    """What other users may read or write, of a folder and all that is in it."""
    found = []
    for path in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):  # of a run that goes on
            if not path.is_symlink() and path.stat().st_mode & 0o077:
                found.append(path)
    return found


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_second_rl_leaves_a_living_run_alone_and_a_killed_run_leaves_nothing(start_run: Callable[..., Run]) -> None:
    run = start_run("--max-steps", "500", "--weights.transport", "filesystem", *WITH_WORKERS, *PACED)
    run.wait_for(lambda: len(run.steps()) >= 1)
    in_memory, configs = versions_folder(run.output_dir), contents(run.output_dir / "configs")
    assert in_memory.is_dir()
    assert open_to_others(run.output_dir) == open_to_others(in_memory) == []

    for flags in (["--seed", "7"], ["--clean-output-dir"]):
        refused = second(run, *flags)
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert f"{run.output_dir} is in use by rl (pid {run.process.pid} on " in refused.stderr
    dry = second(run, "--dry-run", "--seed", "7")
    assert dry.returncode == 0, dry.stderr
    assert f"in use by rl (pid {run.process.pid} on " in dry.stdout
    assert "nothing was written" in dry.stdout

    assert contents(run.output_dir / "configs") == configs
    assert in_memory.is_dir()
    trained = len(run.steps())
    run.wait_for(lambda: len(run.steps()) >= trained + 2)

    run.process.send_signal(signal.SIGKILL)
    run.process.wait(60.0)
    after = second(run, "--dry-run", "--seed", "7")  # waits for the programs of the killed one
    assert after.returncode == 0, after.stderr
    assert "nothing was written" not in after.stdout
    assert "seed = 7" in (run.output_dir / "configs" / "trainer.toml").read_text()
    assert not run.left_running()
    assert not in_memory.exists()


def test_an_interrupt_given_twice_leaves_neither_processes_nor_memory(start_run: Callable[..., Run]) -> None:
    run = start_run("--max-steps", "500", "--weights.transport", "filesystem")
    in_memory = versions_folder(run.output_dir)
    run.wait_for(in_memory.is_dir)
    os.kill(run.pid("trainer"), signal.SIGSTOP)  # as in a step that takes long: it will not tidy up by itself
    for word in ("draining; once more", "leaving at once"):
        run.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 30.0
        while word not in run.log("rl") and time.monotonic() < deadline:
            time.sleep(0.05)
    assert run.finish() == 128 + signal.SIGINT
    deadline = time.monotonic() + 30.0
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
