"""One run over three rollout services: that of `rl`, one that is killed and comes back, and one of TypeScript.

They and the hub but for that of `rl` run already: it starts none in their place, and they outlive it. The run ends when
its own rollout program is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import node_service
from ledger_audit import audit
from local_ports import free_port
from mesh_run import PACED, PACED_HOST, Run, check_kill, environ
from meshrl.client import ChannelOptions, RolloutClient, WeightSyncClient

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("npm") is None and "CI" not in os.environ,
        reason="the service of clients/typescript needs Node.js and npm",
    ),
]
UP_S = 300.0


@pytest.fixture
def start_program(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a program by hand, as a user would in another terminal."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"program_{len(started)}.txt").open("wb") as out:
            started.append(
                subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environ())
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(60.0)


async def serving(address: str, options: ChannelOptions | None = None) -> int:
    """Waits for a rollout service; returns the rollouts that it has finished."""
    async with RolloutClient(address, options) as client:
        await client.wait_until_serving(UP_S)
        return (await client.get_status()).finished


def watched(run: Run) -> str:
    """What the command of clients/typescript prints of a run, shown the token of an operator."""
    env = {**os.environ, "MESHRL_TLS_TOKEN": str(run.output_dir / "credentials" / "operator.token")}
    command = node_service.watch(f"127.0.0.1:{run.port('trainer')}", count=2)
    done = subprocess.run(command, capture_output=True, text=True, timeout=UP_S, stdin=subprocess.DEVNULL, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_services_of_two_languages_play_one_run_and_the_loss_of_one_costs_nothing(
    start_run: Callable[..., Run],
    start_program: Callable[..., subprocess.Popen[bytes]],
    model_dir: Path,
    tmp_path: Path,
) -> None:
    hub, dies, node = (f"127.0.0.1:{free_port()}" for _ in range(3))

    def program(name: str, address: str, *flags: str) -> tuple[str, ...]:
        folder = tmp_path / f"{name}_{address.rpartition(':')[2]}"
        own = ("--server.port", address.rpartition(":")[2], "--output-dir", str(folder))
        return (sys.executable, "-m", f"meshrl.{name}.main", *own, *flags)

    def rollout(address: str) -> tuple[str, ...]:
        model = ("--model.name", str(model_dir), "--seq-len", "128", "--weights", hub)
        return program("rollout", address, *model, "--workers", "0", *PACED_HOST)

    theirs = start_program(*program("weights", hub))
    first = start_program(*rollout(dies))
    start_program(*node_service.command(port=int(node.rpartition(":")[2]), hub=hub))
    async with WeightSyncClient(hub) as weights:
        await weights.wait_until_serving(UP_S)
    for address in (dies, node):
        await serving(address)
    run = start_run(
        "--orchestrator.services.rollout", f"{dies},local,{node}", "--orchestrator.services.weights", hub,
        *PACED, "--orchestrator.train.env.1.id", "typescript-reverse-text",
        "--orchestrator.train.env.1.name", "reverse_text_ts", "--orchestrator.train.env.1.group-size", "2",
        "--no-orchestrator.train.env.1.local",
    )  # fmt: skip
    run.wait_for(lambda: len(run.steps()) >= 3, UP_S)
    assert f"weights runs already at {hub}: it is used" in run.log("rl")
    assert "started weights" not in run.log("rl")
    assert [line.split()[:2] for line in watched(run).splitlines()] == [["step", "1"], ["step", "2"]]
    own = f"127.0.0.1:{run.port('rollout')}"
    options = run.options()
    for address in (dies, own):  # a run begins as soon as one of them serves each of its environments
        while not await serving(address, options):
            step = len(run.steps())
            run.wait_for(lambda step=step: len(run.steps()) > step, UP_S)
    first.send_signal(signal.SIGKILL)
    run.wait_for(lambda: f"the rollout service at {dies} is away" in run.log("orchestrator"), UP_S)
    step = len(run.steps())
    again = start_program(*rollout(dies))
    run.wait_for(lambda: len(run.steps()) >= step + 2, UP_S)
    run.wait_for(lambda: f"the rollout service at {dies} serves again" in run.log("orchestrator"), UP_S)
    while not await serving(dies):
        step = len(run.steps())
        run.wait_for(lambda step=step: len(run.steps()) > step, UP_S)
    for address in (dies, own, node):
        assert await serving(address, options) > 0
    check_kill(run, "rollout")
    assert [process.poll() for process in (theirs, again)] == [None, None]
    async with WeightSyncClient(hub) as weights, RolloutClient(dies) as rollouts:  # which answer
        await weights.list_engines()
        assert [environment.name for environment in await rollouts.list_environments()] == ["reverse_text"]
    report = audit(run.output_dir)
    assert report.violations == (), report.table()
    failed = {reason: count for (state, reason), count in report.counts.items() if state == "failed"}
    assert failed == {}, report.table()
    shares = [
        (record["mixture/reverse_text/rollouts"], record["mixture/reverse_text_ts/rollouts"])
        for record in run.records()
    ]
    assert all(sum(pair) == pytest.approx(1.0) for pair in shares)
    assert sum(share for _, share in shares) / len(shares) == pytest.approx(2 / 6, abs=0.15)
    assert run.records()[0]["mixture/reverse_text_ts/ratio"] == pytest.approx(2 / 6)
