"""What the publisher asks of every transport, and what a transport asks of the trainer's other ranks.

Rank 0's publisher prepares a version with its transport, stages and seals it at the hub, and has the transport deliver
it. Where the ranks share that work, the transport makes a `PublishCall` to all of them, and each rank's `RankShare`
does its part on a thread beside training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import Captured
from meshrl.versions.uploads import TODAY, Peers
from meshrl.wire.manifest import Adapter, build_manifest
from meshrl.wire.types import ChunkEntry, CollectivePlan, FileEntry, Manifest, TensorEntry, Transport

Answer = Mapping[str, Mapping[str, str]]
"""What a rank answers to a call: tables by name, such as the digests that it computed."""


@dataclass(frozen=True, kw_only=True)
class PublishCall:
    """What rank 0 asks every sender rank to do. Each transport has calls of its own, beside the share that takes them;
    their fields are plain values, since calls travel as JSON.
    """


@dataclass(frozen=True, kw_only=True)
class VersionCall(PublishCall):
    """A call that is about one version."""

    version: int


class RankShare(Protocol):
    """One rank's part in publishing a version; `progress` shows whether it still moves."""

    @property
    def calls(self) -> Sequence[type[PublishCall]]: ...

    @property
    def progress(self) -> Progress: ...

    def carry_out(self, call: Any) -> Answer:
        """Does what one of its calls asks for; blocking. Raises MeshError and OSError."""


@dataclass(frozen=True, kw_only=True)
class VersionLine:
    """What the versions of one trainer have in common: their run and epoch, and the adapter that they are, if any."""

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
        """The manifest of a version of this line; `digest_algorithm` where it is another than the transport's own."""
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
    """A version that can be staged: its manifest and, where the bytes go through the hub, the byte stream.

    `parts_s`: where the time went, by the name of the part.
    """

    manifest: Manifest
    parts_s: Mapping[str, float]
    buffer: NDArray[np.uint8] | None = None


class VersionTransport(Protocol):
    """How versions get from the trainer to the engines, seen from rank 0; used for one version at a time."""

    @property
    def progress(self) -> Progress: ...

    async def prepare(self, version: int, captured: Captured, peers: Peers = TODAY) -> Prepared:
        """Does the work before the version is declared at the hub, so that its `peers` can read the version.

        Raises MeshError and OSError."""

    async def deliver(self, version: int) -> Mapping[str, float]:
        """Sends a sealed version to the engines where they do not fetch it themselves; returns seconds by part."""

    async def close(self) -> None:
        """Ends its threads and connections."""
