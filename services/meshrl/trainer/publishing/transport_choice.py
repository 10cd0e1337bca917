"""Decides how versions leave the trainer, by the configuration and the hub's engines."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.client.private import private_folder
from meshrl.core.private_folders import SHM, SHM_VERSIONS, versions_folder
from meshrl.wire.errors import MeshError
from meshrl.wire.types import EngineInfo, Transport

LOOPBACK = ("127.", "localhost", "[::1]", "unix:")
LOOK_S = 0.1  # the run begins only after a look that finds an engine


def choose(
    configured: str, engines: Sequence[EngineInfo], *, on_gpu: bool, host: str, adapter_only: bool
) -> tuple[Transport, str]:
    """The transport for a configured type, and why."""
    if configured == "nccl" and adapter_only:
        return Transport.STREAM, "type nccl is for whole weights, and adapters are small"
    if configured != "auto":
        return Transport(configured), "weight_broadcast.type says so"
    if not engines:
        return Transport.FILESYSTEM, "no engine is registered yet"
    offers_nccl = all(
        Transport.NCCL in engine.transports and engine.collective_ranks and engine.collective_backend == "nccl"
        for engine in engines
    )
    if on_gpu and offers_nccl and not adapter_only:
        return Transport.NCCL, f"the trainer and all {len(engines)} engine(s) have GPUs for it"
    elsewhere = [engine.engine_id for engine in engines if engine.host != host]
    if not elsewhere:
        return Transport.FILESYSTEM, f"all {len(engines)} engine(s) are on this host"
    return Transport.STREAM, f"engine {elsewhere[0]} is not on this host"


async def first_engines(client: WeightSyncClient, *, deadline_s: float) -> tuple[EngineInfo, ...]:
    """The engines of the hub, once there is one; none at the deadline."""
    end_s = time.monotonic() + deadline_s
    while True:
        engines = await known_engines(client)
        if engines or time.monotonic() >= end_s:
            return engines
        await asyncio.sleep(min(LOOK_S, deadline_s))


async def known_engines(client: WeightSyncClient) -> tuple[EngineInfo, ...]:
    """The engines of the hub; none while there is no hub."""
    try:
        return await client.list_engines()
    except MeshError as error:  # programs start in any order
        if not error.retryable:
            raise
        return ()


def files_folder(
    configured: str | None,
    output_dir: Path,
    on_disk: Path,
    *,
    hub_address: str,
    engines: Sequence[EngineInfo],
    host: str,
    one_host: bool,
    version_bytes: int,
) -> Path:
    """Folder for the files of versions; logs the reason. `one_host`: all ranks of the trainer are on it."""
    if configured is not None:
        logger.info("files of versions go to {} (weight_broadcast.broadcast_dir)", configured)
        return Path(configured)
    obstacle = None
    if not hub_address.startswith(LOOPBACK):  # it gives the bytes to engines that cannot read the files
        obstacle = f"the hub at {hub_address} may be on another host"
    elif not one_host or any(engine.host != host for engine in engines):
        obstacle = "not everybody is on this host"
    elif not SHM.is_dir():
        obstacle = "there is no /dev/shm"
    elif (free := shutil.disk_usage(SHM).free) < SHM_VERSIONS * version_bytes:
        obstacle = f"/dev/shm has {free} bytes free, {SHM_VERSIONS} versions take {SHM_VERSIONS * version_bytes}"
    if obstacle is not None:
        logger.info("files of versions go to {}: {}", on_disk, obstacle)
        return on_disk
    folder = private_folder(versions_folder(output_dir))
    logger.info("files of versions go to {}: everybody is on this host", folder)
    return folder


def handover_folder(output_dir: Path, on_disk: Path, *, version_bytes: int) -> Path:
    """Folder in which the ranks of one host write the rows that rank 0 streams; logs the reason."""
    room = SHM.is_dir() and shutil.disk_usage(SHM).free >= version_bytes
    folder = private_folder(versions_folder(output_dir)) if room else on_disk
    why = "in memory" if room else f"{SHM} has no room for the {version_bytes} bytes of a version"
    logger.info("the ranks bring rank 0 their rows in {}: {}", folder, why)
    return folder
