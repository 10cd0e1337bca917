"""A version on disk: safetensors files, and the manifest beside them as JSON.

A file's payload is its last `num_bytes` bytes, behind a header of any size.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from meshrl.wire.manifest import artifact_id
from meshrl.wire.tensors import DTYPES
from meshrl.wire.types import FileEntry, Manifest, TensorEntry
from meshrl.wire.values import YOUNGER, from_plain, to_plain

_TYPES = get_type_hints(Manifest)
_NUMBERED = re.compile(r"-\d{5}-of-\d{5}$")


def payload_names(epoch: int, count: int) -> list[str]:
    """Several are numbered as at Hugging Face. Epochs share no name."""
    if count == 1:
        return [f"weights-e{epoch}.safetensors"]
    return [f"weights-e{epoch}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def manifest_path(payload: Path) -> Path:
    return payload.with_name(_NUMBERED.sub("", payload.stem) + ".json")


def safetensors_header(plans: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Of a file whose payload is the byte stream of `plans`: 8 bytes little-endian header length, then the header as
    JSON padded with spaces to a multiple of 8 (safetensors README, "Format")."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for plan in plans:
        table[plan.name] = {
            "dtype": DTYPES[plan.dtype].safetensors,
            "shape": list(plan.shape),
            "data_offsets": [plan.offset, plan.offset + plan.num_bytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def to_json(manifest: Manifest) -> bytes:
    table = {
        field.name: to_plain(value)
        for field in fields(manifest)
        if (value := getattr(manifest, field.name)) != field.default or field.metadata != YOUNGER
    }
    described = {"format": "meshrl.manifest.v1", "artifact_id": artifact_id(manifest), **table}
    return json.dumps(described, separators=(",", ":")).encode()


def from_json(text: bytes) -> Manifest:
    """Raises ValueError for other text or another artifact_id."""
    try:
        table = json.loads(text)
        manifest = Manifest(**{name: from_plain(_TYPES[name], table[name]) for name in _TYPES if name in table})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a manifest: {error!r}") from error
    if artifact_id(manifest) != table.get("artifact_id"):
        raise ValueError("the manifest does not match its artifact_id: it was damaged")
    return manifest


def open_regular(path: str | Path) -> int:
    """For a file that a peer has named. Raises OSError unless it is regular: a pipe would block, and a link may lead
    anywhere."""
    _check_regular(os.lstat(path), path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        _check_regular(os.fstat(fd), path)  # something else may have taken its place meanwhile
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_regular(found: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file, and a version is read from no other", str(path))


class PayloadReader:
    """The byte stream of a version's files. Blocking. Raises OSError for a file that is missing, unreadable, too
    short or not regular."""

    def __init__(self, files: Sequence[FileEntry]) -> None:
        self._parts: list[tuple[int, int, int, int]] = []  # offset, length, descriptor, payload start in the file
        try:
            for file in files:
                fd = open_regular(file.path)
                self._parts.append((file.offset, file.num_bytes, fd, os.fstat(fd).st_size - file.num_bytes))
                if self._parts[-1][3] < 0:
                    raise OSError(errno.EIO, f"is shorter than the {file.num_bytes} bytes it should hold", file.path)
        except OSError:
            self.close()
            raise

    def read_into(self, offset: int, view: memoryview) -> None:
        """With the stream from `offset` on."""
        end = offset + len(view)
        for start, length, fd, skip in self._parts:
            at, stop = max(offset, start), min(end, start + length)
            while at < stop:
                count = os.preadv(fd, [view[at - offset : stop - offset]], skip + at - start)
                if count == 0:
                    raise OSError(errno.EIO, f"the file ended at byte {at} of the version")
                at += count

    def read(self, offset: int, length: int) -> bytes:
        for start, size, fd, skip in self._parts:
            if start <= offset and offset + length <= start + size:
                data = os.pread(fd, length, skip + offset - start)
                if len(data) == length:
                    return data
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def send(self, connection: socket.socket, offset: int, end: int) -> None:
        """The stream's bytes [offset, end), without a copy of them in this process."""
        for start, length, fd, skip in self._parts:
            at, stop = max(offset, start), min(end, start + length)
            while at < stop:
                count = os.sendfile(connection.fileno(), fd, skip + at - start, stop - at)
                if count == 0:
                    raise OSError(errno.EIO, f"the file ended at byte {at} of the version")
                at += count

    def close(self) -> None:
        for _, _, fd, _ in self._parts:
            os.close(fd)
        self._parts.clear()

    def __enter__(self) -> PayloadReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
