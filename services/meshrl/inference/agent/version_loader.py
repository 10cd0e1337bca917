"""Loads one version into an engine's shadow copy of the weights, while the engine generates.

Used by the agent for each version that it is to prepare. The manifest comes from the hub, the bytes by the way
that it names: files, chunks, deltas or a broadcast. A version that is refused leaves the live weights as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.inference.agent.fetching import VersionFetcher
from meshrl.inference.agent.images import ImageKeeper, is_for_images
from meshrl.inference.agent.part_times import PartTimes
from meshrl.inference.engine import Engine, HostVersion
from meshrl.versions.files import HostBytes
from meshrl.versions.layout import mismatch
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import FoundVersion, Manifest, Transport, VersionKind


@dataclass(frozen=True, kw_only=True)
class PreparedVersion:
    """What is staged, or needs no staging because the live weights have its root (`adopt`).

    `parts`: where the time went, in seconds (see `PartTimes`).
    """

    manifest: Manifest
    artifact_id: str
    adopt: bool
    prepare_s: float
    parts: Mapping[str, float] = field(default_factory=dict)


class VersionLoader:
    """Prepares versions for one engine. `signature` is that of the engine's layout."""

    def __init__(self, client: WeightSyncClient, engine: Engine, fetcher: VersionFetcher) -> None:
        self._client = client
        self._engine = engine
        self._fetcher = fetcher
        self.signature = manifests.layout_signature(engine.layout())
        self.times = PartTimes()
        self.images = ImageKeeper(fetcher, self.signature, self.times)

    async def find(self, version: int, artifact_id: str) -> FoundVersion:
        """Asks the hub for the manifest of a version, and of a delta for the steps from the weights that are here.

        Raises MeshError VERSION_SUPERSEDED, DIGEST_MISMATCH.
        """
        self._fetcher.begin()
        self.times.begin()
        held_root = await self.images.held_root()
        with self.times.part("found"):
            found = await self._client.find_version(version=version, artifact_id=artifact_id, held_root=held_root)
        if found.artifact_id != artifact_id:
            text = f"version {version} is now artifact {found.artifact_id}, not {artifact_id}"
            raise MeshError(Reason.VERSION_SUPERSEDED, text)
        if await asyncio.to_thread(manifests.artifact_id, found.manifest) != artifact_id:
            raise MeshError(Reason.DIGEST_MISMATCH, f"the manifest of version {version} does not match its artifact_id")
        return found

    async def load(self, found: FoundVersion) -> None:
        """Has the engine stage a version. Raises MeshError as `VersionFetcher.fetch`, `stage` and `receive` do."""
        manifest = found.manifest
        if manifest.layout_signature != self.signature:
            theirs = ((entry.name, entry.dtype, tuple(entry.shape)) for entry in manifest.tensors)
            differs = None
            if manifest.kind is not VersionKind.LORA:
                differs = mismatch(manifest.version, self._engine.layout(), theirs)
            text = f"version {manifest.version} is for a model of another layout than the engine's"
            raise differs or MeshError(Reason.LAYOUT_MISMATCH, text)
        if is_for_images(manifest):
            await self._stage(manifest, await self._load_image(found))
            await self.images.wait_until_hashed()
            return
        self.images.drop()
        if manifest.transport is Transport.NCCL:
            with self.times.part("received"):
                await self._engine.receive(manifest)
            return
        with self.times.part("fetched"):
            held = await self._fetcher.fetch(manifest, found.artifact_id)
        try:
            await self._stage(manifest, held)
        finally:
            held.release()

    async def _load_image(self, found: FoundVersion) -> HostBytes:
        """Loads a version into the image, in full where the weights in it turn out to be damaged."""
        try:
            return await self.images.load(found)
        except MeshError as error:
            if error.reason is not Reason.DIGEST_MISMATCH:
                raise
            logger.warning("version {} is fetched anew, in full: {}", found.manifest.version, error)
        self.images.drop()
        return await self.images.load(await self.find(found.manifest.version, found.artifact_id))

    async def _stage(self, manifest: Manifest, held: HostBytes) -> None:
        with self.times.part("staged"):
            await self._engine.stage(
                HostVersion(
                    version=manifest.version,
                    tensors=held.tensors(manifest),
                    adapter=manifest.adapter,
                    files=held.files if self._engine.stages_from_files else (),
                )
            )
