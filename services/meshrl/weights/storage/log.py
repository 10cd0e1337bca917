"""The hub's durable log: one file, each entry with its length and checksum, synced before it counts.

Layout: the 8 bytes `MESHLOG1`, then for every entry a head of three little-endian 32-bit words (length of the JSON,
CRC32C of the JSON, CRC32C of the first two words) and the JSON. An append that was cut short by a crash is dropped at
the next start, since no caller had an answer that rests on it: the file ends before the entry does, or in the zeros of
blocks that were never written. Anything else that does not match its checksum, wherever it is, was damaged after it was
written and is an error, since it may hold a decision.

So that the log does not grow for ever, `compact` writes a new file of fewer entries and renames it over the old one.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import google_crc32c
from loguru import logger

from meshrl.core import durable
from meshrl.weights.coordinator.states import LogEntry

MAGIC = b"MESHLOG1"
_HEAD = struct.Struct("<III")


class LogError(Exception):
    """The log cannot be used; the message says what to do about it."""


class DecisionLog:
    """Appends entries durably. One process at a time: the file is locked. Blocking: call it off the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def open(self) -> list[LogEntry]:
        """Opens, locks and reads the log; creates it when missing. Raises LogError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        created = not self._path.exists()
        self._fd = self._locked()
        if created:
            durable.flush(self._path.parent)
        try:
            self._new_path.unlink(missing_ok=True)  # of a hub that was killed before it was renamed
            entries, end = self._read(self._path.read_bytes())
            os.ftruncate(self._fd, end)
            if end == 0:
                durable.append(self._fd, MAGIC)
        except (LogError, OSError):
            self.close()
            raise
        os.lseek(self._fd, 0, os.SEEK_END)
        return entries

    def _locked(self) -> int:
        """The file, locked. A hub that compacts its log may have put another file in its place meanwhile: that one."""
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                    return fd
            except BlockingIOError as error:
                os.close(fd)
                raise LogError(
                    f"{self._path} is in use by another hub; stop it or give this one its own spool_dir"
                ) from error
            os.close(fd)

    @property
    def _new_path(self) -> Path:
        return self._path.with_name(self._path.name + ".new")

    def _read(self, data: bytes) -> tuple[list[LogEntry], int]:
        if len(data) < len(MAGIC) and MAGIC.startswith(data):
            return [], 0
        if not data.startswith(MAGIC):
            raise LogError(f"{self._path} is not a log of this program; move it away")
        entries: list[LogEntry] = []
        at = len(MAGIC)
        while at < len(data):
            body = at + _HEAD.size
            if body > len(data):
                return entries, at  # a torn head: the last append was cut short
            length, checksum, head_checksum = _HEAD.unpack_from(data, at)
            end = body + length
            if not any(data[at:]):
                return entries, at  # the file had grown before its data was written
            if google_crc32c.value(data[at : at + 8]) == head_checksum:
                if end > len(data):
                    return entries, at  # the last append was cut short
                whole = google_crc32c.value(data[body:end]) == checksum
                if not whole and end == len(data) and data.endswith(b"\0"):  # which no entry contains
                    return entries, at  # its end was never written
            else:
                whole = False
            if not whole:
                where = "in its last entry" if end >= len(data) else "before its end"
                raise LogError(
                    f"{self._path} is damaged at byte {at}, {where}; restore it from a copy, "
                    "or move it away and start a new run (engines will be seeded again)"
                )
            entries.append(json.loads(data[body:end]))
            at = end
        return entries, at

    def append(self, entry: LogEntry) -> None:
        """Returns once the entry is on disk. Raises OSError, after which the log must not be used."""
        try:
            os.lseek(self._fd, 0, os.SEEK_END)
            durable.append(self._fd, _framed(entry))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error  # which says where there is no room

    def compact(self, entries: Sequence[LogEntry]) -> None:
        """Puts `entries` in the place of all that was appended; whenever this is broken off, one or the other is there.

        A new file that cannot be written is only logged: the old one goes on. Raises OSError when it is not certain
        which of the two a next start would find, after which the log must not be used.
        """
        try:
            fd = os.open(self._new_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ours before it has the name that another hub opens
                durable.append(fd, MAGIC + b"".join(map(_framed, entries)))
                os.replace(self._new_path, self._path)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            logger.warning("{} was not compacted and grows on: {}", self._path, error)
            with suppress(OSError):
                self._new_path.unlink(missing_ok=True)
            return
        os.close(self._fd)
        self._fd = fd
        durable.flush(self._path.parent)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # drops the lock, too
            self._fd = -1


def _framed(entry: LogEntry) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode()
    head = struct.pack("<II", len(text), google_crc32c.value(text))
    return head + struct.pack("<I", google_crc32c.value(head)) + text
