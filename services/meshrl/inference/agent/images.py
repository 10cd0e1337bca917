"""Keeps the weights that deltas apply to, for one engine: brings them from version to version, and back after an abort.

Used by `VersionLoader` for versions that come as deltas, and for the full ones that deltas lead from. The image goes
ahead of the engine: a version in it is staged, prepared and served as any other, and one that was given up is taken
back before the next one is fetched.
"""

from __future__ import annotations

import asyncio
import os

from loguru import logger

from meshrl.inference.agent.fetching import VersionFetcher
from meshrl.versions.deltas.image import WeightImage
from meshrl.versions.files import HostBytes
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import FoundVersion, Manifest, VersionKind

MAX_THREADS = 16


def is_for_images(manifest: Manifest) -> bool:
    """Whether a version is a delta, or one that deltas lead from."""
    full = manifest.kind is VersionKind.FULL and manifest.digest_algorithm == manifests.SUM128 and manifest.chunks
    return manifest.kind is VersionKind.DELTA or bool(full)


class ImageKeeper:
    """The image of one engine. None is kept before the first version that wants one."""

    def __init__(self, fetcher: VersionFetcher, layout: bytes) -> None:
        """`layout` is the signature of what the engine serves."""
        self._fetcher, self._layout = fetcher, layout
        self._image: WeightImage | None = None

    async def held_root(self) -> bytes:
        """Root of what the image holds once it is back at the version that was served last; empty without one."""
        if self._image is not None:
            try:
                await asyncio.to_thread(self._image.revert)
            except MeshError as error:
                logger.warning("the kept weights are dropped: {}", error)
                self.drop()
        return b"" if self._image is None else self._image.root

    async def bring(self, found: FoundVersion) -> HostBytes:
        """The bytes of a version, to be staged and left as they are.

        Raises MeshError as `VersionFetcher.fetch`; DIGEST_MISMATCH also where what is held is not what it should be.
        """
        version = found.manifest
        whole = (version,) if version.kind is VersionKind.FULL else ()
        held = self._image is not None and self._image.root == version.result_root
        for step in () if held else found.steps or whole:
            if step.layout_signature != self._layout:
                raise _astray(version, f"it leads over version {step.version} of another model")
            if step.kind is VersionKind.FULL:
                await self._begin(step)
                continue
            delta = await self._fetcher.fetch_delta(step)
            if self._image is None:
                raise _astray(version, "it leads from weights that are not here")
            await asyncio.to_thread(self._image.apply, step, delta)
        if self._image is None or self._image.root != version.result_root:
            raise _astray(version, "what leads to it leads elsewhere")
        if held:  # it has been lying here
            await asyncio.to_thread(self._image.check)
        return self._image.held

    async def settle(self) -> None:
        """Returns once a bit that flips in the image is found; call it before saying that a version is prepared."""
        if self._image is not None:
            await asyncio.to_thread(self._image.settle)

    def keep(self, root: bytes) -> None:
        """A version is served: if it is the one in the image, there is no way back from it any more."""
        if self._image is not None and self._image.root == root:
            self._image.keep()

    def drop(self) -> None:
        """Lets go of the image; the next version comes in full."""
        image, self._image = self._image, None
        if image is not None:
            image.close()

    async def _begin(self, full: Manifest) -> None:
        self.drop()
        artifact_id = await asyncio.to_thread(manifests.artifact_id, full)
        held = await self._fetcher.fetch(full, artifact_id)
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._image = await asyncio.to_thread(WeightImage, full, held, num_threads=threads)


def _astray(manifest: Manifest, why: str) -> MeshError:
    return MeshError(Reason.DIGEST_MISMATCH, f"version {manifest.version} cannot be reached: {why}")
