"""Programs for the sites of `wan_rig`: a hub that has a version, and a host that fetches it as an agent does.

    wan_peer.py serve HOST:PORT FOLDER MIB         a hub with one version of MIB MiB of random bytes in 2 MiB chunks
    wan_peer.py fetch HUB CONNECTIONS [RELAY ...]  fetches its version and tells how
    wan_peer.py publish HUB CONNECTIONS MIB NUMBER uploads a version of this number and tells how

`serve` says `{"artifact_id": ...}` once it serves, and answers every line with the bytes that left it and the number
of connections over which they did. `fetch` fetches at every line on its stdin, and says what came of it: seconds,
bytes, bytes that came twice, connections. `publish` says how many chunks have left, and at last the seconds that it
took until the hub had sealed it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.serve import GrpcServer
from meshrl.versions.downloads import Downloader
from meshrl.versions.progress import Progress
from meshrl.versions.sources import LinkLimits
from meshrl.versions.uploads import Uploader
from meshrl.versions.version_bytes import VersionBytes, chunk_of
from meshrl.weights.config import WeightsConfig
from meshrl.weights.main import build_hub
from meshrl.weights.service import WeightSyncService
from meshrl.wire import frames
from meshrl.wire import manifest as manifests
from meshrl.wire.types import Chunk, Manifest, TensorEntry, Transport

CHUNK_BYTES = 2 * 2**20


def version_of(data: bytes, version: int = 0) -> Manifest:
    """A version that is these bytes."""
    plans = manifests.plan_tensors([("w", "uint8", (len(data),))])
    entry = TensorEntry(
        name="w",
        dtype="uint8",
        shape=(len(data),),
        offset=plans[0].offset,
        num_bytes=len(data),
        digest=manifests.digest(data),
    )
    return manifests.build_manifest(
        run_id="run", epoch=1, version=version, transport=Transport.STREAM, tensors=(entry,),
        chunks=manifests.chunks_of(memoryview(data), CHUNK_BYTES),
    )  # fmt: skip


async def lines() -> AsyncIterator[str]:
    """The lines on stdin."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield line


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


async def serve(address: str, folder: Path, mib: float) -> None:
    logger.remove()
    host, port = address.split(":")
    server_config = ServerConfig(host=host, port=int(port), insecure=True)
    hub = build_hub(WeightsConfig(server=server_config, output_dir=folder))
    await hub.start()
    server = GrpcServer(server_config)
    sent = 0
    callers: set[str] = set()

    class Counting(WeightSyncService):
        async def Fetch(self, request: Any, context: Any) -> AsyncIterator[bytes]:  # noqa: N802 (an RPC)
            nonlocal sent
            callers.add(context.peer())
            async for message in super().Fetch(request, context):
                sent += len(message)
                yield message

    server.add(frames.SERVICE, frames.add_weight_sync, Counting(hub))
    whole = folder / "payload.bin"
    if not whole.exists():
        whole.write_bytes(os.urandom(int(mib * 2**20)))
    data = whole.read_bytes()
    manifest = version_of(data)

    async def chunks() -> AsyncIterator[Chunk]:
        for chunk in manifest.chunks:
            yield chunk_of(chunk.offset, data[chunk.offset : chunk.offset + chunk.length])

    try:
        staged = await hub.create_version(manifest, chunks())
        await hub.seal_version(run_id="run", epoch=1, version=0, artifact_id=staged.artifact_id, traceparent="")
        await server.start()
        server.set_serving()
        say(artifact_id=staged.artifact_id)
        async for _ in lines():
            say(sent=sent, callers=len(callers))
    finally:
        hub.close_streams()
        await server.drain(0.0)
        await hub.stop()


async def fetch(address: str, connections: int, relays: list[str]) -> None:
    async with WeightSyncClient(address) as hub:
        downloader = Downloader(hub, LinkLimits(connections=connections, stall_s=200.0), relays)
        try:
            await hub.wait_until_serving(60.0)
            manifest, artifact_id = await hub.get_manifest(version=0)
            say(ready=True)
            async for _ in lines():
                held = VersionBytes(manifest, memory=np.empty(manifest.payload_bytes, dtype=np.uint8))
                began_s = time.monotonic()
                fetching = asyncio.create_task(downloader.pull(held, artifact_id))
                while not fetching.done():
                    await asyncio.wait({fetching}, timeout=0.05)
                    say(chunks_left=len(held.missing))
                came = await fetching
                say(
                    seconds=time.monotonic() - began_s, num_bytes=manifest.payload_bytes,
                    again=came - manifest.payload_bytes, connections=downloader.count.count,
                )  # fmt: skip
        finally:
            await downloader.close()


class Sent(Progress):
    """Reports how many chunks have left."""

    count = 0

    def moved(self, *, unseen_s: float = 0.0) -> None:
        self.count += 1
        say(chunks_sent=self.count)


async def publish(address: str, connections: int, mib: float, version: int) -> None:
    data = os.urandom(int(mib * 2**20))
    manifest = version_of(data, version)
    async with WeightSyncClient(address) as hub:
        uploader = Uploader(hub, Sent(), retry_for_s=200.0, limits=LinkLimits(connections=connections))
        try:
            await hub.wait_until_serving(60.0)
            say(ready=True)
            async for _ in lines():
                began_s = time.monotonic()
                staged = await uploader.stage(manifest, np.frombuffer(data, np.uint8))
                await uploader.seal(manifest, staged.artifact_id, "")
                say(seconds=time.monotonic() - began_s, num_bytes=len(data), connections=uploader.connections)
        finally:
            await uploader.close()


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    if what == "serve":
        asyncio.run(serve(where, Path(rest[0]), float(rest[1])))
    elif what == "publish":
        asyncio.run(publish(where, int(rest[0]), float(rest[1]), int(rest[2])))
    else:
        asyncio.run(fetch(where, int(rest[0]), rest[1:]))
