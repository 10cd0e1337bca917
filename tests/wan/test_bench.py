"""The benchmark of versions over a bad line starts and measures; its figures are in benchmarks/RESULTS.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "benchmarks" / "bench_wan_sync.py"


def test_a_version_in_full_and_a_delta_reach_the_far_engine() -> None:
    command = [sys.executable, str(BENCH), "--shapes", "tiny", "--versions", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| tiny | 0 | full |" in done.stdout
    assert "| tiny | 1 | delta |" in done.stdout
