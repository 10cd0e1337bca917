"""The benchmark of weight versions is built of the trainer's parts; without this, only a GPU machine would run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_weight_sync.py"


def test_two_ranks_bring_a_version_to_an_engine(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCH), "--transports", "filesystem", "--steps", "1", "--load", "4", "--ranks", "2"]
    done = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (version,) = json.loads(report.read_text())["tiny filesystem"]
    assert version["bytes"] > 0
    assert version["lag_s"] > version["pause_s"] > 0
