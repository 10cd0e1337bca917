"""Each program as a job of a real SLURM on this machine: sft, rl, eval and inference; prints what became of each.

sft and rl are told that their time is nearly over, as SLURM does before the limit (USR1): they save, go back into the
queue and end where they were to end. The engines' job serves over HTTPS, by credentials that it is given; rl and eval,
as jobs of their own, join the engines of another. Needs root and SLURM (`tests/support/slurm_cluster.py`):

    PYTHONPATH=tests/support python tests/benchmarks/bench_slurm.py [JOB...]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from mesh_run import RUN_TOML
from meshrl.client.authority import Authority
from meshrl.client.trust import Role
from meshrl.environments.reverse_text.model import create_model
from meshrl.orchestrator.ledger.audit import audit
from slurm_cluster import SlurmCluster, cluster

DEADLINE_S = 900.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


class Jobs:
    """Submits one job after another."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.model = folder / "model"
        create_model(self.model, seed=0)

    def submit(self, module: str, name: str, *flags: str, environ: dict[str, str] | None = None) -> str:
        command = [
            sys.executable, "-m", f"meshrl.{module}.main", *flags, "--output-dir", str(self.folder / name),
            "--deployment.gpus-per-node", "0", "--slurm.job-name", name,
        ]  # fmt: skip
        done = subprocess.run(
            command, env={**self.slurm.environ, **(environ or {})}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        return str(re.findall(r"submitted job (\d+)", done.stdout)[0])

    def log(self, name: str, number: str) -> str:
        path = self.folder / name / "slurm" / f"{number}.log"
        return path.read_text() if path.exists() else ""

    def wait(self, what: Callable[[], object], said: str) -> None:
        self.slurm.wait_for(what, said, DEADLINE_S)

    def end(self, number: str) -> str:
        """Waits for the end of a job; returns what became of it."""
        self.wait(lambda: self.slurm.job(number).get("JobState") in ENDED, f"job {number} ends")
        job = self.slurm.job(number)
        return f"{job['JobState']}, {job['Restarts']} restart(s), on {job.get('NodeList')}"

    def tell_that_time_is_over(self, number: str) -> None:
        self.slurm.ask("scancel", "--signal=USR1", "--batch", number)


def sft(jobs: Jobs) -> str:
    """Two nodes, a rank on each; told to end after some steps, it saves and goes on in its second start."""
    number = jobs.submit(
        "sft", "sft", "--model.name", str(jobs.model), "--data.type", "fake", "--data.seq-len", "256", "--max-steps",
        "60", "--ckpt.interval", "1000", "--deployment.type", "multi_node", "--deployment.num-train-nodes", "2",
        "--slurm.requeue-at-limit",
    )  # fmt: skip
    jobs.wait(lambda: (jobs.folder / "sft" / "metrics.jsonl").exists(), "a step is trained")
    jobs.tell_that_time_is_over(number)
    end = jobs.end(number)
    said = jobs.log("sft", number)
    steps = len((jobs.folder / "sft" / "metrics.jsonl").read_text().splitlines())
    return f"{end}; {'resumed' if 'start 2, resuming' in said else 'NOT resumed'}; {steps} lines of metrics"


def rl(jobs: Jobs) -> str:
    """One node; the trainer saves, the job goes back into the queue, and the ledger is whole at the end."""
    file = jobs.folder / "rl.toml"
    file.write_text(RUN_TOML)
    number = jobs.submit(
        "launch", "rl", "@", str(file), "--model.name", str(jobs.model), "--max-steps", "30", "--ckpt.interval",
        "1000", "--slurm.requeue-at-limit",
    )  # fmt: skip
    jobs.wait(lambda: (jobs.folder / "rl" / "metrics.jsonl").exists(), "a step is trained")
    jobs.tell_that_time_is_over(number)
    end = jobs.end(number)
    saved = re.findall(r"step (\d+) is saved", jobs.log("rl", number))
    whole = audit(jobs.folder / "rl").violations == ()
    return f"{end}; saved at step {', '.join(saved)}; ledger {'whole' if whole else 'NOT whole'}"


def evaluate(jobs: Jobs) -> str:
    """One node, with an engine of its own."""
    number = jobs.submit(
        "eval", "eval", "--env.0.id", "reverse_text", "--num-examples", "8", "--model.name", str(jobs.model),
        "--inference.max-model-len", "128", "--sampling.max-tokens", "16",
    )  # fmt: skip
    return f"{jobs.end(number)}; results: {sorted(path.name for path in (jobs.folder / 'eval').glob('*.md'))}"


def inference(jobs: Jobs) -> str:
    """Two nodes, an engine on each, with certificates of a run's authority; one is asked, with and without its key."""
    authority = Authority.create(jobs.folder / "run" / "credentials", "engines")
    folder = jobs.folder / "engine"
    authority.issue(folder, Role.AGENT, "engines", hosts=["127.0.0.2", "127.0.0.3"])
    number = jobs.submit(
        "inference", "inference", "--model.name", str(jobs.model), "--max-model-len", "128", "--deployment.type",
        "multi_node", "--deployment.num-infer-nodes", "2", "--server.host", "0.0.0.0", "--server.port", "8123",
        environ={"MESHRL_TLS_FOLDER": str(folder), "MESHRL_API_KEY": "secret"},
    )  # fmt: skip
    logs = jobs.folder / "inference" / "logs" / "inference"
    jobs.wait(lambda: len([1 for path in logs.glob("node_*.log") if "serving" in path.read_text()]) == 2, "both serve")
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    answers = []
    for headers in ({"Authorization": "Bearer secret"}, {}):
        request = urllib.request.Request("https://127.0.0.2:8123/v1/models", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60, context=context) as answer:
                answers.append(answer.status)
        except urllib.error.HTTPError as error:
            answers.append(error.code)
    jobs.slurm.ask("scancel", number)
    return f"with key {answers[0]}, without {answers[1]}; {jobs.end(number)}"


def joined(jobs: Jobs) -> str:
    """An engine on each of two nodes; the jobs of rl and eval on the third name the addresses that its log says."""
    key = {"MESHRL_API_KEY": "secret"}
    number = jobs.submit(
        "inference", "engines", "--model.name", str(jobs.model), "--max-model-len", "128", "--deployment.type",
        "multi_node", "--deployment.num-infer-nodes", "2", "--server.insecure", environ=key,
    )  # fmt: skip
    logs = jobs.folder / "engines" / "logs" / "inference"
    jobs.wait(lambda: len([1 for path in logs.glob("node_*.log") if "serving" in path.read_text()]) == 2, "both serve")
    urls = re.findall(r"for client.base_url: (\S+)", jobs.log("engines", number))
    file = jobs.folder / "joins.toml"
    file.write_text(RUN_TOML)
    run = jobs.submit(
        "launch", "joins", "@", str(file), "--model.name", str(jobs.model), "--max-steps", "3", "--no-inference",
        "--orchestrator.client.base-url", *urls, "--weights.server.host", "0.0.0.0", "--weights.server.insecure",
        environ=key,
    )  # fmt: skip
    end = jobs.end(run)
    whole = audit(jobs.folder / "joins").violations == ()
    served = [len(re.findall("is served", path.read_text())) for path in sorted(logs.glob("node_*.log"))]
    scored = jobs.submit(
        "eval", "scores", "--env.0.id", "reverse_text", "--num-examples", "8", "--model.name", str(jobs.model),
        "--client.base-url", *urls, "--sampling.max-tokens", "16", environ=key,
    )  # fmt: skip
    said = f"rl: {end}, ledger {'whole' if whole else 'NOT whole'}; versions at the engines: {served}"
    said += f"; eval: {jobs.end(scored)}"
    jobs.slurm.ask("scancel", number)
    return f"engines at {' '.join(urls)}: {jobs.end(number)}; {said}"


JOBS = {"sft": sft, "rl": rl, "eval": evaluate, "inference": inference, "joined": joined}


def main() -> None:
    """Runs the jobs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", choices=[*JOBS, []], metavar="JOB")
    chosen = parser.parse_args().jobs or list(JOBS)
    folder = Path(tempfile.mkdtemp(prefix="bench-slurm-"))
    try:
        (folder / "slurm").mkdir()
        with cluster(folder / "slurm", nodes=3) as slurm:
            jobs = Jobs(slurm, folder)
            print("| job | what became of it | s |\n|---|---|---|", flush=True)
            for name in chosen:
                began = time.monotonic()
                print(f"| {name} | {JOBS[name](jobs)} | {time.monotonic() - began:.0f} |", flush=True)
    finally:
        if not os.environ.get("KEEP"):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
