"""Whole runs: they finish, they count, they are driven by any gRPC tool, and they end loudly when a program dies."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh_run import PROGRAMS, Run

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]
ROOT = Path(__file__).parents[2]
MAX_OFF_POLICY_STEPS = 8  # the default
BUF = ROOT / ".tools/buf/node_modules/.bin/buf"


@pytest.mark.parametrize("level", [0, 2])
def test_a_run_trains_every_step_within_the_law(start_run: Callable[..., Run], level: int) -> None:
    run = start_run("--max-steps", "4", "--max-async-level", str(level))
    assert run.finish() == 0, run.console.read_text()
    steps = [record for record in run.records() if "reward/all/mean" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    bound = 0 if level == 0 else MAX_OFF_POLICY_STEPS  # a group that is late ages while others are trained
    assert all(record["off_policy/all/max"] <= bound for record in steps)
    assert all(record["policy/active_version"] == record["step"] for record in steps)
    if level == 0:
        assert max(record["mismatch_abs/all/mean"] for record in steps) < 1e-4
        assert max(record["mismatch_kl/all/mean"] for record in steps) < 1e-6
    with sqlite3.connect(run.output_dir / "ledger.sqlite") as ledger:
        states = dict(ledger.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state"))
    assert states["trained"] == 4 * 16
    assert set(states) <= {"trained", "dropped", "failed", "cancelled"}
    assert not run.left_running()


@pytest.mark.parametrize("victim", PROGRAMS)
def test_a_killed_program_ends_the_run_within_ten_seconds_and_is_named(
    start_run: Callable[..., Run], victim: str
) -> None:
    run = start_run("--max-steps", "500")
    run.wait_for(lambda: len(run.steps()) >= 1)
    os.kill(run.pid(victim), signal.SIGKILL)
    killed = time.monotonic()
    code = run.finish(deadline_s=10.0)
    assert code != 0
    assert time.monotonic() - killed < 10.0
    console = run.console.read_text()
    assert f"{victim} died: was killed by SIGKILL" in console
    shown = console.split(f"{victim} died")[1].splitlines()[1:]
    logged = run.log(victim).splitlines()
    assert not logged or any(line.strip() and line.strip() in "\n".join(shown) for line in logged[-20:])
    assert not run.left_running()


def call(address: str, method: str, body: dict[str, Any]) -> dict[str, Any]:
    """One call by `buf curl`, with nothing but the server's reflection to go by."""
    done = subprocess.run(
        [
            BUF,
            "curl",
            "--http2-prior-knowledge",
            "--protocol",
            "grpc",
            "-d",
            json.dumps(body),
            f"http://{address}/{method}",
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_any_grpc_tool_lists_and_calls_the_services_of_a_live_run(start_run: Callable[..., Run]) -> None:
    run = start_run("--max-steps", "500")
    run.wait_for(lambda: len(run.steps()) >= 1)
    addresses = {program: f"127.0.0.1:{run.port(program)}" for program in ("rollout", "trainer", "weights")}
    services = {"rollout": "RolloutService", "trainer": "TrainerService", "weights": "WeightSync"}
    for program, service in services.items():
        listed = subprocess.run(
            [
                BUF,
                "curl",
                "--http2-prior-knowledge",
                "--protocol",
                "grpc",
                "--list-services",
                f"http://{addresses[program]}",
            ],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout.split()
        assert {f"meshrl.v1.{service}", "grpc.health.v1.Health"} <= set(listed)
        health = call(addresses[program], "grpc.health.v1.Health/Check", {"service": f"meshrl.v1.{service}"})
        assert health["status"] == "SERVING"

    environments = call(addresses["rollout"], "meshrl.v1.RolloutService/ListEnvironments", {"contractVersion": "1.0"})
    assert environments["environments"][0]["name"] == "reverse_text"
    trainer = call(addresses["trainer"], "meshrl.v1.TrainerService/GetTrainer", {"contractVersion": "1.0"})
    assert trainer["runs"][0]["runId"] == "main"
    assert int(trainer["runs"][0]["step"]) >= 1
    engines = call(addresses["weights"], "meshrl.v1.WeightSync/ListEngines", {})
    assert engines["engines"][0]["routable"] is True
    assert engines["engines"][0]["state"].startswith("AGENT_STATE_")


def test_a_killed_engine_that_may_restart_catches_up_and_the_run_goes_on(start_run: Callable[..., Run]) -> None:
    run = start_run("--max-steps", "500", "--engine-restarts", "1")
    run.wait_for(lambda: len(run.steps()) >= 2)
    first = run.pid("inference")
    os.kill(first, signal.SIGKILL)
    trained = len(run.steps())
    run.wait_for(lambda: len(run.steps()) >= trained + 4)
    assert run.pid("inference") != first
    assert [step for step in run.steps() if run.steps().count(step) > 1] == []
    run.process.send_signal(signal.SIGTERM)
    assert run.finish(deadline_s=60.0) == 0
    assert not run.left_running()
