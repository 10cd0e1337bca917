"""A program that is to run in another interpreter makes itself one of it, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODULE = "meshrl.inference.main"


def interpreter(path: Path, then: str) -> Path:
    """A python that finds what this one finds, and does `then` when it is to run a module."""
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\n{then}\n')
    path.chmod(0o755)
    return path


def run_inference(*flags: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "MESHRL_PYTHON"}
    return subprocess.run(
        [sys.executable, "-m", MODULE, *flags], env=environ, capture_output=True, text=True, timeout=180, check=False
    )


def test_inference_started_by_hand_runs_in_the_interpreter_that_it_names(tmp_path: Path) -> None:
    other = interpreter(tmp_path / "python", then='echo "$MESHRL_PYTHON: $@"')
    flags = ("--python", str(other), "--max-model-len", "64")
    assert run_inference(*flags).stdout == f"{other}: -m {MODULE} {' '.join(flags)}\n"


def test_an_interpreter_that_is_a_script_is_entered_once(tmp_path: Path) -> None:
    other = interpreter(tmp_path / "python", then=f'echo entered\nexec {sys.executable} "$@"')
    done = run_inference("--python", str(other), "--output-dir", str(other / "run"))  # which ends it at once
    assert done.stdout.count("entered") == 1, done.stderr
    assert f"cannot write {other}" in done.stderr


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run_inference("--python", str(tmp_path / "none"))
    assert done.returncode == 2
    assert f"inference.python: {str(tmp_path / 'none')!r} is no program; give the path of a python" in done.stderr
