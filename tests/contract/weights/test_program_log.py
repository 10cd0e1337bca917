"""The log of the `weights` program, as it is started by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def refused_hub(output_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A hub that ends as soon as it logs, since its folder holds something else."""
    (output_dir / "weight_hub").mkdir(parents=True, exist_ok=True)
    (output_dir / "weight_hub" / "decisions.sqlite").write_text("something else")
    done = subprocess.run(
        [sys.executable, "-m", "meshrl.weights.main", "--output-dir", str(output_dir), *flags],
        capture_output=True, text=True, timeout=60.0, env={**os.environ, "PYTHONWARNINGS": "default"}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    return done


def test_a_run_logs_json_and_the_next_in_its_folder_has_lines_of_its_own(tmp_path: Path) -> None:
    printed = [refused_hub(tmp_path, *flags).stdout for flags in (("--log.json-logging",), ())]
    written = [tmp_path / "logs" / "attempt_1" / name for name in ("weights.log", "weights.2.log")]
    assert [path.read_text() for path in written] == printed
    lines = [json.loads(line) for line in printed[0].splitlines()]
    assert any("is damaged: file is not a database" in line["record"]["message"] for line in lines)
    assert "is damaged: file is not a database" in printed[1]
    assert (tmp_path / "logs" / "weights.log").resolve() == written[1].resolve()
