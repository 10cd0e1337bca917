"""Sets publishing up on rank 0: the transport by which versions leave, and the publisher."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loguru import logger
from torch._C._distributed_c10d import Store

from meshrl.client import WeightSyncClient
from meshrl.core.config.shared import WeightBroadcastConfig
from meshrl.core.orphans import FolderGuardian
from meshrl.core.paths import Layout
from meshrl.core.private_folders import versions_folder
from meshrl.core.rpc.serve import is_loopback
from meshrl.core.telemetry.waits import Waits
from meshrl.machine.addresses import address_of
from meshrl.models.lora import adapter_config
from meshrl.trainer.build import TrainerParts
from meshrl.trainer.publishing.publisher import Publisher
from meshrl.trainer.publishing.snapshots import (
    STORE_DEADLINE_S,
    PublicationSettings,
    Snapshotter,
    open_snapshotter,
    plan_of,
)
from meshrl.trainer.publishing.transport_choice import (
    choose,
    files_folder,
    first_engines,
    handover_folder,
    known_engines,
)
from meshrl.trainer.ranks.commands import CommandSender, PublishSetupCommand, SnapshotCommand
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.run_state import RunState
from meshrl.versions import peft
from meshrl.versions.collective.communicator import open_store, reach_store
from meshrl.versions.snapshot import Captured
from meshrl.versions.sources import LinkLimits
from meshrl.versions.transports.base import VersionLine, VersionTransport
from meshrl.versions.transports.broadcast import BroadcastShare, BroadcastTransport
from meshrl.versions.transports.filesystem import FilesystemTransport
from meshrl.versions.transports.rank_calls import RankCalls
from meshrl.versions.transports.stream import StreamShare, StreamTransport
from meshrl.wire.errors import MeshError
from meshrl.wire.manifest import Adapter
from meshrl.wire.types import EngineInfo, Transport

LOCALHOST = "127.0.0.1"
MAX_THREADS = 8  # of one rank for files: memory is no faster with more
DELTAS_FROM_BYTES = 64 * 2**20  # a smaller version is brought sooner in full than compared, unless through the hub


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    model: TrainerModelConfig
    broadcast: WeightBroadcastConfig
    output_dir: Path
    hub_deadline_s: float
    publish_deadline_s: float


@dataclass(frozen=True, kw_only=True)
class Publication:
    publisher: Publisher
    snapshotter: Snapshotter
    store: Store | None  # lives as long as this does
    temporary: Path | None  # a folder to remove at the end
    guardian: FolderGuardian | None  # removes it where this process is killed, unless rl does

    async def close(self) -> None:
        await self.publisher.close()
        if self.temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self.temporary, ignore_errors=True)
        if self.guardian is not None:
            await asyncio.to_thread(self.guardian.close)


async def decide(
    options: PublishOptions, parts: TrainerParts, client: WeightSyncClient, epoch: int, waits: Waits
) -> PublicationSettings:
    """Decides how versions leave, but for the store's address. With type auto it waits for a first engine."""
    broadcast, parallel = options.broadcast, parts.parallel
    adapter_only = options.model.lora is not None and broadcast.lora_adapter_only
    engines: tuple[EngineInfo, ...] = ()
    if broadcast.type == "auto":
        logger.info("looking for engines, for at most {:g} s (hub_deadline_s)", options.hub_deadline_s)
        what = f"a first engine to register at the weight hub {broadcast.address}"
        with waits.waiting("first_engine", what, (broadcast.address, "weights")):
            engines = await first_engines(client, deadline_s=options.hub_deadline_s)
    elif broadcast.type == "filesystem" and broadcast.broadcast_dir is None:
        engines = await known_engines(client)
    on_gpu = parallel.device.type == "cuda"
    transport, why = choose(broadcast.type, engines, on_gpu=on_gpu, host=platform.node(), adapter_only=adapter_only)
    logger.info("versions leave by {}: {}", transport.value, why)
    one_host = parallel.plan.on_one_host
    folder = Path(options.output_dir)
    if transport is Transport.FILESYSTEM:
        whole = plan_of(parts.learner.model, parts.compute_dtype)
        folder = files_folder(
            broadcast.broadcast_dir,
            options.output_dir,
            Layout(options.output_dir).broadcasts,
            hub_address=broadcast.address,
            engines=engines,
            host=platform.node(),
            one_host=one_host,
            version_bytes=whole.num_bytes,
        )
    senders = parallel.plan.num_senders
    shared = transport is Transport.NCCL or one_host
    if transport is Transport.STREAM and not adapter_only:
        shared = shared or senders == 1
        if shared and senders > 1:
            folder = handover_folder(
                options.output_dir,
                Layout(options.output_dir).broadcasts,
                version_bytes=plan_of(parts.learner.model, parts.compute_dtype).num_bytes,
            )
    return PublicationSettings(
        transport=transport.value,
        epoch=await claimable_epoch(client, epoch),
        adapter_only=adapter_only,
        in_shares=shared and not adapter_only,
        folder=str(folder.absolute()),
        chunk_bytes=broadcast.chunk_bytes,
        bucket_bytes=broadcast.bucket_mib * 2**20,
        num_threads=max(1, min(MAX_THREADS, (os.cpu_count() or 1) // parallel.plan.local_world_size)),
        backend="nccl" if on_gpu else "gloo",
        deadline_s=broadcast.transfer_deadline_s,
        probe_tokens=broadcast.probe_tokens,
    )


async def claimable_epoch(client: WeightSyncClient, epoch: int) -> int:
    """The epoch to publish in: `epoch`, or the hub's next one where the trainer started often without publishing.

    Without a hub it is `epoch`. Should that be refused later, the trainer ends, and the next start finds the hub.
    """
    try:
        current = await client.epoch()
    except MeshError as error:  # programs start in any order
        if not error.retryable:
            raise
        return epoch
    return min(epoch, current + 1) if current else epoch


def open_publication(
    settings: Future[PublicationSettings],
    options: PublishOptions,
    parts: TrainerParts,
    commands: CommandSender,
    client: WeightSyncClient,
    environment: Mapping[str, str],
) -> tuple[Publication, Captured]:
    """As `open_run`, for the trainer's own run, once its settings are decided."""
    decided = commands.wait(settings)
    parallel = parts.parallel
    store = None
    if decided.transport == Transport.NCCL.value or (decided.in_shares and parallel.plan.num_senders > 1):
        host = store_host(decided.transport, options.broadcast.host, environment, one_host=parallel.plan.on_one_host)
        store = open_store(host, deadline_s=STORE_DEADLINE_S)
        decided = replace(decided, store_address=address_of(host, store.port))
    return open_run(decided, options, parts, parts.own.state, commands, client, store)


def settings_of_added(own: PublicationSettings, *, epoch: int, folder: Path) -> PublicationSettings:
    """Versions of added runs leave as adapters that rank 0 streams."""
    return replace(
        own, transport=Transport.STREAM.value, adapter_only=True, in_shares=False, store_address="", epoch=epoch,
        folder=str(folder.absolute()),
    )  # fmt: skip


def open_run(
    decided: PublicationSettings,
    options: PublishOptions,
    parts: TrainerParts,
    run: RunState,
    commands: CommandSender,
    client: WeightSyncClient,
    store: Store | None = None,
) -> tuple[Publication, Captured]:
    """Opens the snapshotters of all ranks for a run and captures its first version; on the training thread."""
    commands.send(PublishSetupCommand(run_id=run.run_id, settings=decided))
    parts.learner.take_up(run)
    snapshotter = open_snapshotter(decided, parts.learner, run, parts.compute_dtype)
    transport = _transport(decided, options, parts, run.run_id, client, snapshotter, store)
    commands.send(SnapshotCommand(run_id=run.run_id))
    initial = snapshotter.capture(run.step_done)
    broadcast = options.broadcast
    folder, layout = versions_folder(options.output_dir), Layout(options.output_dir)
    temporary = folder if Path(decided.folder) == folder else None
    publication = Publication(
        publisher=Publisher(client, transport, retry_for_s=broadcast.stall_s, limits=LinkLimits.of(broadcast)),
        snapshotter=snapshotter,
        store=store,
        temporary=temporary,
        guardian=None if temporary is None else FolderGuardian(temporary, lock_file=layout.lock),
    )
    return publication, initial


def store_host(transport: str, engines_host: str, environment: Mapping[str, str], *, one_host: bool) -> str:
    """The host at which the store listens, where ranks and, with transport nccl, engines meet.

    `engines_host` is configured for engines; ranks on other hosts cannot reach a loopback address.
    """
    if transport != Transport.NCCL.value:
        return LOCALHOST  # only ranks of one host share files
    if one_host or not is_loopback(engines_host):
        return engines_host
    return environment.get("MASTER_ADDR", engines_host)


def _transport(
    settings: PublicationSettings,
    options: PublishOptions,
    parts: TrainerParts,
    run_id: str,
    client: WeightSyncClient,
    snapshotter: Snapshotter,
    store: Store | None,
) -> VersionTransport:
    adapter = None
    if settings.adapter_only:
        adapter = Adapter(
            config=peft.config_of(adapter_config(parts.learner.model, options.model.name)),
            base_layout=snapshotter.plan.layout,
        )
    line = VersionLine(run_id=run_id, epoch=settings.epoch, adapter=adapter)
    broadcast, share = options.broadcast, snapshotter.share
    senders, calls_store = parts.parallel.plan.num_senders if settings.in_shares else 1, None
    if senders > 1:
        calls_store = reach_store(settings.store_address, deadline_s=STORE_DEADLINE_S)
    calls = RankCalls(share, calls_store, num_ranks=senders)
    num_bytes, has_deltas = snapshotter.plan.num_bytes, broadcast.deltas == "auto" and adapter is None
    if has_deltas and not isinstance(share, StreamShare) and num_bytes < DELTAS_FROM_BYTES:
        logger.info("versions leave in full: {} bytes are brought sooner than compared", num_bytes)
        has_deltas = False
    shared: dict[str, Any] = {
        "chunk_bytes": settings.chunk_bytes,
        "anchor_every": broadcast.anchor_every if has_deltas else None,
    }
    if not isinstance(share, BroadcastShare):
        rows = {
            **shared,
            "num_shares": senders,
            "num_threads": settings.num_threads,
            "stall_s": options.publish_deadline_s,
        }
        if isinstance(share, StreamShare):
            return StreamTransport(line, calls, share, **rows)
        return FilesystemTransport(line, calls, share, **rows)
    assert store is not None, "the engines meet the trainer at its store"
    return BroadcastTransport(line, calls, share, snapshotter.plan, client, store, **shared)
