"""Files that are whole or not there, and stay so through a power cut; used by everything that must be found again.

A file that counts is written beside its place, flushed to the disk and renamed, and then the folder that holds its name
is flushed, too. All calls block. All raise OSError.
"""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path


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
