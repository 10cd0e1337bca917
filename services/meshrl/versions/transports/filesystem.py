"""The filesystem transport: a version's bytes are in files that the hub and the engines can read.

Rank 0 creates the files. Each sender rank writes its rows into them and hashes a share of the whole, without gathering
any weights; or rank 0 alone does, where it has gathered them all. Rank 0 writes the manifest last. Files belong to the
hub once they are staged: the hub deletes them when the version is retired.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import Captured, GatheredWeights, HeldSnapshot, HostCopies, Snapshot
from meshrl.versions.transports.base import AllRanks, Answer, Prepared, PublishCall, VersionLine
from meshrl.versions.transports.version_files import VersionFiles
from meshrl.wire.manifest import DEFAULT_CHUNK_BYTES
from meshrl.wire.types import Manifest, Transport


@dataclass(frozen=True, kw_only=True)
class WriteFiles(PublishCall):
    """Write the rank's rows of a version into its files."""

    version: int


@dataclass(frozen=True, kw_only=True)
class HashFiles(PublishCall):
    """Hash the rank's share of what all have written."""

    version: int


class FileShare:
    """One rank's share of the files."""

    calls = (WriteFiles, HashFiles)

    def __init__(
        self,
        folder: Path,
        *,
        epoch: int,
        share: int = 0,
        num_shares: int = 1,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        num_threads: int = 1,
        deadline_s: float = 60.0,
    ) -> None:
        """This is share `share` of `num_shares`; `deadline_s`: how long its training may lag behind rank 0's."""
        self.held: HeldSnapshot[Snapshot | GatheredWeights] = HeldSnapshot()
        self.progress = Progress()
        self._folder = folder.absolute()
        self._epoch, self._chunk_bytes = epoch, chunk_bytes
        self._share, self._num_shares = share, num_shares
        self._num_threads, self._deadline_s = num_threads, deadline_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="version-file")
        self._host_copies = HostCopies()

    def release_snapshot(self) -> torch.Tensor | None:
        """Drops the last snapshot, since the training thread makes the next, and returns its buffer."""
        last = self.held.drop()
        return last.flat if isinstance(last, Snapshot) else None

    def files(self, version: int) -> VersionFiles:
        """The files of the version that this rank holds."""
        return VersionFiles(
            self._folder,
            version=version,
            epoch=self._epoch,
            tensors=self.held.get(version, deadline_s=self._deadline_s).tensors,
            chunk_bytes=self._chunk_bytes,
            threads=self._threads,
            num_threads=self._num_threads,
            progress=self.progress,
        )

    def carry_out(self, call: WriteFiles | HashFiles) -> Answer:
        """Writes or hashes; the answer to HashFiles are digests of tensors and chunks by index."""
        files = self.files(call.version)
        if isinstance(call, WriteFiles):
            held = self.held.get(call.version, deadline_s=self._deadline_s)
            if isinstance(held, GatheredWeights):
                files.write((tensor.offset, held.bytes_of(tensor)) for tensor in held.tensors)
            else:
                files.write(self._host_copies.pieces_of(held))
            return {}
        tensors, chunks = files.hash(self._share, self._num_shares)
        return {
            "tensors": {str(index): digest.hex() for index, digest in tensors.items()},
            "chunks": {str(index): digest.hex() for index, digest in chunks.items()},
        }

    def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(wait=False)


class FilesystemTransport:
    """Rank 0's side: has the ranks write and hash the files, and writes the manifest."""

    def __init__(self, line: VersionLine, ranks: AllRanks, share: FileShare, *, stall_s: float) -> None:
        """`share` is rank 0's own; `stall_s`: how long a rank may do nothing of its share."""
        self.progress = share.progress
        self._line, self._ranks, self._share, self._stall_s = line, ranks, share, stall_s
        self._written: Manifest | None = None

    async def prepare(self, version: int, captured: Captured) -> Prepared:
        """Writes the version's files; each is renamed when whole, the manifest last."""
        began_s = time.monotonic()
        if captured.gathered is not None:
            self._share.held.put(version, captured.gathered)
            self._written = None
        try:
            # Rows that were written while the hub was away are not written again.
            if self._written is None or self._written.version != version:
                self._written = await asyncio.to_thread(self._write, version)
        finally:
            if captured.gathered is not None:
                self._share.held.drop()
        return Prepared(manifest=self._written, parts_s={"write": time.monotonic() - began_s})

    async def deliver(self, version: int) -> Mapping[str, float]:
        """Nothing is left to do: engines read the files."""
        return {}

    async def close(self) -> None:
        """Ends its threads."""
        self._share.close()

    def _write(self, version: int) -> Manifest:
        files = self._share.files(version)
        files.begin()
        self._ranks.call(WriteFiles(version=version), stall_s=self._stall_s)
        answers = self._ranks.call(HashFiles(version=version), stall_s=self._stall_s)
        tensors, chunks = files.listed(_joined("tensors", answers), _joined("chunks", answers))
        manifest = self._line.manifest(version, Transport.FILESYSTEM, tensors, chunks, files=files.entries)
        files.finish(manifest)
        return manifest


def _joined(table: str, answers: Sequence[Answer]) -> dict[int, bytes]:
    """The digests by index that the ranks answered under a name."""
    return {int(index): bytes.fromhex(digest) for answer in answers for index, digest in answer[table].items()}
