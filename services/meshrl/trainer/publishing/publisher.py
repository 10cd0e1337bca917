"""Publishes a step's weights as a version: hashed and written (or packed) once, staged at the hub, sealed.

Fed by the training loop with a state that nobody changes meanwhile; from the seal on, engines prepare the version. It
does not activate anything. Files of the filesystem transport belong to the hub once they are staged: the hub deletes
them when the version is retired.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.client import WeightSyncClient
from meshrl.trainer.publishing.progress import Progress
from meshrl.trainer.publishing.uploading import PublishReport
from meshrl.trainer.publishing.version_files import VersionFiles, in_threads
from meshrl.versions.dtypes import dtype_name
from meshrl.versions.transfer import RETRY_FOR_S, Uploader
from meshrl.wire import manifest as manifests
from meshrl.wire.types import AdapterConfig, ChunkEntry, FileEntry, Manifest, TensorEntry, Transport


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What versions that are LoRA adapters say of themselves; `base_layout` is that of the weights they are for."""

    config: AdapterConfig
    base_layout: bytes


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
        adapter: Adapter | None = None,
        num_threads: int = 1,
    ) -> None:
        """`dtype` is what floating-point tensors are published as; None keeps each one's own.

        broadcast_dir: for the filesystem transport, a folder that hub and engines see under the same path;
        retry_for_s: how long a hub that is away is called again; adapter: the states are adapters in PEFT's names.
        """
        if transport not in (Transport.FILESYSTEM, Transport.STREAM):
            raise ValueError(f"transport must be filesystem or stream, got {transport.value}")
        self._client = client
        self.progress = Progress()
        self._uploader = Uploader(client, self.progress.moved, retry_for_s=retry_for_s)
        self._run_id, self._epoch = run_id, epoch
        self._transport = transport
        self._broadcast_dir = broadcast_dir.absolute()
        self._chunk_bytes = chunk_bytes
        self._dtype = dtype
        self._adapter = adapter
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="version-file")
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
            plans = manifests.plan_tensors((name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items())
            buffer: NDArray[np.uint8] | None = None
            if self._transport is Transport.FILESYSTEM:
                manifest = await asyncio.to_thread(self._write, version, plans, tensors)
            else:
                manifest, buffer = await asyncio.to_thread(self._pack, version, plans, tensors)
            written_s = time.monotonic()
            staged = await self._uploader.stage(manifest, buffer)
            staged_s = time.monotonic()
            await self._uploader.seal(manifest, staged.artifact_id, traceparent, buffer)
            report = PublishReport(
                version=version,
                artifact_id=staged.artifact_id,
                root=manifest.result_root,
                num_bytes=manifest.num_bytes,
                write_s=written_s - began_s,
                stage_s=staged_s - written_s,
                seal_s=time.monotonic() - staged_s,
            )
        report.log()
        return report

    async def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(wait=False)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        return tensor

    def _manifest(
        self,
        version: int,
        tensors: tuple[TensorEntry, ...],
        chunks: tuple[ChunkEntry, ...],
        files: tuple[FileEntry, ...] = (),
    ) -> Manifest:
        return manifests.build_manifest(
            run_id=self._run_id,
            epoch=self._epoch,
            version=version,
            transport=self._transport,
            tensors=tensors,
            chunks=chunks,
            files=files,
            adapter=None if self._adapter is None else self._adapter.config,
            base_layout=self._adapter.base_layout if self._adapter is not None else b"",
        )

    # --- blocking, run in a thread ----------------------------------------------------------------

    def _write(self, version: int, plans: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """Writes the safetensors files and hashes them, then the manifest; each is renamed when whole."""
        files = VersionFiles(
            self._broadcast_dir,
            version=version,
            epoch=self._epoch,
            plans=plans,
            chunk_bytes=self._chunk_bytes,
            threads=self._threads,
            num_threads=self._num_threads,
            progress=self.progress,
        )
        files.begin()
        files.write((plan.offset, bytes_of(tensors[plan.name])) for plan in plans)
        manifest = self._manifest(version, *files.listed(*files.hash(0, 1)), files=files.entries)
        files.finish(manifest)
        return manifest

    def _pack(
        self, version: int, plans: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Manifest, NDArray[np.uint8]]:
        """Copies the tensors into one buffer in stream order, and hashes it."""
        num_bytes = sum(plan.num_bytes for plan in plans)
        buffer: NDArray[np.uint8] = np.empty(num_bytes, dtype=np.uint8)

        def copy(plan: TensorEntry) -> None:
            target = buffer[plan.offset : plan.offset + plan.num_bytes]
            target[:] = np.frombuffer(bytes_of(tensors[plan.name]), dtype=np.uint8)
            self.progress.moved()

        def each(digest: Callable[[tuple[int, int]], bytes], spans: Iterable[tuple[int, int]]) -> Iterable[bytes]:
            for found in self._threads.map(digest, spans):
                self.progress.moved()
                yield found

        in_threads(self._threads, copy, plans)
        listed = manifests.entries_of(buffer.data, plans, self._chunk_bytes, each=each)
        buffer.flags.writeable = False
        return self._manifest(version, *listed), buffer


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in C order, without a copy when it is contiguous on the CPU. Hosts are little-endian."""
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


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
