"""Runs side by side on two ranks: each becomes what it becomes alone on two ranks, to the bit where passes are its own,
but for bits that AdamW makes more of where runs share them, and also if its optimizer fails on one of the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import forked_ranks
import many_runs
from tiny_qwen3 import save_tiny_qwen3

pytestmark = pytest.mark.timeout(700)  # processes of their own that import torch, on a machine that may be busy
SIDE_BY_SIDE = ["wide", "dropped", "muon"]
JOINED = ["wide", "grpo", "odd"]  # dropout keeps a run to itself, and muon makes more of a difference of one bit


def test_runs_on_two_ranks_become_what_each_becomes_alone(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = save_tiny_qwen3(tmp_path / "model", vocab_size=48, num_hidden_layers=2, **shape)
    alone = sorted({*SIDE_BY_SIDE, *JOINED})
    trainings = [SIDE_BY_SIDE, JOINED, *([name] for name in alone), ["wide"]]
    asked = {"runs": trainings, "steps": 3, "joined": [1], "lost": len(trainings) - 1}
    arguments = [model, str(tmp_path / "out"), str(tmp_path / "result"), json.dumps(asked)]
    done = subprocess.run(
        [sys.executable, forked_ranks.__file__, "2", many_runs.__file__, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    together, joined = (load_file(tmp_path / f"result.{number}") for number in (0, 1))
    by_itself = {name: load_file(tmp_path / f"result.{number}")[name] for number, name in enumerate(alone, 2)}
    for name in SIDE_BY_SIDE:
        assert torch.equal(together[name], by_itself[name]), name
    for name in JOINED:
        assert (joined[name] - by_itself[name]).abs().max() <= 1e-4 * by_itself[name].abs().max(), name
    lost = load_file(tmp_path / f"result.{len(trainings) - 1}")  # on one of the ranks, and made anew on both
    assert torch.equal(lost["wide"], by_itself["wide"])
    assert any(not torch.equal(joined[name], by_itself[name]) for name in JOINED)  # they did share passes
