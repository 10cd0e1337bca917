"""Writes files so that they are complete or absent, also after a power cut, and explains the errors of a full disk. All
calls block and raise OSError."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """Puts `content` at `path`; on disk on return. Until then readers get the earlier content. A broken-off write
    leaves `NAME.tmp`, which the next attempt replaces. `mode` is reduced by the umask."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.unlink(missing_ok=True)  # which may have another mode
    with open(unfinished, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    flush(path.parent)


def json_checksum(values: Mapping[str, object]) -> int:
    """Of JSON, whatever the order of its keys."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def append(descriptor: int, content: bytes) -> None:
    """Writes all of `content` at an open file's position; on disk on return."""
    left = memoryview(content)
    while left:  # a disk that fills up takes a part first, and then refuses
        left = left[os.write(descriptor, left) :]
    os.fdatasync(descriptor)


def write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while content:  # a disk that fills up takes a part first, and then refuses
        written = os.pwrite(descriptor, content, offset)
        offset, content = offset + written, content[written:]


def append_whole(file: FileIO, content: bytes) -> None:
    """Appends all of `content`, or leaves the file as it was. Not flushed to the disk."""
    size, left = os.fstat(file.fileno()).st_size, memoryview(content)
    try:
        while left:  # a disk that is nearly full takes a part of it
            left = left[file.write(left) :]
    except OSError:
        os.ftruncate(file.fileno(), size)
        raise


def flush(path: Path) -> None:
    """A file's content, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            flush(Path(parent, name))
        flush(Path(parent))


def is_full(error: OSError) -> bool:
    return error.errno in _FULL


def disk_trouble(error: BaseException) -> str | None:
    """The sentence for a full disk or a file that may not be written. None for any other error."""
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
