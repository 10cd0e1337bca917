"""A run of pytest whose worker crashes in a test ends by itself, fails, and has run every other test once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"
CONFTEST = """
import side_by_side

def pytest_xdist_make_scheduler(config, log):
    return side_by_side.scheduler(config, log)
"""
CRASHES = """
import os, signal

def test_before(): pass
def test_crash(): os.kill(os.getpid(), signal.SIGSEGV)
def test_after(): pass
"""
PASSES = """
def test_one(): pass
def test_two(): pass
"""


def test_a_crash_fails_its_test_and_the_rest_still_runs_and_ends(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {SUPPORT}\n")
    (tmp_path / "test_1.py").write_text(PASSES)
    (tmp_path / "test_2.py").write_text(PASSES)
    (tmp_path / "test_3.py").write_text(CRASHES)
    (tmp_path / "test_4.py").write_text(CRASHES)
    (tmp_path / "test_5.py").write_text(PASSES)
    plain = ["-p", "no:asyncio", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", "-p", "no:faulthandler"]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", *plain, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )

    assert done.returncode == 1, done.stdout + done.stderr
    failed = {line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert failed == {"test_3.py::test_crash", "test_4.py::test_crash"}
    assert "2 failed, 10 passed" in done.stdout
