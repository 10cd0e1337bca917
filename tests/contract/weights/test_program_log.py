"""The log of the `weights` program, as it is started by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_hub_logs_json_when_told_to(tmp_path: Path) -> None:
    (tmp_path / "weight_hub").mkdir()
    (tmp_path / "weight_hub" / "decisions.log").write_text("something else")  # it says so, and ends
    done = subprocess.run(
        [sys.executable, "-m", "meshrl.weights.main", "--output-dir", str(tmp_path), "--log.json-logging"],
        capture_output=True, text=True, timeout=60.0, env={**os.environ, "PYTHONWARNINGS": "default"}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert any("is not a log of this program" in line["record"]["message"] for line in lines)
