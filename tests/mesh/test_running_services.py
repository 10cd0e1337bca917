"""`rl` beside services that run already: it uses them, starts none in their place, and leaves them running."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from local_ports import free_port
from mesh_run import Run
from meshrl.client import RolloutClient, WeightSyncClient

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]
UP_S = 120.0


@pytest.fixture
def start_program(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a program by hand, as a user would in another terminal."""
    started: list[subprocess.Popen[bytes]] = []

    def start(module: str, *flags: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{module}.txt").open("wb") as out:
            command = [sys.executable, "-m", f"meshrl.{module}.main", *flags, "--output-dir", str(tmp_path / "theirs")]
            started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(60.0)


async def test_hub_and_rollout_service_that_run_already_serve_a_run_and_outlive_it(
    start_run: Callable[..., Run], start_program: Callable[..., subprocess.Popen[bytes]], model_dir: Path
) -> None:
    hub, rollout = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    model = ("--model.name", str(model_dir), "--seq-len", "128")
    processes = [
        start_program("weights", "--server.port", hub.rpartition(":")[2]),
        start_program(
            "rollout", *model, "--env.0.id", "reverse_text", "--weights", hub,
            "--server.port", rollout.rpartition(":")[2],
        ),
    ]  # fmt: skip
    async with RolloutClient(rollout) as rollouts, WeightSyncClient(hub) as weights:
        await weights.wait_until_serving(UP_S)
        await rollouts.wait_until_serving(UP_S)
        services = ("--orchestrator.services.rollout", rollout, "--orchestrator.services.weights", hub)
        run = start_run("--max-steps", "3", *services)
        assert run.finish() == 0, run.console.read_text()
        assert run.steps() == [1, 2, 3]
        assert f"rollout runs already at {rollout}: it is used" in run.log("rl")
        assert f"weights runs already at {hub}: it is used" in run.log("rl")
        assert "started rollout" not in run.log("rl")
        assert "started weights" not in run.log("rl")
        assert [process.poll() for process in processes] == [None, None]
        assert [environment.name for environment in await rollouts.list_environments()] == ["reverse_text"]
        await weights.list_engines()  # it answers
    assert not run.left_running()
