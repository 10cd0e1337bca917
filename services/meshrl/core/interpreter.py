"""Checks another Python interpreter for a program, such as one with vLLM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from meshrl.core.config import ConfigError


def check_interpreter(program: str, python: Path, module: str) -> None:
    """Raises ConfigError where `python` is no program or finds no `module`, which is not imported."""
    if not os.access(python, os.X_OK):
        raise ConfigError(f"{program}.python: {str(python)!r} is no program; give the path of a python")
    if not finds(python, module):
        raise ConfigError(
            f"{program}.python: {str(python)!r} finds no {module}; install meshrl there, with"
            f" {str(python)!r} -m pip install 'meshrl[{program}]', or from a checkout with"
            " -m pip install --no-deps --editable . --editable clients/python"
        )


def finds(python: Path, module: str) -> bool:
    """Whether it finds a module. Raises OSError if it is no program."""
    code = f"import sys; from importlib.util import find_spec; sys.exit(find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], capture_output=True, timeout=60.0, check=False).returncode == 0
