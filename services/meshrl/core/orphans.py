"""Ends processes whose parent is gone, and removes their files.

Processes of `multiprocessing` watch their parent themselves. Others are ended by a guardian beside their starter: this
file as a script, with the standard library alone, `orphans.py GRACE_S LOCK_FILE MARK FOLDER...`. It reads from stdin
`+PID` for a process group that was started, `-PID` for one that is gone. At the end of stdin groups that are left are
asked to end and killed after the grace, processes with MARK in their environment killed, and the folders removed,
unless another process has LOCK_FILE locked.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

RUN_MARK = "MESHRL_RUN_MARK"
WORKER_MARK = "MESHRL_WORKER_MARK"
"""Variables that programs of a run, and of a worker of rollouts, hand down to whatever they start."""

ORPHANED = 70
"""Exit code of a process whose program is gone."""

END_POLL_S = 0.05
CLOSE_DEADLINE_S = 30.0


def end_with_parent(*, whole_group: bool = False) -> None:
    """Ends this process soon after the one that started it with `multiprocessing`, also when that is killed.

    With `whole_group`, which needs a process that leads its group, the programs that it started end too: nothing else
    watches the program above vLLM's engine process, whose SIGKILL would leave the model in the GPU's memory.
    """
    import multiprocessing
    from multiprocessing.connection import wait  # tens of milliseconds, which a guardian does not need

    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        if whole_group:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="meshrl-orphan-watch", daemon=True).start()


def guardian_command(
    grace_s: float, folders: Sequence[Path], *, lock_file: Path | None = None, mark: str = ""
) -> list[str]:
    """Its stdin must be a pipe, and it needs a session of its own."""
    lock = "" if lock_file is None else str(lock_file.absolute())
    known = [sys.executable, "-I", "-S", __file__, str(grace_s), lock, mark]
    return [*known, *(str(folder.absolute()) for folder in folders)]


class FolderGuardian:
    """Has a folder removed once this process is gone, unless another process has `lock_file` locked by then."""

    def __init__(self, folder: Path, *, lock_file: Path | None = None) -> None:
        self._process = subprocess.Popen(
            guardian_command(0.0, [folder], lock_file=lock_file),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=_unmarked(),
        )

    def close(self) -> None:
        """Has the guardian do its work now; blocking."""
        try:
            self._process.communicate(timeout=CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:  # a large folder: it goes on by itself
            return


@contextmanager
def children_end_too() -> Iterator[None]:
    """Kills after the block all that this process started in it, also when this process is killed. In a program of a
    run the guardian of `rl` does that. On Linux alone."""
    if RUN_MARK in os.environ:
        yield
        return
    command = guardian_command(0.0, [], mark=(mark := secrets.token_hex(16)))
    guardian = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=_unmarked())
    os.environ[RUN_MARK] = mark
    try:
        yield
    finally:
        del os.environ[RUN_MARK]
        with suppress(subprocess.TimeoutExpired):  # it goes on by itself
            guardian.communicate(timeout=CLOSE_DEADLINE_S)


def _unmarked() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in (RUN_MARK, WORKER_MARK)}


def _signal(groups: set[int], signum: int) -> set[int]:
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


def end_marked(name: str, mark: str) -> None:
    """Kills every process that was started with the variable `name` set to `mark`; on Linux alone."""
    wanted = f"{name}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:  # another user's, or gone by now
            continue


def is_locked(path: str) -> bool:
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


def guard() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # outlives the guarded process on purpose, and ends with its stdin
    grace_s, lock_file, mark, *folders = sys.argv[1:]
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    alive = _signal(groups, signal.SIGTERM)
    deadline = time.monotonic() + float(grace_s)
    while alive and time.monotonic() < deadline:
        time.sleep(END_POLL_S)
        alive = _signal(alive, 0)
    _signal(alive, signal.SIGKILL)
    if mark:
        end_marked(RUN_MARK, mark)
    if not (lock_file and is_locked(lock_file)):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)  # most often it is gone already


if __name__ == "__main__":
    guard()
