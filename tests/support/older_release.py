"""The code of contract 1.0, as it was before the fields of 1.1, for a program of its own beside the present one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMIT = "7106c9d1"
ROOT = Path(__file__).parents[2]


def unpacked(folder: Path) -> dict[str, str]:
    """Unpacks it into a folder; returns the environment in which Python imports it. Skips without its commit."""
    archive = subprocess.run(
        ["git", "archive", COMMIT, "services", "clients/python"], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    if archive.returncode != 0:
        pytest.skip(f"this clone lacks commit {COMMIT}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, timeout=60, check=True)
    paths = [str(folder / "services"), str(folder / "clients" / "python")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


async def output_of(environment: dict[str, str], program: str, *words: str) -> str:
    """What a Python program of the older code prints. Fails the test where it fails."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *words,
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(running.communicate(), 120)
    assert running.returncode == 0, err.decode()
    return out.decode()
