"""The interface of transports, and what their versions have in common.

Rank 0's publisher prepares a version with its transport, stages and seals it at the hub, and has the transport deliver
it. Ranks that share the work get a `PublishCall`, which their `SenderShare` carries out on a thread beside training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import Captured
from meshrl.versions.uploads import TODAY, Peers
from meshrl.wire.manifest import Adapter, build_manifest
from meshrl.wire.types import ChunkEntry, CollectivePlan, FileEntry, Manifest, TensorEntry, Transport

Answer = Mapping[str, Mapping[str, str]]
"""A rank's answer to a call: tables by name."""


@dataclass(frozen=True, kw_only=True)
class PublishCall:
    """What rank 0 asks every sender rank to do. Its fields are plain values, since calls travel as JSON."""


@dataclass(frozen=True, kw_only=True)
class VersionCall(PublishCall):
    version: int


@dataclass(frozen=True, kw_only=True)
class VersionLine:
    """What the versions of one trainer have in common; `adapter` where they are adapters."""

    run_id: str
    epoch: int
    adapter: Adapter | None = None

    def manifest(
        self,
        version: int,
        transport: Transport,
        tensors: tuple[TensorEntry, ...],
        chunks: tuple[ChunkEntry, ...] = (),
        *,
        files: tuple[FileEntry, ...] = (),
        collective: CollectivePlan | None = None,
        digest_algorithm: str = "",
    ) -> Manifest:
        """`digest_algorithm`: if another than the transport's own."""
        manifest = build_manifest(
            run_id=self.run_id,
            epoch=self.epoch,
            version=version,
            transport=transport,
            tensors=tensors,
            chunks=chunks,
            files=files,
            collective=collective,
            adapter=self.adapter,
        )
        return replace(manifest, digest_algorithm=digest_algorithm or manifest.digest_algorithm)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A version to stage: its manifest and, where the bytes go through the hub, the byte stream; seconds by part.

    `in_full` describes a delta as if it had left in full; it is the manifest of any other version.
    """

    manifest: Manifest
    in_full: Manifest
    parts_s: Mapping[str, float] = field(default_factory=dict)
    buffer: NDArray[np.uint8] | None = None


class VersionTransport(Protocol):
    """Rank 0's side; used for one version at a time."""

    @property
    def progress(self) -> Progress: ...

    async def prepare(self, version: int, captured: Captured, peers: Peers = TODAY) -> Prepared:
        """Makes a version that the `peers` can read. Raises MeshError and OSError."""

    async def deliver(self, version: int) -> Mapping[str, float]:
        """Sends a sealed version to the engines, unless they fetch it; returns seconds by part."""

    async def close(self) -> None: ...
