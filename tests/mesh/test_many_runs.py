"""Two more orchestrators join a mesh that runs: three adapters in one trainer and one engine, each with its ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mesh_run import Run

RANK = 4


def joined_run(mesh: Path, name: str, seed: int) -> subprocess.Popen[str]:
    config = mesh.parent / f"{name}.toml"
    config.write_text(
        f'run_id = "{name}"\nmax_steps = 3\nbatch_size = 8\ngroup_size = 4\nseq_len = 1024\nseed = {seed}\n'
        f"[run]\nlr = 1e-3\ndelete = true\n[run.lora]\nrank = {RANK}\n"
        "[filters]\nzero_signal = false\n[logprob_check]\nfatal = true\n[sampling]\nmax_tokens = 8\n"
        '[[train.env]]\nid = "reverse_text"\n'
    )
    command = [sys.executable, "-m", "meshrl.launch.main", "@", str(config), "--mesh", str(mesh)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_runs_that_join_a_mesh_train_adapters_of_their_own_beside_its_run(start_run: Callable[..., Run]) -> None:
    mesh = start_run(
        "--inference", "--max-steps", "400", "--trainer.model.lora.rank", "8", "--trainer.max-concurrent-runs", "3",
        "--orchestrator.logprob-check.fatal",
    )  # fmt: skip
    mesh.wait_for(mesh.steps)
    joined = {name: joined_run(mesh.output_dir, name, seed) for seed, name in enumerate("ab", 1)}
    for name, process in joined.items():
        said, _ = process.communicate(timeout=300.0)
        assert process.returncode == 0, said
        assert f"made the run {name} at the trainer" in said
        assert "rollouts: dispatched 24 = trained 24 + dropped 0 + failed 0 + cancelled 0 + open 0" in said
        records = (mesh.output_dir / f"run_{name}" / "metrics.jsonl").read_text().splitlines()
        assert [record["step"] for record in map(json.loads, records) if "time/step" in record] == [1, 2, 3]
    before = mesh.steps()[-1]
    mesh.wait_for(lambda: mesh.steps()[-1] > before + 1)  # its own run goes on
    mesh.wait_for(lambda: mesh.log("weights").count("is closed") == 2)
    mesh.wait_for(lambda: mesh.log("inference").count("is over: its requests end") == 2)
