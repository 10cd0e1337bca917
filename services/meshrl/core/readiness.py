"""How a program reports to its starter that it is ready, by creating a file that the starter named.

`rl` uses it to distinguish a program that dies at every start, which is given up, from one that died after it had
served. The starter names the file in an environment variable.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

READY_FILE = "MESHRL_READY_FILE"


def say_ready() -> None:
    """Creates the file that the starter of this process asked for; does nothing when it asked for none."""
    path = os.environ.get(READY_FILE)
    if path:
        with suppress(OSError):  # the starter has gone, or its disk is full: no reason to end
            Path(path).touch()
