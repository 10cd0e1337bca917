"""The hub's durable log: one append-only file, each entry with its length and checksum, synced before it counts.

Layout: the 8 bytes `MESHLOG1`, then for every entry a head of three little-endian 32-bit words (length of the JSON,
CRC32C of the JSON, CRC32C of the first two words) and the JSON. An append that was cut short by a crash is dropped at
the next start (nobody was told about it); damage anywhere before the end is an error, since what follows it may hold a
decision.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c

MAGIC = b"MESHLOG1"
_HEAD = struct.Struct("<III")


class LogError(Exception):
    """The log cannot be used; the message says what to do about it."""


class DecisionLog:
    """Appends entries durably. One process at a time: the file is locked. Blocking: call it off the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def open(self) -> list[Mapping[str, Any]]:
        """Opens, locks and reads the log; creates it when missing. Raises LogError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        created = not self._path.exists()
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise LogError(
                f"{self._path} is in use by another hub; stop it or give this one its own spool_dir"
            ) from error
        if created:
            _sync_folder(self._path.parent)
        try:
            entries, end = self._read(self._path.read_bytes())
            os.ftruncate(self._fd, end)
            if end == 0:
                self._write(MAGIC)
        except (LogError, OSError):
            self.close()
            raise
        os.lseek(self._fd, 0, os.SEEK_END)
        return entries

    def _read(self, data: bytes) -> tuple[list[Mapping[str, Any]], int]:
        if len(data) < len(MAGIC) and MAGIC.startswith(data):
            return [], 0
        if not data.startswith(MAGIC):
            raise LogError(f"{self._path} is not a log of this program; move it away")
        entries: list[Mapping[str, Any]] = []
        at = len(MAGIC)
        while at < len(data):
            body = at + _HEAD.size
            if body > len(data):
                return entries, at  # a torn head: the last append was cut short
            length, checksum, head_checksum = _HEAD.unpack_from(data, at)
            end = body + length
            sound = google_crc32c.value(data[at : at + 8]) == head_checksum
            if sound and (end > len(data) or (end == len(data) and google_crc32c.value(data[body:]) != checksum)):
                return entries, at  # the last append was cut short
            if not sound and not any(data[at:]):
                return entries, at  # the file had grown before its data was written
            if not sound or google_crc32c.value(data[body:end]) != checksum:
                raise LogError(
                    f"{self._path} is damaged at byte {at}, before its end; restore it from a copy, "
                    "or move it away and start a new run (engines will be seeded again)"
                )
            entries.append(json.loads(data[body:end]))
            at = end
        return entries, at

    def append(self, entry: Mapping[str, Any]) -> None:
        """Returns once the entry is on disk. Raises OSError, after which the log must not be used."""
        text = json.dumps(entry, separators=(",", ":")).encode()
        os.lseek(self._fd, 0, os.SEEK_END)
        head = struct.pack("<II", len(text), google_crc32c.value(text))
        self._write(head + struct.pack("<I", google_crc32c.value(head)) + text)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # drops the lock, too
            self._fd = -1


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
