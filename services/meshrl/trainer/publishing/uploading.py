"""Brings a version to the hub: its manifest, the chunks that it misses, the seal. Used by every publisher."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import google_crc32c
import numpy as np
from loguru import logger
from numpy.typing import NDArray

from meshrl.client import WeightSyncClient
from meshrl.client.transfers import TRANSIENT, Attempts
from meshrl.trainer.publishing.progress import Progress
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Chunk, Manifest, StagedVersion

RETRY_FOR_S = 60.0
_INCOMPLETE = frozenset({Reason.CHUNKS_MISSING})
_NO_ROOM = frozenset({Reason.OVERLOADED})  # versions that the hub retires meanwhile, or a person, may make some
SEAL_S = 30.0
HASHED_BYTES_PER_S = 50e6  # what a hub on a slow disk still reads and hashes


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """How a version was published, and where the time went; a part that a transport does not have took 0 s.

    `snapshot_s`: rows cast and copied aside, on the training thread; `digest_s`: digests joined over the ranks;
    `write_s`: hashed and written or packed; `group_s`: engines met; `stage_s`: taken by the hub; `seal_s`;
    `wire_s`: broadcast.
    """

    version: int
    artifact_id: str
    root: bytes
    num_bytes: int
    snapshot_s: float = 0.0
    digest_s: float = 0.0
    write_s: float = 0.0
    group_s: float = 0.0
    stage_s: float = 0.0
    seal_s: float = 0.0
    wire_s: float = 0.0

    @property
    def parts_s(self) -> dict[str, float]:
        """The parts that took time, by name."""
        names = ("snapshot", "digest", "write", "group", "stage", "seal", "wire")
        lengths = {name: float(getattr(self, f"{name}_s")) for name in names}
        return {name: length_s for name, length_s in lengths.items() if length_s}

    @property
    def seconds(self) -> float:
        return sum(self.parts_s.values())

    def log(self) -> None:
        """Says so in the log."""
        parts = ", ".join(f"{name} {length_s:.3f}" for name, length_s in self.parts_s.items())
        logger.info("version {} is published: {} bytes in {:.3f} s ({})",
                    self.version, self.num_bytes, self.seconds, parts)  # fmt: skip


class Uploader:
    """The hub as a publisher sees it. `retry_for_s`: how long a hub that is away, or takes nothing, is called again."""

    def __init__(self, client: WeightSyncClient, progress: Progress, *, retry_for_s: float = RETRY_FOR_S) -> None:
        self._client, self._progress = client, progress
        self._retry_for_s = retry_for_s

    async def stage(self, manifest: Manifest, buffer: NDArray[np.uint8] | None = None) -> StagedVersion:
        """Uploads what the hub misses until it misses nothing; resumes after a broken upload."""
        length_of = {chunk.offset: chunk.length for chunk in manifest.chunks} if buffer is not None else {}
        missing: Sequence[int] = tuple(length_of)
        attempts = Attempts(self._retry_for_s, left=len(missing), also=_INCOMPLETE | _NO_ROOM)
        while True:
            left: int | None = None
            try:
                spans = [(at, length_of[at]) for at in missing]
                chunks = None if buffer is None else _chunks(buffer, spans, self._progress)
                staged = await self._client.create_version(manifest, chunks, stall_s=self._retry_for_s)
                if not staged.missing_offsets:
                    return staged
                missing, left = staged.missing_offsets, len(staged.missing_offsets)
                failure = MeshError(Reason.CHUNKS_MISSING, f"the hub still misses {left} chunks")
            except MeshError as error:
                failure = error
                if buffer is None or error.reason not in TRANSIENT | _NO_ROOM:
                    left = len(missing)
                else:
                    with suppress(MeshError):  # it is still away, and is sent what it is not known to have
                        missing = (await self._client.create_version(manifest)).missing_offsets
                        left = len(missing)
            await attempts.another(failure, left=left)
            logger.warning("upload of version {} goes on, {} chunks to go: {}", manifest.version, len(missing), failure)

    async def seal(
        self, manifest: Manifest, artifact_id: str, traceparent: str, buffer: NDArray[np.uint8] | None = None
    ) -> None:
        """Declares a staged version complete, again while the hub is away; chunks that it lost are sent again.

        A hub that must hash the version first has time for all its bytes.
        """
        also = _INCOMPLETE if buffer is not None else frozenset()
        attempts = Attempts(self._retry_for_s, left=0, also=also)
        while True:
            began_s = time.monotonic()
            deadline_s = SEAL_S + manifest.num_bytes / HASHED_BYTES_PER_S
            self._progress.moved(unseen_s=deadline_s)
            try:
                await self._client.seal_version(
                    run_id=manifest.run_id,
                    epoch=manifest.epoch,
                    version=manifest.version,
                    artifact_id=artifact_id,
                    traceparent=traceparent,
                    deadline_s=deadline_s,
                )
            except MeshError as error:
                if time.monotonic() - began_s > self._retry_for_s:  # the hub was at work so long
                    attempts = Attempts(self._retry_for_s, left=0, also=also)
                await attempts.another(error, left=0)
                logger.warning("version {} is not sealed yet: {}; asking again", manifest.version, error)
                if error.reason in _INCOMPLETE:
                    await self.stage(manifest, buffer)
            else:
                return
            finally:
                self._progress.moved()


async def _chunks(
    buffer: NDArray[np.uint8], spans: Sequence[tuple[int, int]], progress: Progress
) -> AsyncIterator[Chunk]:
    for offset, length in spans:
        piece = buffer[offset : offset + length]
        yield Chunk(offset=offset, data=piece.data, crc32c=google_crc32c.value(piece))
        progress.moved()  # it was taken
