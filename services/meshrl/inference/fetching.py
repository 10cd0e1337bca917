"""Brings a version's bytes to this host and checks them, while the engine goes on generating.

From files, when this host sees them; else from the hub in chunks, resumed from the chunks that are already here. Every
chunk is checked against the manifest as it comes, every tensor once all are here: what leaves this module has the
manifest's result root.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Mapping, Sequence

import google_crc32c
import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray

from meshrl.client import WeightSyncClient
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest_file import PayloadReader
from meshrl.wire.types import Manifest, Transport

# Worth asking again: the link or the hub was away, or a chunk was damaged on its way.
_TRANSIENT = frozenset({Reason.UNREACHABLE, Reason.DRAINING, Reason.DEADLINE_PASSED, Reason.CHUNK_CORRUPT})

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


class VersionFetcher:
    """Fetches artifacts through one client. `stall_s`: give up after this long without a new chunk."""

    def __init__(self, client: WeightSyncClient, *, stall_s: float) -> None:
        self._client = client
        self._stall_s = stall_s

    async def fetch(self, manifest: Manifest, artifact_id: str) -> dict[str, torch.Tensor]:
        """Returns the verified tensors by Hugging Face name, as views of one buffer in host memory.

        Raises MeshError: DIGEST_MISMATCH when bytes are not those of the manifest; CHUNK_CORRUPT when a link damages
        every copy; UNKNOWN_VERSION when they are gone; UNREACHABLE when nothing came for `stall_s`.
        """
        buffer: NDArray[np.uint8] = np.empty(manifest.num_bytes, dtype=np.uint8)
        missing = set(range(len(manifest.chunks)))
        if manifest.transport is Transport.FILESYSTEM:
            await _read_off_loop(manifest, buffer, missing)
        if missing:
            await self._stream(manifest, artifact_id, buffer, missing)
        wrong = await asyncio.to_thread(manifests.wrong_tensor, manifest, buffer.data)
        if wrong is not None:
            text = f"tensor {wrong!r} of version {manifest.version} is not what its manifest says"
            raise MeshError(Reason.DIGEST_MISMATCH, text)
        return _tensors(manifest, buffer)

    async def _stream(self, manifest: Manifest, artifact_id: str, buffer: NDArray[np.uint8], missing: set[int]) -> None:
        loop = asyncio.get_running_loop()
        progress_s, wait_s = loop.time(), 0.1
        while missing:
            before = len(missing)
            try:
                async with asyncio.timeout(self._stall_s) as patience:
                    await self._stream_once(manifest, artifact_id, buffer, missing, patience)
            except TimeoutError:
                error = MeshError(Reason.UNREACHABLE, f"no chunk of the version came for {self._stall_s:g} s")
            except MeshError as failure:
                error = failure
            else:
                continue
            now_s = loop.time()
            if len(missing) < before:
                progress_s, wait_s = now_s, 0.1
            if error.reason not in _TRANSIENT or now_s - progress_s >= self._stall_s:
                raise error
            logger.warning("fetch of version {} resumes, {} chunks missing: {}", manifest.version, len(missing), error)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, 2.0)

    async def _stream_once(
        self,
        manifest: Manifest,
        artifact_id: str,
        buffer: NDArray[np.uint8],
        missing: set[int],
        patience: asyncio.Timeout,
    ) -> None:
        loop = asyncio.get_running_loop()
        order = sorted(missing)
        filled = 0  # bytes of the chunk at order[0] that have arrived
        ranges = _ranges(manifest, order)
        async for piece in self._client.fetch(artifact_id, ranges):
            patience.reschedule(loop.time() + self._stall_s)
            data = np.frombuffer(piece.data, dtype=np.uint8)  # the checksum takes no memoryview
            if google_crc32c.value(data) != piece.crc32c:
                raise MeshError(Reason.CHUNK_CORRUPT, f"bytes at {piece.offset} do not match their CRC32C")
            chunk = manifest.chunks[order[0]] if order else None
            if chunk is None or piece.offset != chunk.offset + filled or filled + len(data) > chunk.length:
                raise MeshError(Reason.CHUNK_CORRUPT, f"bytes at {piece.offset} are not those that were asked for")
            filled += len(data)
            buffer[piece.offset : piece.offset + len(data)] = data
            if filled == chunk.length:
                if not await asyncio.to_thread(_sound, manifest, order[0], buffer):
                    raise _mismatch(manifest, order[0])
                missing.discard(order.pop(0))
                filled = 0
        if order:
            raise MeshError(Reason.UNREACHABLE, f"the hub ended the stream with {len(order)} chunks to go")


def _ranges(manifest: Manifest, indices: Sequence[int]) -> list[tuple[int, int]]:
    """Joins neighbouring chunks into (offset, length)."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        chunk = manifest.chunks[index]
        if ranges and sum(ranges[-1]) == chunk.offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + chunk.length)
        else:
            ranges.append((chunk.offset, chunk.length))
    return ranges


def _sound(manifest: Manifest, index: int, buffer: NDArray[np.uint8]) -> bool:
    chunk = manifest.chunks[index]
    return manifests.digest(buffer.data[chunk.offset : chunk.offset + chunk.length]) == chunk.digest


def _mismatch(manifest: Manifest, index: int) -> MeshError:
    where = manifest.chunks[index].offset
    return MeshError(
        Reason.DIGEST_MISMATCH,
        f"the chunk at byte {where} of version {manifest.version} is not what its manifest says; it was not applied",
    )


async def _read_off_loop(manifest: Manifest, buffer: NDArray[np.uint8], missing: set[int]) -> None:
    """Runs `_read_files` off the loop; a cancelled fetch makes it stop at the next chunk."""
    stop = threading.Event()
    try:
        await asyncio.to_thread(_read_files, manifest, buffer, missing, stop)
    finally:
        stop.set()


def _read_files(manifest: Manifest, buffer: NDArray[np.uint8], missing: set[int], stop: threading.Event) -> None:
    try:
        reader = PayloadReader(manifest.files)
    except OSError as error:  # another host, or retired meanwhile: the hub is asked for the bytes instead
        logger.info("files of version {} cannot be read here ({}); asking the hub", manifest.version, error)
        return
    with reader:
        for index, chunk in enumerate(manifest.chunks):
            if stop.is_set():
                return
            view = buffer.data[chunk.offset : chunk.offset + chunk.length]
            for _ in range(2):  # read again once: the first try may have met a cache that was behind
                try:
                    reader.read_into(chunk.offset, view)
                except OSError as error:
                    raise MeshError(Reason.DIGEST_MISMATCH, f"a file of the version is cut short: {error}") from error
                if _sound(manifest, index, buffer):
                    missing.discard(index)
                    break
            else:
                raise _mismatch(manifest, index)


def _tensors(manifest: Manifest, buffer: NDArray[np.uint8]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for entry in manifest.tensors:
        dtype = TORCH_DTYPES[entry.dtype]
        if entry.num_bytes == 0:
            tensors[entry.name] = torch.empty(entry.shape, dtype=dtype)
            continue
        count = entry.num_bytes // manifests.ITEM_BYTES[entry.dtype]
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=entry.offset)
        tensors[entry.name] = flat.reshape(entry.shape)
    return tensors
