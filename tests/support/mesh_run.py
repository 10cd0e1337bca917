"""A run of the real programs in a test: how to wait for it, read it and see what it left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.client import ChannelOptions
from meshrl.client.credentials import TokenCredentials

TASKSETS = Path(__file__).parents[1] / "mesh" / "tasksets"
PROGRAMS = ("rollout", "trainer", "weights", "inference", "orchestrator")
READY_S = 240.0
ENDS_S = 90.0
"""Of a run that lost a program: ten seconds, and what a machine takes that stands still meanwhile."""
RUN_TOML = """
[trainer]
seq_len = 1024
torch_threads = 1

[trainer.optim]
lr = 3e-4

[inference]
max_model_len = 128
torch_threads = 1

[rollout]
seq_len = 128
workers = 0

[orchestrator]
batch_size = 16
group_size = 4
seq_len = 1024

[orchestrator.filters]
zero_signal = false

[orchestrator.sampling]
max_tokens = 16

[[orchestrator.train.env]]
id = "reverse_text"
"""
"""A run that is small enough for two CPU cores; environments play in the rollout program unless told otherwise."""


def of_orchestrator(*, seed: int, steps: int) -> str:
    """The keys of an orchestrator whose run is as small."""
    return (
        f"batch_size = 8\ngroup_size = 4\nseq_len = 1024\nseed = {seed}\nmax_steps = {steps}\n"
        "filters.zero_signal = false\nsampling.max_tokens = 8\nlogprob_check.fatal = true\n"
        'train.env = [{ id = "reverse_text" }]\n'
    )


WITH_WORKERS = ("--rollout.workers", "1")
"""Flags of a run whose environments play in a process of their own, which takes ten seconds of a core to start."""
PACED = (
    "--orchestrator.train.env.0.id", "paced_reversing", "--orchestrator.train.env.0.name", "reverse_text",
    "--no-preflight", "--orchestrator.max-inflight-rollouts", "16",
)  # fmt: skip
"""Flags of a run that trains a step every second or two: while a test looks at it, the cores are for others.

The preflight would import the environment, which takes four seconds of a core."""
SLOW = (*PACED[:-1], "8")
"""The same at half the pace."""
PACED_HOST = ("--env.0.id", "paced_reversing", "--env.0.name", "reverse_text")
"""Flags of a rollout program that plays for such a run."""


def environ(**more: str) -> dict[str, str]:
    """The environment of a program that finds the tasksets of these tests."""
    path = os.pathsep.join(filter(None, (str(TASKSETS), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


@dataclass
class Run:
    """One `rl` process and what it has written."""

    process: subprocess.Popen[bytes]
    output_dir: Path
    console: Path

    def log(self, name: str) -> str:
        path = self.output_dir / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def records(self) -> list[dict[str, Any]]:
        path = self.output_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> list[int]:
        return [record["step"] for record in self.records() if "reward/all/mean" in record]

    def pid(self, program: str) -> int:
        return int(re.findall(rf"started {program} \(pid (\d+)\)", self.log("rl"))[-1])

    def port(self, program: str) -> int:
        config = (self.output_dir / "configs" / f"{program}.toml").read_text()
        return int(re.findall(r"^port = (\d+)", config, re.MULTILINE)[-1])

    def of(self, run_id: str) -> Run:
        """A run of this mesh, with its folder."""
        return Run(process=self.process, output_dir=self.output_dir / f"run_{run_id}", console=self.console)

    def secret(self, name: str) -> str:
        """A file of the run's credentials: `engine.key`, or `ROLE.token`."""
        return (self.output_dir / "credentials" / name).read_text().strip()

    def options(self, role: str = "operator") -> ChannelOptions:
        """How a client calls the services of this run."""
        return ChannelOptions(credentials=TokenCredentials(self.secret(f"{role}.token")))

    def wait_for(self, what: Callable[[], object], deadline_s: float = READY_S) -> None:
        """Until `what()` is true; fails with the logs when the run ends first or the deadline passes."""
        end = time.monotonic() + deadline_s
        while not what():
            assert self.process.poll() is None, f"rl ended early:\n{self.console.read_text()}"
            assert time.monotonic() < end, f"not in {deadline_s} s:\n{self.console.read_text()}"
            time.sleep(0.1)

    def finish(self, deadline_s: float = READY_S) -> int:
        return self.process.wait(timeout=deadline_s)

    def left_running(self) -> list[int]:
        """Processes that belong to this run, by the folder on their command line."""
        listed = subprocess.run(
            ["ps", "-axo", "pid=,command="], capture_output=True, text=True, timeout=60.0, check=True
        )
        return [int(line.split()[0]) for line in listed.stdout.splitlines() if str(self.output_dir) in line]


def check_kill(run: Run, victim: str) -> None:
    """Kills a program: the whole run ends, and names it with the last lines of its log."""
    os.kill(run.pid(victim), signal.SIGKILL)
    assert run.finish(ENDS_S) != 0
    console = run.console.read_text()
    assert f"{victim} died: was killed by SIGKILL" in console
    shown = console.rpartition(f"{victim} died")[2].splitlines()[1:]  # it may have been restarted before
    logged = run.log(victim).splitlines()
    assert not logged or any(line.strip() and line.strip() in "\n".join(shown) for line in logged[-20:])
    assert not run.left_running()


def check_law(run: Run, *, steps: int, most_off_policy: int) -> None:
    """A run that has finished trained each step once, on its batch of 16, by rollouts of versions that are new enough,
    and leaves nothing."""
    records = [record for record in run.records() if "reward/all/mean" in record]
    assert [record["step"] for record in records] == [*range(1, steps + 1)]
    assert all(record["off_policy/all/max"] <= most_off_policy for record in records)
    assert all(record["policy/active_version"] == record["step"] for record in records)
    if most_off_policy == 0:
        assert max(record["mismatch_abs/all/mean"] for record in records) < 1e-4
        assert max(record["mismatch_kl/all/mean"] for record in records) < 1e-6
    with closing(sqlite3.connect(run.output_dir / "ledger.sqlite")) as ledger:
        states = dict(ledger.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state"))
    assert states["trained"] == steps * 16
    assert set(states) <= {"trained", "dropped", "failed", "cancelled"}
    assert not run.left_running()
