"""A relay: fetches each artifact from the hub once for all engines of a site, and serves chunks on as they arrive.

A chunk is served once it is complete and has the digest of the manifest. A relay decides nothing, so it may be lost at
any moment.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.core.waiting import Pulse
from meshrl.versions.downloads import Downloader
from meshrl.versions.sources import LinkLimits
from meshrl.versions.store import VersionStore
from meshrl.weights.byte_server import ByteServer
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Transport, VersionKind

STOP_S = 5.0


class Relay:
    """Its chunks survive restarts. `start` before use, `stop` after."""

    def __init__(
        self,
        upstream: WeightSyncClient,
        limits: LinkLimits,
        *,
        spool_dir: Path,
        max_chunk_bytes: int,
        keep_versions: int,
    ) -> None:
        self._upstream = upstream
        self._spool_dir = spool_dir / "relayed"
        self._store = VersionStore(self._spool_dir, keeps_chains=False)
        self._bytes = ByteServer(self._store, max_chunk_bytes=max_chunk_bytes)
        self._downloader = Downloader(upstream, limits)
        self._keep_versions = keep_versions
        self._pulls: dict[str, asyncio.Task[None]] = {}  # under way or failed, by artifact
        self._pull_changed = Pulse()  # a manifest came, or a pull failed
        self._fetches: Counter[str] = Counter()  # under way, by artifact

    async def start(self) -> None:
        folder = self._spool_dir
        live = {each.name for each in folder.iterdir()} if folder.is_dir() else set()
        await asyncio.to_thread(self._store.prepare, live)

    async def stop(self) -> None:
        self._bytes.close()
        for pull in self._pulls.values():
            pull.cancel()
        if self._pulls:
            await asyncio.wait(self._pulls.values(), timeout=STOP_S)
        await self._downloader.close()
        await asyncio.to_thread(self._store.drop_room)

    async def fetch(
        self, artifact_id: str, ranges: Sequence[tuple[int, int]], chunk_bytes: int
    ) -> AsyncIterator[bytes]:
        """As `ByteServer.feed`, of an artifact of the hub. Raises as the hub's Fetch; UNREACHABLE while the hub is away
        and the bytes are not here."""
        self._fetches[artifact_id] += 1
        try:
            held = self._store.artifacts.get(artifact_id)
            if not self._comes(artifact_id) and (held is None or held.missing):  # it is fetched once for all who ask
                self._pulls[artifact_id] = pull = asyncio.create_task(self._pull(artifact_id))
                pull.add_done_callback(lambda task: self._pull_ended(artifact_id, task))
            while artifact_id not in self._store.artifacts:
                changed = self._pull_changed.upcoming
                self._is_arriving(artifact_id)
                await changed.wait()
            arriving = partial(self._is_arriving, artifact_id)
            async for message in self._bytes.feed(artifact_id, ranges, chunk_bytes, arriving):
                yield message
        finally:
            self._fetches[artifact_id] -= 1

    def _comes(self, artifact_id: str) -> bool:
        return artifact_id in self._pulls and not self._pulls[artifact_id].done()

    def _is_arriving(self, artifact_id: str) -> bool:
        pull = self._pulls.get(artifact_id)
        if pull is None or not pull.done():
            return pull is not None
        error = MeshError(Reason.DRAINING) if pull.cancelled() else pull.exception()
        if error is None:  # it has just ended
            return False
        raise error if isinstance(error, MeshError) else MeshError(Reason.INTERNAL, repr(error))

    # --- from upstream ----------------------------------------------------------------------------

    async def _pull(self, artifact_id: str) -> None:
        manifest, _ = await self._upstream.get_manifest(artifact_id=artifact_id)
        if manifest.transport is Transport.NCCL:
            raise MeshError(Reason.NOT_SUPPORTED, f"version {manifest.version} travels in a group, not by relays")
        if manifest.transport is Transport.FILESYSTEM:  # whose files are at another site
            manifest = replace(manifest, transport=Transport.STREAM, files=())
        await asyncio.to_thread(self._store.open, artifact_id, manifest)
        self._pull_changed.beat()
        came = await self._downloader.pull(self._store.held(artifact_id), artifact_id, lambda _: self._bytes.changed())
        text = "version {} is here: {} bytes came, it has {}, artifact {}"
        logger.info(text, manifest.version, came, manifest.payload_bytes, artifact_id)
        await self._drop_old()

    def _pull_ended(self, artifact_id: str, pull: asyncio.Task[None]) -> None:
        error = None if pull.cancelled() else pull.exception()
        if error is not None:
            logger.warning("artifact {} did not come from {}: {!r}", artifact_id, self._upstream.address, error)
        elif not pull.cancelled() and self._pulls.get(artifact_id) is pull:
            del self._pulls[artifact_id]
        self._pull_changed.beat()
        self._bytes.changed()

    async def _drop_old(self) -> None:
        manifests = [(artifact_id, held.manifest) for artifact_id, held in list(self._store.artifacts.items())]
        by_age = sorted(manifests, key=lambda item: (item[1].epoch, item[1].version), reverse=True)
        versions = list(dict.fromkeys((manifest.epoch, manifest.version) for _, manifest in by_age))
        full = [(m.epoch, m.version) for _, m in by_age if m.kind is VersionKind.FULL]
        kept = {*versions[: self._keep_versions], *full[:1]}
        for artifact_id, manifest in by_age:
            is_kept = (manifest.epoch, manifest.version) in kept
            if is_kept or self._fetches[artifact_id] or self._comes(artifact_id):
                continue
            self._pulls.pop(artifact_id, None)
            await asyncio.to_thread(self._store.delete, artifact_id, ())
