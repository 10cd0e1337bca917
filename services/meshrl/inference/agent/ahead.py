"""Brings the version that a hub serves to this host while the engine starts; the agent then takes what came.

Only a whole version in chunks comes ahead: files that this host can read need not come, adapters and deltas are small,
and a broadcast comes to engines alone.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.core.config.shared import WeightBroadcastConfig
from meshrl.inference.agent.version_loader import VersionFetcher
from meshrl.versions.downloads import Downloader
from meshrl.versions.files import HostBytes, Spool
from meshrl.versions.sources import LinkLimits
from meshrl.wire.errors import MeshError
from meshrl.wire.manifest import artifact_id as artifact_id_of
from meshrl.wire.types import Manifest, Transport, VersionInfo, VersionKind, VersionState

DECIDED = frozenset({VersionState.COMMITTING, VersionState.COMMITTED})
CLOSE_S = 5.0


class VersionAhead:
    """One version at a time comes, that of the newest decision. `begin` once, and `close` in the end."""

    def __init__(self, broadcast: WeightBroadcastConfig) -> None:
        self.spool = Spool()
        self._hub = WeightSyncClient(broadcast.address)
        self._downloader = Downloader(self._hub, LinkLimits.of(broadcast), broadcast.relays)
        self._fetcher = VersionFetcher(self._downloader, spool=self.spool)
        self._artifact_id = ""
        self._coming: asyncio.Task[HostBytes] | None = None
        self._following: asyncio.Task[None] | None = None
        self._dropped: set[asyncio.Task[HostBytes]] = set()

    def begin(self) -> None:
        self._following = asyncio.create_task(self._follow())

    @property
    def came(self) -> str:
        """The artifact whose bytes are all here and were not taken; empty while there is none."""
        coming = self._coming
        is_here = coming is not None and coming.done() and not coming.cancelled() and coming.exception() is None
        return self._artifact_id if is_here else ""

    async def take(self, artifact_id: str) -> HostBytes | None:
        """The bytes of an artifact, once they are here; None if they do not come. Nothing else comes from then on."""
        coming = self._end_following()
        if coming is None:
            return None
        if artifact_id != self._artifact_id:
            self._drop(coming)
            return None
        try:
            return await coming
        except MeshError as error:
            logger.info("the version did not come ahead, and is asked for again: {}", error)
            return None
        except asyncio.CancelledError:
            self._drop(coming)
            raise

    async def close(self) -> None:
        """Drops what was not taken; may be called twice."""
        coming = self._end_following()
        if coming is not None:
            self._drop(coming)
        ending = {*self._dropped, *([] if self._following is None else [self._following])}
        if ending:
            await asyncio.wait(ending, timeout=CLOSE_S)
        await self._downloader.close()
        await self._hub.close()

    # --- what comes -------------------------------------------------------------------------------

    async def _follow(self) -> None:
        newest = (0, -1)
        try:
            async with aclosing(self._hub.watch_versions()) as events:
                async for event in events:
                    version, number = event.version, (event.version.epoch, event.version.version)
                    if version.state not in DECIDED or number <= newest:
                        continue
                    newest = number
                    try:
                        await self._bring(version)
                    except MeshError as error:  # such as a version that a newer one has replaced meanwhile
                        logger.info("version {} does not come ahead: {}", version.version, error)
        except MeshError as error:
            logger.info("no version comes ahead: {}", error)

    async def _bring(self, version: VersionInfo) -> None:
        found = await self._hub.find_version(
            version.run_id, version.version, artifact_id=version.artifact_id, held_root=b""
        )
        whole = next(filter(_comes_in_chunks, (found.manifest, *found.steps)), None)
        artifact_id = "" if whole is None else await asyncio.to_thread(artifact_id_of, whole)
        if artifact_id == self._artifact_id:  # deltas lead on from what is here
            return
        before, self._coming, self._artifact_id = self._coming, None, artifact_id
        if before is not None:
            self._drop(before)
        if whole is not None:
            self._coming = asyncio.create_task(self._fetch(whole, artifact_id))

    async def _fetch(self, manifest: Manifest, artifact_id: str) -> HostBytes:
        began_s = time.monotonic()
        logger.info("version {} comes ahead: {} bytes from the hub", manifest.version, manifest.payload_bytes)
        held = await self._fetcher.fetch(manifest, artifact_id)
        logger.info("version {} came ahead, in {:.2f} s", manifest.version, time.monotonic() - began_s)
        return held

    # --- its end ------------------------------------------------------------------------------------

    def _end_following(self) -> asyncio.Task[HostBytes] | None:
        if self._following is not None:
            self._following.cancel()
        coming, self._coming = self._coming, None
        return coming

    def _drop(self, coming: asyncio.Task[HostBytes]) -> None:
        coming.cancel()
        self._dropped.add(coming)
        coming.add_done_callback(self._release)

    def _release(self, dropped: asyncio.Task[HostBytes]) -> None:
        self._dropped.discard(dropped)
        if not dropped.cancelled() and dropped.exception() is None:
            dropped.result().release()


def _comes_in_chunks(manifest: Manifest) -> bool:
    if manifest.kind is not VersionKind.FULL or manifest.transport is Transport.NCCL:
        return False
    return manifest.transport is Transport.STREAM or not all(Path(file.path).exists() for file in manifest.files)
