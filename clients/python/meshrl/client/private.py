"""Files and folders for their owner alone: credentials, and those of programs in /tmp or /dev/shm."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_OTHERS = 0o077
_OTHERS_WRITE = 0o022


def private_folder(path: Path) -> Path:
    """Makes a missing folder with mode 0700, its parents as usual. Returns `path`.

    Raises PermissionError for a link, a file, and a folder that belongs to others or that others may write to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise _refusal(path, "is a link or no folder") from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise _refusal(path, f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}")
        if found.st_mode & _OTHERS_WRITE:
            raise _refusal(path, f"has mode {stat.S_IMODE(found.st_mode):04o}, so that others may write to it")
        if found.st_mode & _OTHERS:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path


def write_private(path: Path, content: bytes) -> None:
    """Replaces a file whole and on disk, for its owner alone."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _refusal(path: Path, why: str) -> PermissionError:
    return PermissionError(errno.EACCES, f"it {why}", str(path))
