"""Rank 0's publisher: stages and seals each captured version at the hub. The orchestrator activates them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.core.config import ConfigError
from meshrl.core.durable import write_file
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import Captured
from meshrl.versions.sources import LinkLimits
from meshrl.versions.transports.base import VersionTransport
from meshrl.versions.uploads import RETRY_FOR_S, Uploader
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import VersionKind, VersionProbe, capabilities


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """How a version was published.

    `parts_s` has the seconds of the transport's parts: `probe` (scored), `snapshot` (rows cast and copied aside, on the
    training thread), `encode` (digested, and made a delta, by all ranks), `write` (hashed and written or packed),
    `group` (engines met), `stage` (taken by the hub), `seal`, `wire` (broadcast), `keep` (as the next delta's base).
    """

    version: int
    artifact_id: str
    root: bytes
    num_bytes: int
    parts_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts_s.values())

    def log(self) -> None:
        parts = ", ".join(f"{name} {length_s:.3f}" for name, length_s in self.parts_s.items())
        logger.info("version {} is published: {} bytes in {:.3f} s ({})",
                    self.version, self.num_bytes, self.seconds, parts)  # fmt: skip


class Publisher:
    def __init__(
        self,
        client: WeightSyncClient,
        transport: VersionTransport,
        *,
        retry_for_s: float = RETRY_FOR_S,
        limits: LinkLimits | None = None,
    ) -> None:
        """`retry_for_s`: how long a hub that is away is called again; `limits` of the upload, else one connection."""
        self._transport = transport
        self._uploader = Uploader(client, transport.progress, retry_for_s=retry_for_s, limits=limits)
        self._busy = asyncio.Lock()
        self._warned_of_probes = False

    @property
    def progress(self) -> Progress:
        return self._transport.progress

    async def publish(self, version: int, captured: Captured, traceparent: str = "") -> PublishReport:
        """Publishes a captured version; returns once it is sealed and, by broadcast, was sent to the engines.

        The same content may be published again. Raises MeshError: STALE_EPOCH when a newer trainer took over,
        VERSION_CONFLICT or VERSION_SUPERSEDED, DIGEST_MISMATCH when bytes changed before sealing, UNREACHABLE after
        `retry_for_s`. Raises OSError for files that cannot be written.
        """
        async with self._busy:
            peers = await self._uploader.peers()
            prepared = await self._transport.prepare(version, captured, peers)
            probe = await self._probe(captured, peers.hub)
            manifest = replace(prepared.manifest, probe=probe)
            began_s = time.monotonic()
            try:
                staged = await self._uploader.stage(manifest, prepared.buffer)
            except MeshError as error:
                if manifest.kind is not VersionKind.DELTA or error.reason is not Reason.UNKNOWN_VERSION:
                    raise
                logger.warning("{}", error)  # the hub has lost its base: the next try goes in full
                prepared = await self._transport.prepare(version, captured, peers)
                manifest = replace(prepared.manifest, probe=probe)
                staged = await self._uploader.stage(manifest, prepared.buffer)
            staged_s = time.monotonic()
            await self._uploader.seal(manifest, staged.artifact_id, traceparent, prepared.buffer)
            hub_s = {"stage": staged_s - began_s, "seal": time.monotonic() - staged_s}
            delivery_s = await self._transport.deliver(version)
        report = PublishReport(
            version=version,
            artifact_id=staged.artifact_id,
            root=manifest.result_root,
            num_bytes=manifest.payload_bytes,
            parts_s={**captured.parts_s, **prepared.parts_s, **hub_s, **delivery_s},
        )
        report.log()
        return report

    async def _probe(self, captured: Captured, hub: Collection[str]) -> VersionProbe | None:
        if captured.probe is None:
            return None
        if capabilities.PROBES in hub:
            return await asyncio.to_thread(captured.probe)
        if not self._warned_of_probes:
            self._warned_of_probes = True
            text = "versions go without probes: the hub lacks the capability {}; start it from the trainer's release"
            logger.warning(text, capabilities.PROBES)
        return None

    async def close(self) -> None:
        await self._uploader.close()
        await self._transport.close()


def next_epoch(path: Path) -> int:
    """One more than the epoch in the file at `path` (1 when there is none), which is written there durably.

    For each start of a trainer. Raises ConfigError for a damaged file.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        text = "0"
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}; make it a file of the trainer's user") from error
    if not text.isdecimal():
        raise ConfigError(
            f"{path} should hold how often the trainer has started here, got {text[:40]!r}; write a number that is not"
            " lower, such as 1000"
        )
    epoch = int(text) + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, f"{epoch}\n")
    return epoch
