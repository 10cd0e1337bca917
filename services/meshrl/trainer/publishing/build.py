"""Rank 0's side of publishing, made at the start: which way versions leave, and the publisher for that way."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from loguru import logger
from torch._C._distributed_c10d import Store

from meshrl.client import WeightSyncClient
from meshrl.core.guardian import FolderGuardian
from meshrl.core.paths import Layout
from meshrl.core.rpc.serve import is_loopback
from meshrl.models.lora import adapter_config
from meshrl.trainer.build import TrainerParts
from meshrl.trainer.config import TrainerConfig
from meshrl.trainer.publishing.collective_publisher import CollectivePublisher
from meshrl.trainer.publishing.file_publisher import FilePublisher
from meshrl.trainer.publishing.progress import Progress
from meshrl.trainer.publishing.publisher import Adapter, Publisher
from meshrl.trainer.publishing.rank_calls import Crew
from meshrl.trainer.publishing.rows import Rows, num_senders
from meshrl.trainer.publishing.snapshots import (
    STORE_DEADLINE_S,
    Exit,
    FileExit,
    GatherExit,
    GroupExit,
    PublicationSettings,
    open_exit,
)
from meshrl.trainer.publishing.transport_choice import choose, files_folder, first_engines, known_engines, shm_folder
from meshrl.trainer.publishing.uploading import PublishReport
from meshrl.trainer.ranks.commands import CommandSender, PublishSetupCommand, SnapshotCommand
from meshrl.versions import peft
from meshrl.versions.collective.communicator import open_store, reach_store
from meshrl.wire.errors import MeshError
from meshrl.wire.types import EngineInfo, Transport

LOCALHOST = "127.0.0.1"
MAX_THREADS = 8  # of one rank for files: memory is no faster with more


class AnyPublisher(Protocol):
    """Publishes what the exit of its kind took; `progress` says whether it still moves."""

    progress: Progress

    async def publish(self, version: int, taken: Any, traceparent: str = "") -> PublishReport: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What rank 0 publishes with."""

    publisher: AnyPublisher
    exit: Exit
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
    config: TrainerConfig, parts: TrainerParts, client: WeightSyncClient, epoch: int, environment: Mapping[str, str]
) -> PublicationSettings:
    """How versions leave, but for the store's address. With type auto it waits for a first engine.

    `epoch` is the trainer's own; one that started several times without publishing claims the hub's next one.
    """
    broadcast, parallel = config.weight_broadcast, parts.parallel
    adapter_only = config.model.lora is not None and broadcast.lora_adapter_only
    engines: tuple[EngineInfo, ...] = ()
    if broadcast.type == "auto":
        logger.info("looking for engines, for at most {:g} s (hub_deadline_s)", config.hub_deadline_s)
        engines = await first_engines(client, deadline_s=config.hub_deadline_s)
    elif broadcast.type == "filesystem" and broadcast.broadcast_dir is None:
        engines = await known_engines(client)
    on_gpu = parallel.device.type == "cuda"
    choice = choose(broadcast.type, engines, on_gpu=on_gpu, host=platform.node(), adapter_only=adapter_only)
    logger.info("versions leave by {}: {}", choice.transport.value, choice.why)
    ranks_here = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    one_host = ranks_here == parallel.world_size
    folder = Path(config.output_dir)
    if choice.transport is Transport.FILESYSTEM:
        whole = Rows.of(parts.learner.model, parts.compute_dtype, num_senders=1, bucket_bytes=1)
        folder = files_folder(
            broadcast.broadcast_dir,
            config.output_dir,
            Layout(config.output_dir).broadcasts,
            hub_address=broadcast.address,
            engines=engines,
            host=platform.node(),
            one_host=one_host,
            version_bytes=whole.num_bytes,
        )
    shared = choice.transport is Transport.NCCL or (choice.transport is Transport.FILESYSTEM and one_host)
    return PublicationSettings(
        transport=choice.transport.value,
        epoch=await claimable_epoch(client, epoch),
        adapter_only=adapter_only,
        in_shares=shared and not adapter_only,
        folder=str(folder.absolute()),
        chunk_bytes=broadcast.chunk_bytes,
        bucket_bytes=broadcast.bucket_mib * 2**20,
        num_threads=max(1, min(MAX_THREADS, (os.cpu_count() or 1) // ranks_here)),
        backend="nccl" if on_gpu else "gloo",
        deadline_s=broadcast.transfer_deadline_s,
    )


async def claimable_epoch(client: WeightSyncClient, epoch: int) -> int:
    """The epoch to publish in: the next one of the hub, where that is below `epoch`.

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
    config: TrainerConfig,
    parts: TrainerParts,
    commands: CommandSender,
    client: WeightSyncClient,
    environment: Mapping[str, str],
) -> tuple[Publication, Any]:
    """Opens the exits of all ranks and takes the first version; on the training thread, first of all."""
    decided = commands.wait(settings)
    parallel, model = parts.parallel, parts.learner.model
    senders = num_senders(parallel)
    store = None
    if decided.transport == Transport.NCCL.value or (decided.in_shares and senders > 1):
        one_host = int(environment.get("LOCAL_WORLD_SIZE", "1")) == parallel.world_size
        host = store_host(decided.transport, config.weight_broadcast.host, environment, one_host=one_host)
        store = open_store(host, deadline_s=STORE_DEADLINE_S)
        address = f"[{host}]:{store.port}" if ":" in host else f"{host}:{store.port}"
        decided = replace(decided, store_address=address)
    commands.send(PublishSetupCommand(settings=decided))
    exit_ = open_exit(decided, model, parts.compute_dtype, parallel)
    crew_store = None
    if store is not None and senders > 1:
        crew_store = reach_store(decided.store_address, deadline_s=STORE_DEADLINE_S)
    commands.send(SnapshotCommand())
    initial = exit_.take(parts.learner.step_done)
    temporary, layout = _temporary(decided, config), Layout(config.output_dir)
    publication = Publication(
        publisher=_publisher(decided, config, parts, client, exit_, crew_store, store),
        exit=exit_,
        store=store,
        temporary=temporary,
        guardian=None if temporary is None else FolderGuardian(temporary, lock_file=layout.lock),
    )
    return publication, initial


def store_host(transport: str, engines_host: str, environment: Mapping[str, str], *, one_host: bool) -> str:
    """Where the store listens at which ranks, and engines with transport nccl, meet: at one address, for all of them.

    `engines_host` is the one that was configured for engines; ranks on other hosts cannot reach a loopback address.
    """
    if transport != Transport.NCCL.value:
        return LOCALHOST  # only ranks of one host share files
    if one_host or not is_loopback(engines_host):
        return engines_host
    return environment.get("MASTER_ADDR", engines_host)


def _temporary(settings: PublicationSettings, config: TrainerConfig) -> Path | None:
    folder = shm_folder(config.output_dir)
    return folder if Path(settings.folder) == folder else None


def _publisher(
    settings: PublicationSettings,
    config: TrainerConfig,
    parts: TrainerParts,
    client: WeightSyncClient,
    exit_: GatherExit | FileExit | GroupExit,
    crew_store: Store | None,
    store: Store | None,
) -> AnyPublisher:
    senders = num_senders(parts.parallel)
    if isinstance(exit_, GroupExit):
        assert store is not None, "the engines meet the trainer at its store"
        return CollectivePublisher(
            client,
            Crew(exit_.worker, crew_store, size=senders),
            exit_.rows,
            store,
            run_id=config.run_id,
            epoch=settings.epoch,
            backend=settings.backend,
            store_address=settings.store_address,
            transfer_deadline_s=settings.deadline_s,
        )
    if isinstance(exit_, FileExit):
        return FilePublisher(
            client,
            Crew(exit_.worker, crew_store, size=senders),
            exit_.worker,
            run_id=config.run_id,
            epoch=settings.epoch,
            stall_s=config.publish_deadline_s,
        )
    return Publisher(
        client,
        run_id=config.run_id,
        epoch=settings.epoch,
        transport=Transport(settings.transport),
        broadcast_dir=Path(settings.folder),
        chunk_bytes=settings.chunk_bytes,
        adapter=_adapter(config, parts) if settings.adapter_only else None,
        num_threads=settings.num_threads,
    )


def _adapter(config: TrainerConfig, parts: TrainerParts) -> Adapter:
    return Adapter(
        config=peft.config_of(adapter_config(parts.learner.model, config.model.name)),
        base_layout=Rows.of(parts.learner.model, parts.compute_dtype, num_senders=1, bucket_bytes=1).layout,
    )
