"""Loads versions into an engine's shadow copy of the weights, while the engine generates.

The bytes come from the publisher's files if this host can read them, else in chunks from relays or the hub, or by
broadcast. All are checked against the manifest's digests.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.inference.engine import Engine, HostVersion
from meshrl.versions.deltas.image import WeightImage
from meshrl.versions.downloads import Downloader
from meshrl.versions.files import Bytes, HostBytes, Spool, empty_bytes, map_files
from meshrl.versions.layout import mismatch
from meshrl.versions.version_bytes import VersionBytes
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import FoundVersion, Manifest, Transport, VersionKind

MAX_THREADS = 8  # with more, what needs the interpreter's lock takes longer than each thread's share of the rest


class PartTimes:
    """Seconds by part, in the order of their begin; a repeated part adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def begin(self) -> None:
        self.seconds = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        seconds, began_s = self.seconds, time.monotonic()
        try:
            yield
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.monotonic() - began_s

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.seconds.items())


@dataclass(frozen=True, kw_only=True)
class PreparedVersion:
    """The staged version, or one that needs no staging since the live weights have its root (`adopt`)."""

    manifest: Manifest
    artifact_id: str
    adopt: bool
    prepare_s: float
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_adapter(self) -> bool:
        return self.manifest.kind is VersionKind.LORA


class VersionLoader:
    """Loads the versions of one run.

    The last version that deltas can lead on from stays in host memory as an image, unless `Engine.patches`.
    """

    def __init__(
        self, client: WeightSyncClient, engine: Engine, fetcher: VersionFetcher, signature: bytes, run_id: str
    ) -> None:
        """`signature` is that of the layout that the engine serves."""
        self._client = client
        self._engine = engine
        self.fetcher = fetcher
        self._signature, self._run_id = signature, run_id
        self.times = PartTimes()
        self._image: WeightImage | None = None

    async def find(self, version: int, artifact_id: str, *, anew: bool = False) -> FoundVersion:
        """The manifest of a version at the hub, and a delta's steps from the weights here, or from none (`anew`).

        Raises MeshError VERSION_SUPERSEDED, DIGEST_MISMATCH.
        """
        self.fetcher.begin()
        self.times.begin()
        if anew:
            self.drop_image()
        held_root = b"" if anew else self.held_root
        with self.times.part("found"):
            found = await self._client.find_version(
                run_id=self._run_id, version=version, artifact_id=artifact_id, held_root=held_root
            )
        if found.artifact_id != artifact_id:
            text = f"version {version} is now artifact {found.artifact_id}, not {artifact_id}"
            raise MeshError(Reason.VERSION_SUPERSEDED, text)
        if await asyncio.to_thread(manifests.artifact_id, found.manifest) != artifact_id:
            raise MeshError(Reason.DIGEST_MISMATCH, f"the manifest of version {version} does not match its artifact_id")
        return found

    @property
    def held_root(self) -> bytes:
        """The root of the weights that deltas may lead on from; an image may have those of a version not served yet."""
        if self._engine.patches:
            return b"" if self._engine.unfit else self._engine.root or b""
        return b"" if self._image is None else self._image.root

    async def load(self, found: FoundVersion) -> None:
        """Has the engine stage a version. Raises MeshError as `VersionFetcher.fetch`, `stage` and `receive` do."""
        manifest = found.manifest
        if manifest.layout_signature != self._signature:
            theirs = ((entry.name, entry.dtype, tuple(entry.shape)) for entry in manifest.tensors)
            differs = None
            if manifest.kind is not VersionKind.LORA:
                differs = mismatch(manifest.version, self._engine.layout(), theirs)
            text = f"version {manifest.version} is for a model of another layout than the engine's"
            raise differs or MeshError(Reason.LAYOUT_MISMATCH, text)
        full = manifest.kind is VersionKind.FULL
        leads_on = full and manifest.digest_algorithm == manifests.SUM128 and len(manifest.chunks) > 0
        through_hub = manifest.transport is not Transport.NCCL
        if through_hub and (leads_on or manifest.kind is VersionKind.DELTA):
            try:
                await self._load_steps(found)
            except MeshError as error:
                if error.reason not in (Reason.DIGEST_MISMATCH, Reason.NOT_SUPPORTED):
                    raise
                logger.warning("version {} is fetched anew, in full: {}", manifest.version, error)
                await self._load_steps(await self.find(manifest.version, found.artifact_id, anew=True))
            return
        self.drop_image()
        if through_hub:
            await self._fetch_and_stage(manifest, found.artifact_id)
        elif not found.steps:
            await self._receive(manifest)
        elif len(found.steps) > 1 or found.steps[0].result_root != manifest.result_root:
            text = f"the copy of version {manifest.version} for engines that missed its broadcast has other weights"
            raise MeshError(Reason.DIGEST_MISMATCH, text)
        else:
            (copy,) = found.steps
            await self._fetch_and_stage(copy, await asyncio.to_thread(manifests.artifact_id, copy))

    async def _receive(self, manifest: Manifest) -> None:
        is_delta, other_base = manifest.kind is VersionKind.DELTA, manifest.base_root != self._engine.root
        try:
            with self.times.part("received"):
                await self._engine.receive(manifest)  # a delta that it cannot apply, too, or the others would wait
        except MeshError as error:
            if is_delta and error.reason is Reason.NOT_SUPPORTED:
                self._engine.receives_deltas = False  # the agent registers that, and versions come in full
            if is_delta and error.reason is Reason.DIGEST_MISMATCH and other_base:
                text = f"the delta to version {manifest.version} is refused: it is for other weights than those served"
                raise MeshError(Reason.DIGEST_MISMATCH, text) from error
            raise

    async def _load_steps(self, found: FoundVersion) -> None:
        version, patches = found.manifest, self._engine.patches

        def unreachable(why: str) -> MeshError:
            return MeshError(Reason.DIGEST_MISMATCH, f"version {version.version} cannot be reached: {why}")

        steps = found.steps or ((version,) if version.kind is VersionKind.FULL else ())
        if self._image is not None and self._image.root == version.result_root:  # since an earlier attempt
            await asyncio.to_thread(self._image.check)
            steps = ()
        for number, step in enumerate(steps):
            if step.layout_signature != self._signature:
                raise unreachable(f"it leads over version {step.version} of another model")
            if step.kind is VersionKind.FULL:
                artifact_id = await asyncio.to_thread(manifests.artifact_id, step)
                await (self._fetch_and_stage if patches else self._fetch_image)(step, artifact_id)
            elif patches:
                await self._patch(step, onto_staged=number > 0)
            elif self._image is None:
                raise unreachable("its delta is for weights that are not here")
            else:
                with self.times.part("fetched and applied"):
                    await self.fetcher.fetch_delta(step, partial(self._image.apply, step))
        if patches:
            return
        if self._image is None or self._image.root != version.result_root:
            raise unreachable("its deltas lead to other weights")
        await self._stage(version, self._image.held)
        with self.times.part("checked"):  # once it is hashed, a bit that flips in it is found
            await asyncio.to_thread(self._image.wait_until_hashed)

    async def _patch(self, step: Manifest, *, onto_staged: bool) -> None:
        with self.times.part("fetched"):
            delta = await self.fetcher.fetch_delta_file(step)
        try:
            with self.times.part("applied"):
                await self._engine.patch(step, delta.files[0], onto_staged=onto_staged)
        finally:
            delta.release()

    async def _fetch_image(self, manifest: Manifest, artifact_id: str) -> None:
        self.drop_image()
        with self.times.part("fetched"):
            held = await self.fetcher.fetch(manifest, artifact_id, to_change=True)
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._image = await asyncio.to_thread(WeightImage, manifest, held, num_threads=threads)

    async def _fetch_and_stage(self, manifest: Manifest, artifact_id: str) -> None:
        with self.times.part("fetched"):
            held = await self.fetcher.fetch(manifest, artifact_id)
        try:
            await self._stage(manifest, held)
        except BaseException:  # the engine may still read it
            self.fetcher.release(held)
            raise
        self.fetcher.release(held, staged=True)

    async def _stage(self, manifest: Manifest, held: HostBytes) -> None:
        with self.times.part("staged"):
            await self._engine.stage(
                HostVersion(
                    run_id=manifest.run_id,
                    version=manifest.version,
                    tensors=held.tensors(manifest),
                    adapter=manifest.adapter,
                    files=held.files if self._engine.stages_from_files else (),
                )
            )

    def drop_image(self) -> None:
        image, self._image = self._image, None
        if image is not None:
            image.close()


class VersionFetcher:
    """Fetches the versions of one run: those in chunks into files of `spool`, or into memory without one."""

    def __init__(
        self,
        downloader: Downloader,
        *,
        spool: Spool | None = None,
        ahead: Callable[[str], Awaitable[HostBytes | None]] | None = None,
    ) -> None:
        """`ahead` gives the bytes of an artifact that came before it was asked for; None where there are none."""
        self._downloader = downloader
        self._spool, self._ahead = spool, ahead
        self._arrived, self._awaited = 0, 0  # bytes of what is fetched now
        self._leaving: list[HostBytes] = []
        self._freed: asyncio.Task[None] | None = None

    def arriving(self, version: int) -> str:
        mb = f", of which {self._arrived / 1e6:.2f} of {self._awaited / 1e6:.2f} MB are here" if self._awaited else ""
        return f"version {version} from the hub{mb}"

    def begin(self) -> None:
        self._arrived, self._awaited = 0, 0

    def _arrive(self, count: int) -> None:
        self._arrived += count

    async def fetch(self, manifest: Manifest, artifact_id: str, *, to_change: bool = False) -> HostBytes:
        """The verified bytes of a version, to be released once it is staged; `to_change`: a copy in one part.

        Raises MeshError as `Downloader.pull`, DIGEST_MISMATCH for bytes that are not the manifest's, OVERLOADED without
        room.
        """
        mapped = await self._mapped(manifest) if manifest.transport is Transport.FILESYSTEM else None
        if mapped is not None and to_change:
            held = await self._room(manifest, for_writes=False)
            await asyncio.to_thread(mapped.copy_into, held)
            return held
        return mapped or await self._streamed(manifest, artifact_id)

    def release(self, held: HostBytes, *, staged: bool = False) -> None:
        """On a thread, once the caller has let go of it: freeing gigabytes takes a second. The room of a version that
        is `staged` may serve the next one."""
        spool = self._spool if staged and held.own is not None else None

        def free() -> None:
            left = self._leaving.pop()
            if spool is None:
                left.release()
            else:
                spool.keep(left)

        self._leaving.append(held)
        self._freed = asyncio.create_task(asyncio.to_thread(free))

    async def _room(self, manifest: Manifest, *, for_writes: bool) -> HostBytes:
        if self._freed is not None:  # its room may be what this one needs
            await asyncio.wait({self._freed})
        if self._spool is None:
            return empty_bytes(manifest)
        return await asyncio.to_thread(self._spool.room_for, manifest, for_writes=for_writes)

    async def fetch_delta(
        self, manifest: Manifest, use: Callable[[Bytes, Callable[[int], None]], None] = lambda payload, wait_for: None
    ) -> Bytes:
        """The bytes of a delta, every chunk right. Raises MeshError as `fetch`, and the errors of `use`.

        `use` gets them on a thread while they arrive, and a function that waits for those up to an offset.
        """
        payload: Bytes = np.empty(manifest.payload_bytes, dtype=np.uint8)
        artifact_id = await asyncio.to_thread(manifests.artifact_id, manifest)
        held = VersionBytes(manifest, memory=payload)
        self._awaited += manifest.payload_bytes
        pulling = asyncio.create_task(self._downloader.pull(held, artifact_id, self._arrive))
        # A thread of its own: were all of asyncio's waiting here, none would be left to write what they wait for.
        thread = ThreadPoolExecutor(1, thread_name_prefix="arriving")
        using = asyncio.get_running_loop().run_in_executor(thread, copy_context().run, use, payload, held.wait_for)
        ends: set[asyncio.Future[Any]] = {pulling, using}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_EXCEPTION)
            if using.done():
                using.result()
            await pulling
            await using
        finally:
            pulling.cancel()
            held.give_up()
            await asyncio.gather(*ends, return_exceptions=True)
            thread.shutdown(wait=False)
        return payload

    async def fetch_delta_file(self, manifest: Manifest) -> HostBytes:
        assert self._spool is not None, "engines that patch are other processes"
        return await asyncio.to_thread(self._spool.write, manifest.version, await self.fetch_delta(manifest))

    async def _mapped(self, manifest: Manifest) -> HostBytes | None:
        for attempt in (1, 2):  # again once: the first try may have met a cache that was behind
            try:
                held = await asyncio.to_thread(map_files, manifest.files)
            except OSError as error:  # another host, or retired meanwhile: the hub is asked for the bytes instead
                logger.info("files of version {} cannot be used here ({}); asking the hub", manifest.version, error)
                return None
            cancelled = threading.Event()  # a fetch that is cancelled makes the hashing stop at the next tensor
            try:
                wrong = await asyncio.to_thread(held.wrong_tensor, manifest, cancelled)
            finally:
                cancelled.set()
            if wrong is None:
                return held
            logger.warning("attempt {}: tensor {!r} of version {} is damaged", attempt, wrong, manifest.version)
        raise _damaged(manifest, wrong)

    async def _streamed(self, manifest: Manifest, artifact_id: str) -> HostBytes:
        came = None if self._ahead is None else await self._ahead(artifact_id)
        if came is not None:
            return came
        held = await self._room(manifest, for_writes=True)
        try:
            coming = VersionBytes(manifest, file=next(iter(held.files), None), memory=held.parts[0][1])
            self._awaited += manifest.payload_bytes
            await self._downloader.pull(coming, artifact_id, self._arrive)  # which checks each chunk
        except BaseException:  # abandoned fetches leave no file either
            held.release()
            raise
        return held


def _damaged(manifest: Manifest, name: str | None) -> MeshError:
    text = f"tensor {name!r} of version {manifest.version} is not what its manifest says; it was not applied"
    return MeshError(Reason.DIGEST_MISMATCH, text)
