"""A run over two nodes of a real SLURM: one node is killed, the job is requeued on another, and the ledger is whole."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh_run import RUN_TOML
from meshrl.orchestrator.ledger.audit import audit
from slurm_cluster import SlurmCluster, cluster, why_not

reason = why_not()
pytestmark = [
    pytest.mark.mesh,
    pytest.mark.timeout(900),
    pytest.mark.skipif(reason is not None, reason=str(reason)),
]
STEPS = 8


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmCluster]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with cluster(folder, nodes=3) as started:
        yield started


def submit(slurm: SlurmCluster, model_dir: Path, output_dir: Path) -> str:
    """Submits a run over two nodes; returns the job's number."""
    config = output_dir.parent / "run.toml"
    config.write_text(
        RUN_TOML
        + "[deployment]\ntype = 'multi_node'\ninsecure = true\ngpus_per_node = 0\n"
        + "[slurm]\njob_name = 'reverse'\npre_run_command = 'true'\n"
        + f"[ckpt]\ninterval = 1\n[model]\nname = '{model_dir}'\n"
    )
    command = [sys.executable, "-m", "meshrl.launch.main", "@", str(config), "--output-dir", str(output_dir)]
    done = subprocess.run(
        [*command, "--max-steps", str(STEPS)],
        capture_output=True, text=True, env=slurm.environ, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (number,) = re.findall(r"submitted job (\d+) \(reverse\)", done.stdout)
    return str(number)


def test_a_job_whose_node_is_killed_is_requeued_and_ends_with_a_whole_ledger(
    slurm: SlurmCluster, model_dir: Path, tmp_path: Path
) -> None:
    output_dir = tmp_path / "out"
    number = submit(slurm, model_dir, output_dir)
    log = output_dir / "slurm" / f"{number}.log"

    def said(text: str) -> bool:
        state = slurm.job(number).get("JobState")
        assert state not in ("FAILED", "CANCELLED", "COMPLETED"), log.read_text()
        return log.exists() and text in log.read_text()

    slurm.wait_for(lambda: list((output_dir / "checkpoints").glob("step_*")), "a checkpoint is there", 400.0)
    assert [address(output_dir, name) for name in ("trainer", "inference")] == ["127.0.0.2", "127.0.0.3"]
    slurm.kill_node("n2")

    slurm.wait_for(lambda: said("start 2, resuming"), "the job starts again", 400.0)
    slurm.wait_for(lambda: slurm.job(number).get("JobState") in ("COMPLETED", "FAILED"), "the job ends", 400.0)
    assert slurm.job(number)["JobState"] == "COMPLETED", log.read_text()
    assert slurm.job(number)["Restarts"] == "1"
    assert [address(output_dir, name) for name in ("trainer", "inference")] == ["127.0.0.2", "127.0.0.4"]
    assert "on 1 rank(s)" in (output_dir / "logs" / "trainer" / "node_0.log").read_text()
    assert os.readlink(output_dir / "logs" / "trainer.log") == "trainer/node_0.log"
    assert "serving" in (output_dir / "logs" / "inference" / "node_0.log").read_text()
    assert audit(output_dir).violations == ()
    with sqlite3.connect(output_dir / "ledger.sqlite") as ledger:
        states = dict(ledger.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state"))
    assert states["trained"] == STEPS * 16


def address(output_dir: Path, program: str) -> str:
    """Where a program listens, by the configuration that it was started with."""
    config = (output_dir / "configs" / f"{program}.toml").read_text()
    (host,) = re.findall(r'^\[server\]\nhost = "(\S+)"', config, re.MULTILINE)
    return str(host)
