"""`make drift`: the committed stubs are what the contracts generate."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UV = os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".tools" / "uv" / "bin" / "uv")

pytestmark = pytest.mark.timeout(300)


def test_a_changed_stub_is_found(tmp_path: Path) -> None:
    for name in ("proto", "scripts", "clients/python/meshrl/v1"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / ".tools").symlink_to(ROOT / ".tools")

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "scripts" / "check_stubs.sh"],
            env={**os.environ, "UV": UV}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    unchanged = check()
    assert unchanged.returncode == 0, unchanged.stdout + unchanged.stderr
    path = tmp_path / "clients/python/meshrl/v1/rollout_pb2.py"
    path.write_text(path.read_text() + "\n")
    changed = check()
    assert changed.returncode == 1
    assert "clients/python/meshrl/v1 is not what proto/ generates" in changed.stderr
