"""How fast a version's bytes go through the hub: a publisher, a hub and a receiver, each a process, over loopback.

Usage: bench_hub_bytes.py [--gb GB] [--rounds N] [--folder FOLDER]
Each round sends a version in messages of gRPC and another one as raw bytes. The receiver follows the upload and checks
what it gets, into a file in shared memory, as an engine of other processes does. The hub has two versions at
most: the first two make its files, and the others are written over them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "support"))

from local_ports import free_port
from meshrl.client import WeightSyncClient
from meshrl.core.program import keep_freed_memory
from meshrl.versions import raw_bytes
from meshrl.versions.downloads import Downloader
from meshrl.versions.files import Spool
from meshrl.versions.progress import Progress
from meshrl.versions.sources import LinkLimits
from meshrl.versions.uploads import Uploader
from meshrl.versions.version_bytes import VersionBytes
from meshrl.wire.errors import MeshError
from meshrl.wire.manifest import artifact_id, build_manifest, entries_of
from meshrl.wire.text_table import markdown_table
from meshrl.wire.types import Manifest, TensorEntry, Transport

CHUNK_BYTES = 2**21
DEADLINE_S = 300.0
WAYS = {"gRPC": 2**63, "raw bytes": 0}  # FROM_BYTES


def made(version: int, num_bytes: int) -> tuple[Manifest, Any]:
    payload = np.resize(np.random.default_rng(version).integers(0, 256, 2**24, dtype=np.uint8), num_bytes)
    plan = TensorEntry(name="w", dtype="uint8", shape=(num_bytes,), offset=0, num_bytes=num_bytes, digest=b"")
    tensors, chunks = entries_of(payload.data, [plan], CHUNK_BYTES)
    manifest = build_manifest(
        run_id="run", epoch=1, version=version, transport=Transport.STREAM, tensors=tensors, chunks=chunks
    )
    return manifest, payload


async def publish(address: str, manifest: Manifest, payload: Any) -> float:
    async with WeightSyncClient(address) as client:
        began_s = time.perf_counter()
        await Uploader(client, Progress(), limits=LinkLimits()).stage(manifest, payload)
        return time.perf_counter() - began_s


async def receive(address: str, manifest: Manifest) -> float:
    held = Spool().room_for(manifest, for_writes=True)
    artifact = artifact_id(manifest)
    async with WeightSyncClient(address) as client:
        downloader = Downloader(client, LinkLimits())
        try:
            while not await is_arriving(client, artifact):
                pass  # each call waits for its answer
            began_s = time.perf_counter()
            await downloader.pull(VersionBytes(manifest, file=held.files[0], memory=held.parts[0][1]), artifact)
            return time.perf_counter() - began_s
        finally:
            await downloader.close()
            held.release()


async def abort(address: str, version: int) -> None:
    async with WeightSyncClient(address) as client:
        await client.abort_version(run_id="run", epoch=1, version=version, message="it was measured")


async def is_arriving(client: WeightSyncClient, artifact: str) -> bool:
    with suppress(MeshError):
        await client.find_version(artifact_id=artifact)
        return True
    return False


def work(end: str, address: str, from_bytes: int, version: int, num_bytes: int, ready: Any, found: Any) -> None:
    """In a process of its own."""
    keep_freed_memory()
    raw_bytes.FROM_BYTES = from_bytes
    manifest, payload = made(version, num_bytes)
    if end == "up":
        ready.wait()
        found.put((end, asyncio.run(publish(address, manifest, payload))))
    else:
        del payload
        ready.wait()
        found.put((end, asyncio.run(receive(address, manifest))))


def measured(address: str, from_bytes: int, version: int, num_bytes: int) -> dict[str, float]:
    """Seconds by end."""
    processes = multiprocessing.get_context("spawn")
    ready, found = processes.Barrier(2), processes.Queue()
    ends = [
        processes.Process(target=work, args=(end, address, from_bytes, version, num_bytes, ready, found), daemon=True)
        for end in ("up", "down")
    ]
    for process in ends:
        process.start()
    seconds = dict(found.get(timeout=DEADLINE_S) for _ in ends)
    for process in ends:
        process.join(DEADLINE_S)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="of each version")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="for the hub's files; by default a temporary one")
    args = parser.parse_args()
    num_bytes, port = round(args.gb * 1e9), free_port()
    rates: dict[str, dict[str, list[float]]] = {way: {"up": [], "down": []} for way in WAYS}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        command = [sys.executable, "-m", "meshrl.weights.main", "--output-dir", folder, "--server.port", str(port)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as hub:
            try:
                for version, (_, way) in enumerate(product(range(args.rounds), WAYS)):
                    seconds = measured(f"127.0.0.1:{port}", WAYS[way], version, num_bytes)
                    for end, took_s in seconds.items():
                        rates[way][end].append(args.gb / took_s)
                    print(f"version {version} by {way}: {seconds['up']:.2f} s up, {seconds['down']:.2f} s down")
                    if version:
                        asyncio.run(abort(f"127.0.0.1:{port}", version - 1))
            finally:
                hub.terminate()
    rows = [(way, *(f"{statistics.median(found):.2f}" for found in ends.values())) for way, ends in rates.items()]
    print(markdown_table([("way", "to the hub GB/s", "from it GB/s"), *rows]))


if __name__ == "__main__":
    main()
