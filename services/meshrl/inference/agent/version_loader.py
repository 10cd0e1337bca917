"""Loads one version into an engine's shadow: its manifest from the hub, its bytes by whatever way they travel.

Used by the agent for each version that it is told to prepare, while the engine generates. A version that is refused has
changed nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from meshrl.client import WeightSyncClient
from meshrl.inference.agent.fetching import VersionFetcher
from meshrl.inference.engine import Engine, HostVersion
from meshrl.versions.layout import mismatch
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Manifest, Transport, VersionKind


@dataclass(frozen=True, kw_only=True)
class PreparedVersion:
    """What is staged, or needs no staging because the live weights have its root (`adopt`)."""

    manifest: Manifest
    artifact_id: str
    adopt: bool
    prepare_s: float


class VersionLoader:
    """Prepares versions for one engine. `signature` is that of the engine's layout."""

    def __init__(self, client: WeightSyncClient, engine: Engine, fetcher: VersionFetcher) -> None:
        self._client = client
        self._engine = engine
        self._fetcher = fetcher
        self.signature = manifests.layout_signature(engine.layout())

    async def manifest(self, version: int, artifact_id: str) -> Manifest:
        """Asks the hub for a manifest. Raises MeshError VERSION_SUPERSEDED, DIGEST_MISMATCH."""
        manifest, found = await self._client.get_manifest(version=version, artifact_id=artifact_id)
        if found != artifact_id:
            raise MeshError(Reason.VERSION_SUPERSEDED, f"version {version} is now artifact {found}, not {artifact_id}")
        if await asyncio.to_thread(manifests.artifact_id, manifest) != artifact_id:
            raise MeshError(Reason.DIGEST_MISMATCH, f"the manifest of version {version} does not match its artifact_id")
        return manifest

    async def load(self, manifest: Manifest, artifact_id: str) -> None:
        """Has the engine stage a version. Raises MeshError as `VersionFetcher.fetch`, `stage` and `receive` do."""
        if manifest.layout_signature != self.signature:
            raise self._refusal(manifest)
        if manifest.transport is Transport.NCCL:
            await self._engine.receive(manifest)
            return
        held = await self._fetcher.fetch(manifest, artifact_id)
        try:
            await self._engine.stage(
                HostVersion(
                    version=manifest.version,
                    tensors=held.tensors(manifest),
                    adapter=manifest.adapter,
                    files=held.files if self._engine.stages_from_files else (),
                )
            )
        finally:
            held.release()

    def _refusal(self, manifest: Manifest) -> MeshError:
        """Says for a person where a version and the engine's model differ."""
        theirs = ((entry.name, entry.dtype, tuple(entry.shape)) for entry in manifest.tensors)
        differs = None
        if manifest.kind is not VersionKind.LORA:
            differs = mismatch(manifest.version, self._engine.layout(), theirs)
        text = f"version {manifest.version} is for a model of another layout than the engine's"
        return differs or MeshError(Reason.LAYOUT_MISMATCH, text)
