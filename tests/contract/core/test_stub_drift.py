"""`make drift`: committed stubs of both languages are what the contracts generate."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UV = os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".tools" / "uv" / "bin" / "uv")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which("npm") is None and "CI" not in os.environ, reason="the stubs for TypeScript need Node.js and npm"
    ),
]


def test_a_changed_stub_of_either_language_is_found(tmp_path: Path) -> None:
    unpacked = shutil.ignore_patterns("node_modules", "__pycache__")
    for name in ("proto", "scripts", "clients/typescript", "clients/python/meshrl/v1"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unpacked)
    (tmp_path / ".tools").symlink_to(ROOT / ".tools")

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "scripts" / "check_stubs.sh"],
            env={**os.environ, "UV": UV}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    unchanged = check()
    assert unchanged.returncode == 0, unchanged.stdout + unchanged.stderr
    for folder, stub in (
        ("clients/typescript/src/gen", "meshrl/v1/rollout_pb.ts"),
        ("clients/python/meshrl/v1", "rollout_pb2.py"),
    ):
        path = tmp_path / folder / stub
        committed = path.read_text()
        path.write_text(committed + "\n")
        changed = check()
        assert changed.returncode == 1
        assert f"{folder} is not what proto/ generates" in changed.stderr
        path.write_text(committed)
