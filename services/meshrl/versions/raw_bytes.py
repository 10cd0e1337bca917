"""Moves the bytes of large versions between a hub nearby and this process over HTTP (raw_port in weights.proto).

The rest goes over gRPC, also after an error here: gRPC's errors have the reason.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from io import BufferedIOBase

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from meshrl.machine.addresses import is_of_this_machine
from meshrl.versions.sources import FAR_S
from meshrl.versions.version_bytes import VersionBytes
from meshrl.wire.errors import MeshError
from meshrl.wire.types import ChunkEntry, Manifest, StagedVersion

FROM_BYTES = 64 * 2**20  # fewer are not worth the connections
CONNECTIONS = 6
RUN_BYTES = 16 * 2**20  # of one request
CONNECT_S = 1.0
SILENT_S = 10.0
HEAD_BYTES = 8192

Run = Sequence[ChunkEntry]
"""Chunks that follow each other."""


async def fetch(hub: str, port: int, held: VersionBytes, artifact_id: str, on_bytes: Callable[[int], object]) -> int:
    """Fills missing chunks; returns how many bytes came. `on_bytes` gets their number as they come."""
    missing = [held.manifest.chunks[index] for index in sorted(held.missing)]
    loop, came = asyncio.get_running_loop(), 0

    def count(num_bytes: int) -> None:
        nonlocal came
        came += num_bytes
        on_bytes(num_bytes)

    def bring(connection: HTTPConnection, run: Run) -> None:
        first, end = run[0].offset, run[-1].offset + run[-1].length
        connection.request("GET", f"/artifacts/{artifact_id}", headers={"Range": f"bytes={first}-{end - 1}"})
        answer = connection.getresponse()
        if answer.status != HTTPStatus.PARTIAL_CONTENT:
            raise HTTPException(f"{answer.status} {answer.reason}")
        room = held.room(first, end)
        for entry in run:  # one is checked while it is in the processor's cache
            data = room[entry.offset - first :][: entry.length]
            receive(connection.sock, answer, data.data)
            held.take(entry, data)
            loop.call_soon_threadsafe(count, entry.length)
        answer.close()

    await _over_connections(hub, port, missing, bring, f"the bytes of version {held.manifest.version} come")
    return came


async def send(
    hub: str, staged: StagedVersion, manifest: Manifest, buffer: NDArray[np.uint8], on_run: Callable[[], object]
) -> bool:
    """Sends what the hub misses; returns whether it has all. `on_run` is called now and then while bytes go."""
    missing = set(staged.missing_offsets)
    loop = asyncio.get_running_loop()

    def bring(connection: HTTPConnection, run: Run) -> None:
        first, end = run[0].offset, run[-1].offset + run[-1].length
        headers = {"Content-Range": f"bytes {first}-{end - 1}/{manifest.payload_bytes}"}
        connection.request("PUT", f"/artifacts/{staged.artifact_id}", body=buffer[first:end].data, headers=headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status != HTTPStatus.NO_CONTENT:
            raise HTTPException(f"{answer.status} {answer.reason}")
        loop.call_soon_threadsafe(on_run)

    chunks = [chunk for chunk in manifest.chunks if chunk.offset in missing]
    return await _over_connections(hub, staged.raw_port, chunks, bring, f"the bytes of version {manifest.version} go")


async def _over_connections(
    hub: str, port: int, chunks: Sequence[ChunkEntry], bring: Callable[[HTTPConnection, Run], None], what: str
) -> bool:
    """Has `bring` move runs of chunks, on a thread for each connection; a connection ends with its first failure.

    Returns whether all moved.
    """
    if hub.startswith("unix:") or sum(chunk.length for chunk in chunks) < FROM_BYTES:
        return False
    host, here = hub.rpartition(":")[0].strip("[]"), is_of_this_machine(hub)
    runs, moved = list(_runs(chunks)), list[Run]()
    queue = deque(runs)
    connections = [HTTPConnection(host, port, timeout=CONNECT_S) for _ in range(CONNECTIONS)]

    def work(connection: HTTPConnection) -> None:
        began_s = time.monotonic()
        try:
            connection.connect()
            if not here and time.monotonic() - began_s > FAR_S:
                raise HTTPException("the hub is far away")
            set_deadline(connection.sock, SILENT_S)
            while True:
                try:
                    run = queue.popleft()
                except IndexError:  # none is left
                    return
                bring(connection, run)
                moved.append(run)
        finally:
            connection.close()

    threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="raw")
    works = [asyncio.get_running_loop().run_in_executor(threads, work, each) for each in connections]
    try:
        await asyncio.wait(works)
    finally:
        queue.clear()
        for connection in connections:
            if (line := connection.sock) is not None:
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
        failures = [end for end in await asyncio.gather(*works, return_exceptions=True) if end is not None]
        threads.shutdown(wait=False)
    for failure in failures:
        if not isinstance(failure, OSError | HTTPException | MeshError):
            raise failure
    if len(moved) < len(runs):
        logger.info("not all {} by {}:{} ({!r}): the rest by gRPC", what, host, port, failures[0])
    return len(moved) == len(runs)


def set_deadline(connection: socket.socket, seconds: float) -> None:
    """For each call that sends or receives, in the kernel: with Python's own deadlines a call returns for each packet,
    and waits for the interpreter's lock."""
    connection.settimeout(None)
    whole_s, part_s = divmod(seconds, 1.0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole_s), round(part_s * 1e6)))


def receive(connection: socket.socket, head: BufferedIOBase, into: memoryview) -> None:
    """Fills `into`; `head` has read from the connection, perhaps too much. Raises OSError, also after the deadline."""
    at = head.readinto1(into[:HEAD_BYTES])
    while at < len(into):
        if (count := connection.recv_into(into[at:], len(into) - at, socket.MSG_WAITALL)) == 0:
            raise ConnectionError("the other side hung up")
        at += count


def _runs(chunks: Iterable[ChunkEntry]) -> Iterator[Run]:
    run: list[ChunkEntry] = []
    for chunk in chunks:
        follows = run and run[-1].offset + run[-1].length == chunk.offset
        if run and (not follows or chunk.offset + chunk.length - run[0].offset > RUN_BYTES):
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run
