"""The files of a version on disk: its bytes in one or more safetensors files and, beside them, its manifest as JSON.

The publisher writes them, the hub and agents read them. The payload of a file is always its last `num_bytes` bytes,
whatever header stands before it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.wire.manifest import artifact_id
from meshrl.wire.tensors import DTYPES
from meshrl.wire.types import (
    AdapterConfig,
    ChunkEntry,
    CollectivePlan,
    FileEntry,
    Manifest,
    TensorEntry,
    Transport,
    VersionKind,
)

_NUMBERED = re.compile(r"-\d{5}-of-\d{5}$")


def payload_names(epoch: int, count: int) -> list[str]:
    """Returns the names of a version's safetensors files, numbered as Hugging Face numbers them when there are several.

    Epochs never share one, so none overwrites another's.
    """
    if count == 1:
        return [f"weights-e{epoch}.safetensors"]
    return [f"weights-e{epoch}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def manifest_path(payload: Path) -> Path:
    """Returns where the manifest lies that a payload file belongs to."""
    return payload.with_name(_NUMBERED.sub("", payload.stem) + ".json")


def safetensors_header(plans: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns the start of a safetensors file whose payload is the byte stream of `plans`.

    Layout: 8 bytes little-endian header length, then the header as JSON padded with spaces to a multiple of 8
    (safetensors README, "Format").
    """
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
    """Returns the manifest as JSON text, for the file beside a version's bytes."""
    plan, adapter = manifest.collective, manifest.adapter
    return json.dumps(
        {
            "format": "meshrl.manifest.v1",
            "artifact_id": artifact_id(manifest),
            "run_id": manifest.run_id,
            "epoch": manifest.epoch,
            "version": manifest.version,
            "kind": manifest.kind.value,
            "transport": manifest.transport.value,
            "base_version": manifest.base_version,
            "base_root": manifest.base_root.hex(),
            "result_root": manifest.result_root.hex(),
            "layout_signature": manifest.layout_signature.hex(),
            "codec": manifest.codec,
            "tensors": [
                [t.name, t.dtype, list(t.shape), t.offset, t.num_bytes, t.digest.hex()] for t in manifest.tensors
            ],
            "chunks": [[c.offset, c.length, c.digest.hex()] for c in manifest.chunks],
            "files": [[f.path, f.offset, f.num_bytes] for f in manifest.files],
            "digest_algorithm": manifest.digest_algorithm,
            "collective": plan and [plan.num_senders, plan.bucket_bytes, list(plan.whole_tensors)],
            "adapter": adapter and [adapter.rank, adapter.lora_alpha, list(adapter.target_modules), adapter.base_model],
        },
        separators=(",", ":"),
    ).encode()


def from_json(text: bytes) -> Manifest:
    """Reads what `to_json` wrote. Raises ValueError when it is not that, or its artifact_id does not match."""
    try:
        table = json.loads(text)
        manifest = Manifest(
            run_id=table["run_id"],
            epoch=table["epoch"],
            version=table["version"],
            kind=VersionKind(table["kind"]),
            transport=Transport(table["transport"]),
            base_version=table["base_version"],
            base_root=bytes.fromhex(table["base_root"]),
            result_root=bytes.fromhex(table["result_root"]),
            layout_signature=bytes.fromhex(table["layout_signature"]),
            codec=table["codec"],
            tensors=tuple(
                TensorEntry(
                    name=name,
                    dtype=dtype,
                    shape=tuple(shape),
                    offset=offset,
                    num_bytes=size,
                    digest=bytes.fromhex(hexed),
                )
                for name, dtype, shape, offset, size, hexed in table["tensors"]
            ),
            chunks=tuple(
                ChunkEntry(offset=offset, length=length, digest=bytes.fromhex(hexed))
                for offset, length, hexed in table["chunks"]
            ),
            files=tuple(FileEntry(path=path, offset=offset, num_bytes=size) for path, offset, size in table["files"]),
            digest_algorithm=table.get("digest_algorithm", ""),
            collective=_plan(table.get("collective")),
            adapter=_adapter(table.get("adapter")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a manifest: {error!r}") from error
    if artifact_id(manifest) != table.get("artifact_id"):
        raise ValueError("the manifest does not match its artifact_id: it was damaged")
    return manifest


def _plan(fields: Sequence[Any] | None) -> CollectivePlan | None:
    if fields is None:
        return None
    num_senders, bucket_bytes, whole = fields
    return CollectivePlan(num_senders=num_senders, bucket_bytes=bucket_bytes, whole_tensors=tuple(whole))


def _adapter(fields: Sequence[Any] | None) -> AdapterConfig | None:
    if fields is None:
        return None
    rank, alpha, targets, base = fields
    return AdapterConfig(rank=rank, lora_alpha=alpha, target_modules=tuple(targets), base_model=base)


def open_regular(path: str | Path) -> int:
    """Opens a file that somebody else has named, for reading; returns the descriptor.

    Raises OSError for what is not a regular file: opening a pipe would block, and a link may lead anywhere.
    """
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
    """Reads a version's byte stream from the files that hold it. Blocking: use it off the event loop.

    Raises OSError for a file that is missing, unreadable, too short or not a regular one.
    """

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
        """Fills `view` with the stream from `offset` on."""
        end = offset + len(view)
        for start, length, fd, skip in self._parts:
            at, stop = max(offset, start), min(end, start + length)
            while at < stop:
                count = os.preadv(fd, [view[at - offset : stop - offset]], skip + at - start)
                if count == 0:
                    raise OSError(errno.EIO, f"the file ended at byte {at} of the version")
                at += count

    def read(self, offset: int, length: int) -> bytes:
        """Returns `length` bytes of the stream from `offset` on."""
        for start, size, fd, skip in self._parts:
            if start <= offset and offset + length <= start + size:
                data = os.pread(fd, length, skip + offset - start)
                if len(data) == length:
                    return data
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def close(self) -> None:
        for _, _, fd, _ in self._parts:
            os.close(fd)
        self._parts.clear()

    def __enter__(self) -> PayloadReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
