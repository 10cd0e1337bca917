"""Files that are whole or not there, and stay so through a power cut; used by everything that must be found again.

Also what to do about a disk that takes no more, in one sentence, for whatever program writes under output_dir.

A file that counts is written beside its place, flushed to the disk and renamed, and then the folder that holds its name
is flushed, too. All calls block. All raise OSError.
"""

from __future__ import annotations

import errno
import os
from io import FileIO
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: Path, content: bytes | str) -> None:
    """Puts `content` (text as UTF-8) at `path`, in place of what is there; on disk on return.

    Until then whoever opens `path` finds what was there before. What is broken off leaves `NAME.tmp`, which the next
    attempt overwrites.
    """
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    flush(path.parent)


def append(descriptor: int, content: bytes) -> None:
    """Writes all of `content` to an open file, where its position is; on disk on return."""
    left = memoryview(content)
    while left:  # a disk that fills up takes a part first, and then refuses
        left = left[os.write(descriptor, left) :]
    os.fdatasync(descriptor)


def append_whole(file: FileIO, content: bytes) -> None:
    """Writes all of `content` behind what an open file holds, or leaves the file as it was. Left to the system to put
    on disk.
    """
    size, left = os.fstat(file.fileno()).st_size, memoryview(content)
    try:
        while left:  # a disk that is nearly full takes a part of it
            left = left[file.write(left) :]
    except OSError:
        os.ftruncate(file.fileno(), size)
        raise


def flush(path: Path) -> None:
    """Has the disk take what was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flushes a folder with all that is in it."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            flush(Path(parent, name))
        flush(Path(parent))


def is_full(error: OSError) -> bool:
    """Whether there was no room for what was to be written."""
    return error.errno in _FULL


def disk_trouble(error: BaseException) -> str | None:
    """The sentence for an error of a full disk or of a file that may not be written; None for any other error."""
    if not isinstance(error, OSError):
        return None
    if is_full(error):
        where = f" to {error.filename}" if error.filename else ""
        return (
            f"cannot write{where}: {error.strerror}; free some space and start again, from the last checkpoint"
            " with --ckpt.resume-step -1"
        )
    if error.errno == errno.EROFS and error.filename:
        return (
            f"cannot write to {error.filename}: {error.strerror}; output_dir must be a folder that this user may write,"
            " choose another one with --output-dir"
        )
    if error.errno in (errno.EACCES, errno.EPERM) and error.filename:  # without a file it may be a port
        return (
            f"cannot open {error.filename}: {error.strerror}; give this user the right to it, or, where it is in"
            " output_dir, choose another one with --output-dir"
        )
    return None
