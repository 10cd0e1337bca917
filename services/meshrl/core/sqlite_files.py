"""How the SQLite files of ledger and decision log commit, by their file system, and seal their rows.

SQLite's WAL needs memory that all its processes share, which network file systems do not give.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
import sys
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

NETWORK: Mapping[int, str] = {
    0x6969: "nfs", 0x517B: "smb", 0xFF534D42: "cifs", 0xFE534D42: "smb2", 0x0BD00BD0: "lustre", 0x47504653: "gpfs",
    0x19830326: "beegfs", 0x18031977: "wekafs", 0x00C36400: "ceph", 0xAAD7AAEA: "panfs", 0x20030528: "orangefs",
    0x5346414F: "afs", 0x6B414653: "kafs", 0x01161970: "gfs2", 0x7461636F: "ocfs2", 0x01021997: "9p",
    0x65735546: "fuse", 0x786F4256: "vboxsf",
}  # fmt: skip
"""By `f_type`. FUSE may be any: sshfs, JuiceFS."""

BUSY_S = 30.0
"""A write's wait for readers, which block it without WAL."""


def file_system(folder: Path) -> int:
    """Its `f_type`, 0 where the system has none. Raises OSError."""
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    found = ctypes.create_string_buffer(256)  # struct statfs has 120 bytes, f_type is the first field
    if libc.statfs(os.fsencode(folder), found):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF  # some kernels extend its sign


def network_file_system(path: Path) -> str | None:
    """None on a local one. Raises OSError."""
    return NETWORK.get(file_system(path.parent))


def prepare(connection: sqlite3.Connection, path: Path, *, outlives_power_cuts: bool = False) -> None:
    """Outside a transaction. A commit outlives the process and, if asked for or on a network file system, the
    machine."""
    if network_file_system(path) is None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if outlives_power_cuts else 'NORMAL'}")
    else:
        connection.execute(f"PRAGMA busy_timeout = {int(1000 * BUSY_S)}")
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA synchronous = FULL")


def seal(data: bytes, *key: object) -> bytes:
    """A row's digest of its data and its key."""
    return blake3(repr(key).encode() + b"\0" + data).digest(length=16)
