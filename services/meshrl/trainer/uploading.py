"""Brings a version to the hub: its manifest, the chunks that it misses, the seal. Used by every publisher."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import google_crc32c
import numpy as np
from loguru import logger
from numpy.typing import NDArray

from meshrl.client import WeightSyncClient
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Chunk, Manifest, StagedVersion

_TRANSIENT = frozenset({Reason.UNREACHABLE, Reason.DRAINING, Reason.CHUNK_CORRUPT, Reason.DEADLINE_PASSED})
RETRY_FOR_S = 60.0


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
    """The hub as a publisher sees it. `retry_for_s`: how long a hub that is away is called again."""

    def __init__(self, client: WeightSyncClient, *, retry_for_s: float = RETRY_FOR_S) -> None:
        self._client = client
        self._retry_for_s = retry_for_s

    async def seal(self, manifest: Manifest, artifact_id: str, traceparent: str) -> None:
        """Declares a staged version complete."""
        await self._client.seal_version(
            run_id=manifest.run_id,
            epoch=manifest.epoch,
            version=manifest.version,
            artifact_id=artifact_id,
            traceparent=traceparent,
        )

    async def stage(self, manifest: Manifest, buffer: NDArray[np.uint8] | None = None) -> StagedVersion:
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
