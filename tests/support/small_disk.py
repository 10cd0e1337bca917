"""A real disk of a few MB that can be filled, for what happens when there is no room; needs the right to mount."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *, mebibytes: int = 4) -> Iterator[Path]:
    """A file system of its own at `folder`; the test is skipped where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounting.returncode:
        pytest.skip(f"needs the right to mount a small disk: {mounting.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Takes all the room that is left; deleting the file that is returned frees it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for block in (2**16, 2**12, 1):
            try:
                while file.write(b"\0" * block):
                    pass
            except OSError:  # full
                continue
    return filler


def make_read_only(folder: Path) -> None:
    """Nothing can be written to a mounted folder any more, not even by root."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
