"""How a program tells the one that started it that it has come up, so that a death at every start is told apart.

The starter names a file in an environment variable, and the program makes that file once it serves.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

READY_FILE = "MESHRL_READY_FILE"


def say_ready() -> None:
    """Makes the file that the starter of this process asked for; does nothing when it asked for none."""
    path = os.environ.get(READY_FILE)
    if path:
        with suppress(OSError):  # the starter has gone, or its disk is full: no reason to end
            Path(path).touch()
