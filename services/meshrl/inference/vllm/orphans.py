"""vLLM's engine process ends with the program that started it, also when that program is killed.

vLLM's own workers watch the engine process; nothing watches the program above it. Without this, a SIGKILL would leave
the model in the GPU's memory until somebody finds the process.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait

ORPHANED = 70
"""Exit code of a process whose program is gone; nobody is left to read it but the kernel's log."""


def end_with_parent() -> None:
    """Starts the watch, in a process that `multiprocessing` started; elsewhere there is nothing to watch."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.sentinel,), name="meshrl-orphan-watch", daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(ORPHANED)
