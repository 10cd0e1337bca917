"""Publishes a step's weights as a version: hashed and written (or packed) once, staged at the hub, sealed.

Fed by the training loop with a state that nobody changes meanwhile; from the seal on, engines prepare the version. It
does not activate anything. Files of the filesystem transport belong to the hub once they are staged: the hub deletes
them when the version is retired.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray

from meshrl.client import WeightSyncClient
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest_file import manifest_path, payload_name, safetensors_header, to_json
from meshrl.wire.types import Chunk, FileEntry, Manifest, StagedVersion, Transport

_TRANSIENT = frozenset({Reason.UNREACHABLE, Reason.DRAINING, Reason.CHUNK_CORRUPT, Reason.DEADLINE_PASSED})
RETRY_FOR_S = 60.0
WRITE_BYTES = 4 * 2**20
_DTYPE_NAMES = {torch.float8_e4m3fn: "float8_e4m3", torch.float8_e5m2: "float8_e5m2"}


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """How a version was published. `write_s`: hash and write or pack; `upload_s`: stage at the hub; `seal_s`."""

    version: int
    artifact_id: str
    root: bytes
    num_bytes: int
    write_s: float
    upload_s: float
    seal_s: float

    @property
    def seconds(self) -> float:
        return self.write_s + self.upload_s + self.seal_s


class Publisher:
    """Publishes versions of one run in one epoch. `publish` one version at a time."""

    def __init__(
        self,
        client: WeightSyncClient,
        *,
        run_id: str,
        epoch: int,
        transport: Transport,
        broadcast_dir: Path,
        chunk_bytes: int = manifests.DEFAULT_CHUNK_BYTES,
        dtype: torch.dtype | None = None,
        retry_for_s: float = RETRY_FOR_S,
    ) -> None:
        """`dtype` is what floating-point tensors are published as; None keeps each one's own.

        broadcast_dir: for the filesystem transport, a folder that hub and engines see under the same path;
        retry_for_s: how long a hub that is away is called again.
        """
        if transport not in (Transport.FILESYSTEM, Transport.STREAM):
            raise ValueError(f"transport must be filesystem or stream, got {transport.value}")
        self._client = client
        self._run_id, self._epoch = run_id, epoch
        self._transport = transport
        self._broadcast_dir = broadcast_dir.absolute()
        self._chunk_bytes = chunk_bytes
        self._dtype = dtype
        self._retry_for_s = retry_for_s
        self._busy = asyncio.Lock()

    async def publish(self, version: int, state: Mapping[str, torch.Tensor], traceparent: str = "") -> PublishReport:
        """Publishes `state` (Hugging Face names) as `version` and returns once it is sealed.

        `state` must not change until then. Publishing the same content of a version again is harmless.
        Raises MeshError: STALE_EPOCH when a newer trainer took over; VERSION_CONFLICT or VERSION_SUPERSEDED;
        DIGEST_MISMATCH when bytes changed between hashing and sealing; UNREACHABLE after `retry_for_s`.
        """
        async with self._busy:
            began_s = time.monotonic()
            tensors = {name: self._cast(tensor) for name, tensor in state.items()}
            plans = manifests.plan_tensors(
                (name, _DTYPE_NAMES.get(t.dtype, str(t.dtype).removeprefix("torch.")), tuple(t.shape))
                for name, t in tensors.items()
            )
            buffer: NDArray[np.uint8] | None = None
            if self._transport is Transport.FILESYSTEM:
                manifest = await asyncio.to_thread(self._write, version, plans, tensors)
            else:
                manifest, buffer = await asyncio.to_thread(self._pack, version, plans, tensors)
            written_s = time.monotonic()
            staged = await self._stage(manifest, buffer)
            staged_s = time.monotonic()
            await self._client.seal_version(
                run_id=self._run_id,
                epoch=self._epoch,
                version=version,
                artifact_id=staged.artifact_id,
                traceparent=traceparent,
            )
            report = PublishReport(
                version=version,
                artifact_id=staged.artifact_id,
                root=manifest.result_root,
                num_bytes=manifest.num_bytes,
                write_s=written_s - began_s,
                upload_s=staged_s - written_s,
                seal_s=time.monotonic() - staged_s,
            )
        logger.info("version {} is published: {} bytes in {:.3f} s", version, report.num_bytes, report.seconds)
        return report

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        return tensor

    def _manifest(self, version: int, hashed: manifests.StreamHasher, files: tuple[FileEntry, ...] = ()) -> Manifest:
        tensors, chunks = hashed.entries()
        return manifests.build_manifest(
            run_id=self._run_id,
            epoch=self._epoch,
            version=version,
            transport=self._transport,
            tensors=tensors,
            chunks=chunks,
            files=files,
        )

    # --- blocking, run in a thread ----------------------------------------------------------------

    def _write(
        self, version: int, plans: Sequence[manifests.TensorPlan], tensors: Mapping[str, torch.Tensor]
    ) -> Manifest:
        """Writes the safetensors file, hashing it on the way, then the manifest; each is renamed when whole."""
        folder = self._broadcast_dir / f"step_{version}"
        folder.mkdir(parents=True, exist_ok=True)
        payload = folder / payload_name(self._epoch)
        temporary = payload.with_suffix(".tmp")
        hashed = manifests.StreamHasher(plans, self._chunk_bytes)
        num_bytes = 0
        with temporary.open("wb", buffering=0) as file:
            file.write(safetensors_header(plans, {"format": "pt"}))
            for plan in plans:
                data = _bytes_of(tensors[plan.name])
                for at in range(0, len(data), WRITE_BYTES):
                    piece = data[at : at + WRITE_BYTES]
                    hashed.update(piece)
                    _write_all(file.fileno(), piece)
                num_bytes += len(data)
        temporary.replace(payload)
        manifest = self._manifest(version, hashed, (FileEntry(path=str(payload), offset=0, num_bytes=num_bytes),))
        described = manifest_path(payload)
        temporary = described.with_suffix(".json.tmp")
        temporary.write_bytes(to_json(manifest))
        temporary.replace(described)
        return manifest

    def _pack(
        self, version: int, plans: Sequence[manifests.TensorPlan], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Manifest, NDArray[np.uint8]]:
        """Copies the tensors into one buffer in stream order, hashing what is copied."""
        hashed = manifests.StreamHasher(plans, self._chunk_bytes)
        buffer: NDArray[np.uint8] = np.empty(sum(plan.num_bytes for plan in plans), dtype=np.uint8)
        for plan in plans:
            target = buffer[plan.offset : plan.offset + plan.num_bytes]
            target[:] = np.frombuffer(_bytes_of(tensors[plan.name]), dtype=np.uint8)
            hashed.update(target.data)
        buffer.flags.writeable = False
        return self._manifest(version, hashed), buffer

    # --- upload -----------------------------------------------------------------------------------

    async def _stage(self, manifest: Manifest, buffer: NDArray[np.uint8] | None) -> StagedVersion:
        """Uploads what the hub misses until it misses nothing; resumes after a broken upload."""
        end_s = time.monotonic() + self._retry_for_s
        wait_s = 0.2
        todo = [(chunk.offset, chunk.length) for chunk in manifest.chunks] if buffer is not None else []
        length_of = dict(todo)
        while True:
            try:
                chunks = _chunks(buffer, todo) if buffer is not None else None
                staged = await self._client.create_version(manifest, chunks)
                if not staged.missing_offsets:
                    return staged
                error = MeshError(Reason.CHUNKS_MISSING, f"the hub still misses {len(staged.missing_offsets)} chunks")
            except MeshError as failure:
                if failure.reason not in _TRANSIENT:
                    raise
                error = failure
            if time.monotonic() + wait_s >= end_s:
                raise error
            logger.warning("upload of version {} goes on: {}", manifest.version, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 5.0)
            with suppress(MeshError):  # if the hub is still away, the loop finds out and waits on
                missing = (await self._client.create_version(manifest)).missing_offsets
                todo = [(offset, length_of[offset]) for offset in missing]


async def _chunks(buffer: NDArray[np.uint8], spans: Sequence[tuple[int, int]]) -> AsyncIterator[Chunk]:
    for offset, length in spans:
        piece = buffer[offset : offset + length]
        yield Chunk(offset=offset, data=piece.data, crc32c=google_crc32c.value(piece))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in C order, without a copy when it is contiguous on the CPU. Hosts are little-endian."""
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def next_epoch(path: Path) -> int:
    """Returns one more than the epoch in the file at `path` (1 when there is none) and writes it there, durably.

    Call it once at every start of a trainer, with a path in its output_dir. Raises ValueError for a damaged file.
    """
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        text = "0"
    if not text.isdecimal():
        raise ValueError(f"{path} should hold the last epoch as a number, got {text[:40]!r}; correct it")
    epoch = int(text) + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(f"{epoch}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return epoch
