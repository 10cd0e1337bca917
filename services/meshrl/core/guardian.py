"""Tidies up after a process that dies without a word: ends the programs it has started, removes its temporary folders.

A process of its own beside the one it guards: `rl` with the programs of a run, or a trainer that was started by hand.
Started as a script, with the standard library alone, so that it is up in milliseconds. It reads lines from stdin:
`+PID` when a process group has been started, `-PID` when that group is gone. At the end of stdin the guarded process
is dead, or done: every group left is asked to end, after the grace killed, and then the folders are removed.

    guardian.py GRACE_S LOCK_FILE FOLDER...

The folders stay while another process has LOCK_FILE locked: then they are in use, and that process removes them. An
empty LOCK_FILE removes them in any case.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

POLL_S = 0.05
CLOSE_DEADLINE_S = 30.0


def command(grace_s: float, folders: Sequence[Path], *, lock_file: Path | None = None) -> list[str]:
    """How to start a guardian. Its stdin must be a pipe; a session of its own keeps it out of what it outlives."""
    lock = "" if lock_file is None else str(lock_file.absolute())
    return [sys.executable, "-I", "-S", __file__, str(grace_s), lock, *(str(folder.absolute()) for folder in folders)]


class FolderGuardian:
    """Has a folder removed once this process is gone, unless another process has `lock_file` locked by then."""

    def __init__(self, folder: Path, *, lock_file: Path | None = None) -> None:
        """Without a `lock_file` the folder is this process's alone."""
        self._process = subprocess.Popen(
            command(0.0, [folder], lock_file=lock_file),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Lets the guardian do its work now; blocking."""
        try:
            self._process.communicate(timeout=CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:  # a large folder: it goes on by itself
            return


def follow(line: str, groups: set[int]) -> None:
    """Updates the set of living groups."""
    (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))


def send(groups: set[int], signum: int) -> set[int]:
    """Signals process groups; returns those that still exist."""
    alive = set()
    for group in groups:
        try:
            os.killpg(group, signum)
        except ProcessLookupError:
            continue
        except PermissionError:  # the number belongs to somebody else by now
            continue
        alive.add(group)
    return alive


def end(groups: set[int], grace_s: float) -> None:
    """Asks the groups to end, waits for up to `grace_s`, kills what is left."""
    alive = send(groups, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while alive and time.monotonic() < deadline:
        time.sleep(POLL_S)
        alive = send(alive, 0)
    send(alive, signal.SIGKILL)


def is_locked(path: str) -> bool:
    """True while another process has the file locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it is not there, or not readable: nobody holds it
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def main() -> None:
    """Runs until stdin ends, then tidies up."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # outlives the guarded process on purpose, and ends with its stdin
    grace_s, lock_file, *folders = sys.argv[1:]
    groups: set[int] = set()
    for line in sys.stdin:
        follow(line, groups)
    end(groups, float(grace_s))
    if not (lock_file and is_locked(lock_file)):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)  # most often it is gone already


if __name__ == "__main__":
    main()
