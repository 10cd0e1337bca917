"""Whole runs of two releases: an orchestrator of contract 1.0 in today's mesh, and today's among services of 1.0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import older_release
from local_ports import free_port
from meshrl.client import TrainerClient

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]
UP_S, RUN_S = 200.0, 300.0
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start_program(tmp_path: Path) -> Iterator[Start]:
    """Starts programs, each with its own environment and a file for what it prints."""
    started: list[subprocess.Popen[bytes]] = []

    def start(environment: Mapping[str, str], module: str, *flags: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{module}.txt").open("wb") as out:
            command = [sys.executable, "-m", f"meshrl.{module}.main", *flags, "--output-dir", str(tmp_path / module)]
            started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))
        return started[-1]

    yield start
    for process in reversed(started):
        process.terminate()  # killed, it would leave its folder in /dev/shm
        process.wait(60.0)


@pytest.mark.parametrize("older", ["orchestrator", "services"])
async def test_a_run_of_both_releases_comes_to_its_end(
    start_program: Start, model_dir: Path, tmp_path: Path, older: str
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    old, new = older_release.unpacked(code), dict(os.environ)
    of_orchestrator, of_services = (old, new) if older == "orchestrator" else (new, old)
    at = {name: f"127.0.0.1:{free_port()}" for name in ("weights", "trainer", "inference", "rollout")}

    def port(name: str) -> tuple[str, str]:
        return "--server.port", at[name].rpartition(":")[2]

    model, hub = ("--model.name", str(model_dir)), ("--weight-broadcast.address", at["weights"])
    start_program(of_services, "weights", *port("weights"))
    start_program(
        of_services, "inference", *port("inference"), *model, *hub, "--max-model-len", "128", "--torch-threads", "1"
    )
    start_program(
        of_services, "trainer", *port("trainer"), *model, *hub, "--seq-len", "1024", "--torch-threads", "1",
        "--optim.lr", "3e-4",
    )  # fmt: skip
    start_program(
        of_services, "rollout", *port("rollout"), *model, "--weights", at["weights"], "--seq-len", "128",
        "--workers", "0", "--env.0.id", "reverse_text",
    )  # fmt: skip
    async with TrainerClient(at["trainer"]) as client:
        await client.wait_until_serving(UP_S)
        trainer = await client.get_trainer()
        assert (trainer.max_runs == 0) == (older == "services")  # which 1.0 does not report
    addresses = [word for name in ("rollout", "trainer", "weights") for word in (f"--services.{name}", at[name])]
    orchestrator = start_program(
        of_orchestrator, "orchestrator", *addresses, "--max-steps", "4", "--batch-size", "8", "--group-size", "4",
        "--seq-len", "1024", "--sampling.max-tokens", "8", "--filters.zero-signal", "false", "--train.env.0.id",
        "reverse_text", "--logprob-check.fatal",
    )  # fmt: skip
    code_of_end = orchestrator.wait(RUN_S)
    said = (tmp_path / "orchestrator.txt").read_text()
    assert code_of_end == 0, said
    assert "trained 32 + dropped " in said
    assert "failed 0" in said
    records = map(json.loads, (tmp_path / "orchestrator" / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in records if "time/step" in record] == [1, 2, 3, 4]
