"""Runs side by side on two ranks: each becomes what it becomes alone on two ranks, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import many_runs
from tiny_qwen3 import save_tiny_qwen3

SIDE_BY_SIDE = ["wide", "dropped", "muon"]


def test_runs_on_two_ranks_become_what_each_becomes_alone(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = save_tiny_qwen3(tmp_path / "model", vocab_size=48, num_hidden_layers=2, **shape)
    trainings = [SIDE_BY_SIDE, *([name] for name in SIDE_BY_SIDE)]
    arguments = [model, str(tmp_path / "out"), str(tmp_path / "result"), json.dumps({"runs": trainings, "steps": 3})]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         many_runs.__file__, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=220,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    together = load_file(tmp_path / "result.0")
    for number, name in enumerate(SIDE_BY_SIDE, 1):
        assert torch.equal(together[name], load_file(tmp_path / f"result.{number}")[name]), name
