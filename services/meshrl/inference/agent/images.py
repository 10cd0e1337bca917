"""Keeps one engine's `WeightImage`, the host copy of the weights that deltas are applied to.

Used by `VersionLoader` for versions that come as deltas, and for full versions that deltas are made from. The image is
ahead of the engine: it holds the version that is being prepared. When that version is given up, the image is taken back
to the version that the engine serves before the next one is fetched.
"""

from __future__ import annotations

import asyncio
import os

from loguru import logger

from meshrl.inference.agent.fetching import VersionFetcher
from meshrl.inference.agent.part_times import PartTimes
from meshrl.versions.deltas.image import WeightImage
from meshrl.versions.files import HostBytes
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import FoundVersion, Manifest, VersionKind

MAX_THREADS = 8  # with more, what needs the interpreter's lock takes longer than each thread's share of the rest


def is_for_images(manifest: Manifest) -> bool:
    """Whether a version is a delta, or a full one that deltas may be made from."""
    full = manifest.kind is VersionKind.FULL and manifest.digest_algorithm == manifests.SUM128 and manifest.chunks
    return manifest.kind is VersionKind.DELTA or bool(full)


class ImageKeeper:
    """The image of one engine; there is none before the first version that needs one."""

    def __init__(self, fetcher: VersionFetcher, layout: bytes, times: PartTimes) -> None:
        """`layout` is the signature of what the engine serves; `times` gets what fetching and applying took."""
        self._fetcher, self._layout, self._times = fetcher, layout, times
        self._image: WeightImage | None = None

    async def held_root(self) -> bytes:
        """Takes the image back to the version served last and returns its root; empty without an image."""
        if self._image is not None:
            try:
                await asyncio.to_thread(self._image.revert)
            except MeshError as error:
                logger.warning("the kept weights are dropped: {}", error)
                self.drop()
        return b"" if self._image is None else self._image.root

    async def load(self, found: FoundVersion) -> HostBytes:
        """Fetches what leads to a version and applies it to the image; returns the image's bytes, to be read only.

        Raises MeshError as `VersionFetcher.fetch`; DIGEST_MISMATCH also where what is held is not what it should be.
        """
        version = found.manifest
        whole = (version,) if version.kind is VersionKind.FULL else ()
        is_held = self._image is not None and self._image.root == version.result_root
        for step in () if is_held else found.steps or whole:
            if step.layout_signature != self._layout:
                raise _unreachable(version, f"it leads over version {step.version} of another model")
            if step.kind is VersionKind.FULL:
                self.drop()
                artifact_id = await asyncio.to_thread(manifests.artifact_id, step)
                with self._times.part("fetched"):
                    held = await self._fetcher.fetch(step, artifact_id)
                threads = min(MAX_THREADS, os.cpu_count() or 1)
                self._image = await asyncio.to_thread(WeightImage, step, held, num_threads=threads)
                continue
            with self._times.part("fetched"):
                delta = await self._fetcher.fetch_delta(step)
            if self._image is None:
                raise _unreachable(version, "its delta is for weights that are not here")
            with self._times.part("applied"):
                await asyncio.to_thread(self._image.apply, step, delta)
        if self._image is None or self._image.root != version.result_root:
            raise _unreachable(version, "its deltas lead to other weights")
        if is_held:  # since an earlier attempt
            await asyncio.to_thread(self._image.check)
        return self._image.held

    async def wait_until_hashed(self) -> None:
        """Returns once a bit that flips in the image would be found; to be awaited before a version is prepared."""
        if self._image is not None:
            with self._times.part("checked"):
                await asyncio.to_thread(self._image.wait_until_hashed)

    def confirm(self, root: bytes) -> None:
        """Weights with this root are served: if the image holds them, it will not go back behind them."""
        if self._image is not None and self._image.root == root:
            self._image.confirm()

    def drop(self) -> None:
        """Lets go of the image; the next version comes in full."""
        image, self._image = self._image, None
        if image is not None:
            image.close()


def _unreachable(manifest: Manifest, why: str) -> MeshError:
    return MeshError(Reason.DIGEST_MISMATCH, f"version {manifest.version} cannot be reached: {why}")
