"""Publishes versions as files that all sender ranks write together, without gathering any weights.

On each rank the training thread copies its rows aside; a publishing thread writes them into the version's files and
hashes a share of them. Rank 0 makes the files before and the manifest after, and stages and seals the version.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from meshrl.client import WeightSyncClient
from meshrl.trainer.publishing.progress import Progress
from meshrl.trainer.publishing.rank_calls import Crew, Held, Word, answers_by
from meshrl.trainer.publishing.rows import RowBytes, Rows
from meshrl.trainer.publishing.uploading import PublishReport
from meshrl.trainer.publishing.version_files import VersionFiles
from meshrl.versions.transfer import Uploader
from meshrl.wire.manifest import build_manifest
from meshrl.wire.types import Manifest, Transport


class FileWorker:
    """One rank's share of the files. Words: begin (rank 0's alone to do), write, hash."""

    def __init__(
        self,
        rows: Rows,
        folder: Path,
        *,
        sender: int,
        epoch: int,
        chunk_bytes: int,
        num_threads: int,
        deadline_s: float,
    ) -> None:
        self.held, self.progress = Held(), Progress()
        self._rows, self._folder = rows, folder.absolute()
        self._sender, self._epoch, self._chunk_bytes = sender, epoch, chunk_bytes
        self._num_threads, self._deadline_s = num_threads, deadline_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="version-file")
        self._host: torch.Tensor | None = None

    def files(self, version: int) -> VersionFiles:
        return VersionFiles(
            self._folder,
            version=version,
            epoch=self._epoch,
            plans=self._rows.plans,
            chunk_bytes=self._chunk_bytes,
            threads=self._threads,
            num_threads=self._num_threads,
            progress=self.progress,
        )

    def work(self, word: Word) -> dict[str, Any]:
        version = int(word["version"])
        if word["do"] == "write":
            rows: RowBytes = self.held.get(version, deadline_s=self._deadline_s)
            self._write(self.files(version), rows)
            return {}
        tensors, chunks = self.files(version).hash(self._sender, self._rows.collective.num_senders)
        return {
            "tensors": {str(index): digest.hex() for index, digest in tensors.items()},
            "chunks": {str(index): digest.hex() for index, digest in chunks.items()},
        }

    def _write(self, files: VersionFiles, rows: RowBytes) -> None:
        data = self._on_host(rows).numpy().data
        pieces, at = [], 0
        for offset, length in rows.spans:
            pieces.append((offset, data[at : at + length]))
            at += length
        files.write(pieces)

    def _on_host(self, rows: RowBytes) -> torch.Tensor:
        """The bytes in host memory: pinned, since the copy from a GPU is then as fast as the bus."""
        if rows.ready is None:
            return rows.flat
        rows.ready.synchronize()
        if self._host is None:
            self._host = torch.empty(rows.flat.shape, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.device(rows.flat.device), torch.cuda.stream(torch.cuda.Stream(rows.flat.device)):  # type: ignore[no-untyped-call]  # torch has none
            self._host.copy_(rows.flat, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        return self._host


class FilePublisher:
    """Rank 0's publisher of versions of one run in one epoch."""

    def __init__(
        self, client: WeightSyncClient, crew: Crew, worker: FileWorker, *, run_id: str, epoch: int, stall_s: float
    ) -> None:
        """`stall_s`: how long a rank may do nothing of its share."""
        self.progress = worker.progress
        self._uploader = Uploader(client, self.progress.moved)
        self._crew, self._worker = crew, worker
        self._run_id, self._epoch, self._stall_s = run_id, epoch, stall_s
        self._busy = asyncio.Lock()
        self._written: Manifest | None = None

    async def publish(self, version: int, snapshot_s: float, traceparent: str = "") -> PublishReport:
        """Publishes what the ranks hold for `version`; returns once it is sealed. Raises MeshError as Publisher."""
        async with self._busy:
            began_s = time.monotonic()
            if self._written is None or self._written.version != version:  # else the hub was away the first time
                self._written = await asyncio.to_thread(self._write, version)
            manifest = self._written
            written_s = time.monotonic()
            staged = await self._uploader.stage(manifest)
            staged_s = time.monotonic()
            await self._uploader.seal(manifest, staged.artifact_id, traceparent)
            report = PublishReport(
                version=version,
                artifact_id=staged.artifact_id,
                root=manifest.result_root,
                num_bytes=manifest.num_bytes,
                snapshot_s=snapshot_s,
                write_s=written_s - began_s,
                stage_s=staged_s - written_s,
                seal_s=time.monotonic() - staged_s,
            )
        report.log()
        return report

    async def close(self) -> None:
        """Nothing runs between two publications."""

    def _write(self, version: int) -> Manifest:
        files = self._worker.files(version)
        files.begin()
        self._crew.work({"do": "write", "version": version}, stall_s=self._stall_s)
        answers = self._crew.work({"do": "hash", "version": version}, stall_s=self._stall_s)
        tensors, chunks = (
            {int(index): bytes.fromhex(digest) for index, digest in answers_by(key, answers).items()}
            for key in ("tensors", "chunks")
        )
        listed_tensors, listed_chunks = files.listed(tensors, chunks)
        manifest = build_manifest(
            run_id=self._run_id,
            epoch=self._epoch,
            version=version,
            transport=Transport.FILESYSTEM,
            tensors=listed_tensors,
            chunks=listed_chunks,
            files=files.entries,
        )
        files.finish(manifest)
        return manifest
