"""The lock on a run's output folder, for one `rl` at a time."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from meshrl.core.config import ConfigError
from meshrl.core.paths import Layout
from meshrl.core.run_folder import writing_to
from meshrl.wire.program_state import is_alive

ENDING_S = 15.0  # longer than a guardian takes for the programs of an rl that was killed
POLL_S = 0.1


class FolderInUseError(ConfigError):
    def __init__(self, what: str) -> None:
        super().__init__(f"output_dir: {what}; wait for its end, stop it, or choose another output_dir")
        self.what = what


class FolderLock:
    """Holds an output folder for a `with` block; makes one that is missing, and leaves none empty. The lock (flock)
    ends with the last process that has the file open: rl, or the guardian of its programs."""

    def __init__(self, layout: Layout) -> None:
        self._folder, self._path = layout.output_dir, layout.lock
        self._made = False
        self.fd = -1
        """For another process that is to hold the lock as well."""

    def __enter__(self) -> Self:
        """Waits up to ENDING_S while the programs of a killed holder end. Raises FolderInUseError, or ConfigError when
        the folder cannot be written."""
        deadline_s = time.monotonic() + ENDING_S
        with writing_to(self._folder):
            while not self._try():
                holder = self._holder()
                pid, host, since = (holder.get(key) for key in ("pid", "host", "since"))
                was_killed = host == platform.node() and isinstance(pid, int) and not is_alive(pid)
                if not was_killed or time.monotonic() > deadline_s:
                    described = f"rl (pid {pid} on {host}, since {since})" if holder else "another rl"
                    raise FolderInUseError(f"{self._folder} is in use by {described}")
                time.sleep(POLL_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._path.unlink(missing_ok=True)  # while it is locked, so that it is never the file of the next holder
        if self._made:
            with suppress(OSError):  # something was written there, as it should be
                self._folder.rmdir()
        os.close(self.fd)
        self.fd = -1

    def _try(self) -> bool:
        """A last holder may remove the file, and a folder that it made, between any two of these lines."""
        while True:
            self._made = not self._folder.exists()
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except FileExistsError:  # of a file in its place, or of a folder that is gone by now
                if self._folder.exists():
                    raise
                continue
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), self._path.stat()):
                    break
            except BlockingIOError:
                os.close(fd)
                return False
            except FileNotFoundError:
                pass
            os.close(fd)
        os.ftruncate(fd, 0)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.write(fd, json.dumps({"pid": os.getpid(), "host": platform.node(), "since": since}).encode() + b"\n")
        self.fd = fd
        return True

    def _holder(self) -> Mapping[str, object]:
        try:
            holder = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):  # removed, or not written yet
            return {}
        return holder if isinstance(holder, dict) else {}
