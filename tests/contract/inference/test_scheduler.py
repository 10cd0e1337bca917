"""Our scheduler decides as vLLM's own does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tiny_qwen3 import save_tiny_qwen3

REPOSITORY = Path(__file__).parents[3]


def test_requests_and_blocks_are_chosen_as_vllm_chooses_them(vllm: Path, tmp_path: Path) -> None:
    path = os.pathsep.join(str(REPOSITORY / part) for part in ("services", "clients/python"))
    command = [
        str(vllm),
        str(REPOSITORY / "tests/support/scheduler_pair.py"),
        save_tiny_qwen3(tmp_path / "model"),
        "32",
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["difference"] == ""
    assert found["preempted"] > 20, "blocks were short"
