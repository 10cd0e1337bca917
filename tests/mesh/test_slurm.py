"""Jobs of a real SLURM of three nodes.

A run over two of them, whose programs know each other by certificates: it is told that its time is nearly over, one
node is killed, the job is requeued on another, which does not share the run's folder, and the ledger is whole. And
engines of a job of their own, which another job joins.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from ledger_audit import audit
from mesh_run import RUN_TOML
from meshrl.cli.run_folder import RunFolder
from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.client.credentials import CredentialFiles, Credentials, FileCredentials
from meshrl.wire.errors import MeshError, Reason
from slurm_cluster import SlurmCluster, cluster, free_ports, why_not

reason = why_not()
pytestmark = [
    pytest.mark.mesh,
    pytest.mark.timeout(900),
    pytest.mark.skipif(reason is not None, reason=str(reason)),
]
STEPS = 6
KEY = {"MESHRL_API_KEY": "key-of-this-test"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that n1 and n2 share, and n3 does not see."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> Iterator[SlurmCluster]:
    with cluster(tmp_path_factory.mktemp("slurm"), nodes=3, private={"n3": runs}) as started:
        yield started


def submit(slurm: SlurmCluster, program: str, output_dir: Path, *flags: str, environ: Mapping[str, str] = {}) -> str:
    """Submits a program; returns the job's number."""
    command = [sys.executable, "-m", f"meshrl.{program}.main", *flags, "--output-dir", str(output_dir)]
    done = subprocess.run(
        [*command, "--deployment.gpus-per-node", "0"],
        capture_output=True, text=True, env={**slurm.environ, **environ}, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (number,) = re.findall(r"submitted job (\d+) \(", done.stdout)
    return str(number)


def test_a_job_joins_engines_of_another_by_the_addresses_that_its_log_says(
    slurm: SlurmCluster, model_dir: Path, tmp_path: Path
) -> None:
    out, port = tmp_path / "engines", str(free_ports(1)[0])
    engines = submit(
        slurm, "inference", out, "--slurm.job-name", "engines", "--model.name", str(model_dir), "--max-model-len",
        "128", "--torch-threads", "1", "--server.insecure", "--server.port", port, environ=KEY,
    )  # fmt: skip
    log = out / "slurm" / f"{engines}.log"

    def serves() -> bool:
        assert slurm.job(engines).get("JobState") in ("PENDING", "RUNNING"), log.read_text()
        return log.exists() and "serving" in log.read_text()

    slurm.wait_for(serves, "the engine serves", 400.0)
    (url,) = re.findall(r"engine on n1, for client.base_url: (\S+)", log.read_text())
    assert url == f"http://127.0.0.2:{port}/v1"
    scores = submit(
        slurm, "eval", tmp_path / "scores", "--slurm.job-name", "scores", "--env.0.id", "reverse_text", "--workers",
        "0", "--num-examples", "2", "--model.name", str(model_dir), "--client.base-url", url, "--sampling.max-tokens",
        "8", environ=KEY,
    )  # fmt: skip
    ended = ("COMPLETED", "FAILED")
    slurm.wait_for(lambda: slurm.job(scores).get("JobState") in ended, "the evaluation ends", 400.0)
    assert slurm.job(scores)["JobState"] == "COMPLETED", (tmp_path / "scores" / "slurm" / f"{scores}.log").read_text()
    assert slurm.job(scores)["NodeList"] == "n2"
    assert len((tmp_path / "scores" / "results.jsonl").read_text().splitlines()) == 2
    slurm.ask("scancel", engines)
    slurm.wait_for(lambda: slurm.ask("squeue", "-h") == "", "the engines end")


def test_a_job_saves_before_its_limit_and_goes_on_from_there_with_a_whole_ledger_when_a_node_is_killed(
    slurm: SlurmCluster, model_dir: Path, tmp_path: Path, runs: Path
) -> None:
    output_dir, config = runs / "out", tmp_path / "run.toml"
    config.write_text(
        RUN_TOML
        + "[deployment]\ntype = 'multi_node'\n[slurm]\njob_name = 'reverse'\npre_run_command = 'true'\n"
        + f"[ckpt]\ninterval = {10 * STEPS}\n[model]\nname = '{model_dir}'\n"
    )
    number = submit(slurm, "launch", output_dir, "@", str(config), "--max-steps", str(STEPS))
    log = output_dir / "slurm" / f"{number}.log"

    def said(text: str) -> bool:
        state = slurm.job(number).get("JobState")
        assert state not in ("FAILED", "CANCELLED", "COMPLETED"), log.read_text()
        return log.exists() and text in log.read_text()

    slurm.wait_for(lambda: said("") and (output_dir / "metrics.jsonl").exists(), "a step is trained", 400.0)
    assert [address(output_dir, name) for name in ("trainer", "inference")] == ["127.0.0.2", "127.0.0.3"]
    slurm.halt_programs("n2")  # the run is not over before its node is killed
    assert_only_members_are_let_in(output_dir)
    slurm.ask("scancel", "--signal=USR1", "--batch", number)  # as SLURM does two minutes before the limit
    slurm.wait_for(lambda: said("is saved in"), "the trainer saves a checkpoint", 400.0)
    slurm.kill_node("n2")

    slurm.wait_for(lambda: said("start 2, resuming"), "the job starts again", 400.0)
    slurm.wait_for(lambda: slurm.job(number).get("JobState") in ("COMPLETED", "FAILED"), "the job ends", 400.0)
    assert slurm.job(number)["JobState"] == "COMPLETED", log.read_text()
    assert slurm.job(number)["Restarts"] == "1"
    assert [address(output_dir, name) for name in ("trainer", "inference")] == ["127.0.0.2", "127.0.0.4"]
    assert "on 1 rank(s)" in (output_dir / "logs" / "trainer" / "node_0.log").read_text()
    logs = output_dir / "logs"
    assert sorted(path.name for path in logs.glob("attempt_*")) == ["attempt_1", "attempt_2"]
    assert os.readlink(logs / "latest") == "attempt_2"
    assert os.readlink(logs / "latest" / "trainer.log") == "trainer/node_0.log"
    assert (logs / "trainer.log").samefile(logs / "attempt_2" / "trainer" / "node_0.log")
    assert "serving" in (output_dir / "logs" / "inference" / "node_0.log").read_text()
    own = {path.name for path in slurm.seen_by("n3", output_dir).iterdir()}
    assert {"configs", "credentials"} <= own  # what went over srun
    assert not own & {"checkpoints", "ledger.sqlite", "metrics.jsonl"}
    assert audit(output_dir).violations == ()
    with closing(sqlite3.connect(output_dir / "ledger.sqlite")) as ledger:
        states = dict(ledger.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state"))
    assert states["trained"] == STEPS * 16


def assert_only_members_are_let_in(output_dir: Path) -> None:
    """The run's hub answers an operator, and nobody without a certificate; its engine serves HTTPS."""
    hub = f"{address(output_dir, 'weights')}:{port(output_dir, 'weights')}"
    credentials = RunFolder(output_dir).credentials()
    assert credentials is not None

    async def epoch(shown: Credentials) -> int:
        async with WeightSyncClient(hub, ChannelOptions(credentials=shown, unary_deadline_s=60.0)) as client:
            return await client.epoch()

    assert asyncio.run(epoch(credentials)) == 1
    stranger = FileCredentials(CredentialFiles(ca=output_dir / "credentials" / "ca.pem"))
    with pytest.raises(MeshError) as refused:
        asyncio.run(epoch(stranger))
    assert refused.value.reason is Reason.UNREACHABLE  # it does not get past the handshake
    engine = f"https://{address(output_dir, 'inference')}:{port(output_dir, 'inference')}"
    assert f"on {engine}" in (output_dir / "logs" / "inference" / "node_0.log").read_text()
    kept = [path for path in (output_dir / "credentials").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}


def address(output_dir: Path, program: str) -> str:
    """Where a program listens, by the configuration that it was started with."""
    config = tomllib.loads((output_dir / "configs" / f"{program}.toml").read_text())
    assert config["server"]["insecure"] is False
    return str(config["server"]["host"])


def port(output_dir: Path, program: str) -> int:
    return int(tomllib.loads((output_dir / "configs" / f"{program}.toml").read_text())["server"]["port"])
