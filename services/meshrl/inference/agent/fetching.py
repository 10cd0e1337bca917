"""Fetches a version's bytes to this host and checks them, while the engine goes on generating.

Used by `VersionLoader` for versions in files and streamed ones. Bytes come from the publisher's files where this host
can read them, else in chunks from relays or the hub. Every chunk is hashed, and every tensor that has a digest of its
own bytes, so the bytes that this module returns are those of the manifest.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Self

import numpy as np
from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.core.config.shared import WeightBroadcastConfig
from meshrl.versions.downloads import Downloader
from meshrl.versions.files import Bytes, HostBytes, Spool, empty_bytes, map_files
from meshrl.versions.parents import TransferLimits
from meshrl.versions.version_bytes import VersionBytes
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Manifest, Transport


class VersionFetcher:
    """Fetches the versions of one engine through a downloader, which it closes.

    With a `spool`, versions that come in chunks are written into files there, else they stay in memory.
    """

    def __init__(self, downloader: Downloader, *, spool: Spool | None = None) -> None:
        self._downloader = downloader
        self._spool = spool
        self._arrived, self._awaited = 0, 0  # bytes of what is fetched now

    def arriving(self, version: int) -> str:
        """A description of the fetch under way, for the program's waits."""
        mb = f", of which {self._arrived / 1e6:.2f} of {self._awaited / 1e6:.2f} MB are here" if self._awaited else ""
        return f"version {version} from the hub{mb}"

    def begin(self) -> None:
        """A new version will be fetched: counts its bytes from zero."""
        self._arrived, self._awaited = 0, 0

    def _arrive(self, count: int) -> None:
        self._arrived += count

    @classmethod
    def over(
        cls, hub: WeightSyncClient, way: WeightBroadcastConfig | None, *, spool: Spool | None, stall_s: float | None
    ) -> Self:
        """Fetches from a hub and the relays of a configuration. `stall_s`: in place of its own."""
        way = way or WeightBroadcastConfig()
        limits = TransferLimits(
            connections=way.connections, mbps=way.max_mbps, stall_s=way.stall_s if stall_s is None else stall_s
        )
        return cls(Downloader(hub, limits, way.relays), spool=spool)

    async def close(self) -> None:
        """Ends the connections."""
        await self._downloader.close()

    async def fetch(self, manifest: Manifest, artifact_id: str) -> HostBytes:
        """Returns the verified bytes of a version, to be released once it is staged.

        Raises MeshError: DIGEST_MISMATCH when bytes are not those of the manifest, CHUNK_CORRUPT when a link damages
        every copy, UNKNOWN_VERSION when they are gone, UNREACHABLE when nothing came, OVERLOADED when there is no room
        for them.
        """
        held = await self._mapped(manifest) if manifest.transport is Transport.FILESYSTEM else None
        return held or await self._streamed(manifest, artifact_id)

    async def fetch_delta(self, manifest: Manifest) -> Bytes:
        """Returns the bytes of a delta, every chunk right. Raises MeshError as `fetch`."""
        self._awaited += manifest.payload_bytes
        payload: Bytes = np.empty(manifest.payload_bytes, dtype=np.uint8)
        artifact_id = await asyncio.to_thread(manifests.artifact_id, manifest)
        await self._downloader.pull(VersionBytes(manifest, memory=payload), artifact_id, self._arrive)
        return payload

    async def _mapped(self, manifest: Manifest) -> HostBytes | None:
        """The publisher's files as they lie; None when they cannot be read here."""
        for attempt in (1, 2):  # again once: the first try may have met a cache that was behind
            try:
                held = await asyncio.to_thread(map_files, manifest.files)
            except OSError as error:  # another host, or retired meanwhile: the hub is asked for the bytes instead
                logger.info("files of version {} cannot be used here ({}); asking the hub", manifest.version, error)
                return None
            wrong = await self._wrong_tensor(held, manifest)
            if wrong is None:
                return held
            logger.warning("attempt {}: tensor {!r} of version {} is damaged", attempt, wrong, manifest.version)
        raise _damaged(manifest, wrong)

    async def _wrong_tensor(self, held: HostBytes, manifest: Manifest) -> str | None:
        cancelled = threading.Event()  # a fetch that is cancelled makes the hashing stop at the next tensor
        try:
            return await asyncio.to_thread(held.wrong_tensor, manifest, cancelled)
        finally:
            cancelled.set()

    async def _streamed(self, manifest: Manifest, artifact_id: str) -> HostBytes:
        """The version from the hub, into memory or a file of the spool."""
        if self._spool is None:
            held = empty_bytes(manifest)
        else:
            held = await asyncio.to_thread(self._spool.room_for, manifest)
        self._awaited += manifest.payload_bytes
        try:
            held_bytes = VersionBytes(manifest, memory=held.parts[0][1])
            await self._downloader.pull(held_bytes, artifact_id, self._arrive)
            # Additive digests are slow on a host. The hashes of the chunks cover all bytes as well.
            additive = manifest.digest_algorithm == manifests.SUM128
            wrong = None if additive else await self._wrong_tensor(held, manifest)
            if wrong is not None:
                raise _damaged(manifest, wrong)
        except BaseException:  # abandoned fetches leave no file either
            held.release()
            raise
        return held


def _damaged(manifest: Manifest, name: str | None) -> MeshError:
    text = f"tensor {name!r} of version {manifest.version} is not what its manifest says; it was not applied"
    return MeshError(Reason.DIGEST_MISMATCH, text)
