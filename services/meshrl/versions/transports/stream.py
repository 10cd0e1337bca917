"""The stream transport: a version's bytes go through the hub, from a buffer on rank 0, and engines fetch them there.

Where all ranks are on one host, each brings its own rows (`RankedStreamTransport`); else rank 0 has gathered them all.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meshrl.versions.deltas.codec import Packed, join, split
from meshrl.versions.deltas.digests import with_lanes
from meshrl.versions.deltas.publishing import DeltaMaker, DeltaRule
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import Captured, GatheredWeights
from meshrl.versions.transports.base import AllRanks, Answer, Prepared, PublishCall, VersionLine
from meshrl.versions.transports.stream_share import StreamShare
from meshrl.versions.transports.version_files import in_threads
from meshrl.wire.manifest import DEFAULT_CHUNK_BYTES, SUM128, chunks_of, delta_manifest, entries_of
from meshrl.wire.types import Manifest, TensorEntry, Transport, VersionKind

Made = TypeVar("Made")


class StreamTransport:
    """Packs gathered weights into one buffer in stream order, and hashes it, or makes a delta of it."""

    def __init__(
        self,
        line: VersionLine,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        num_threads: int = 1,
        anchor_every: int | None = None,
    ) -> None:
        """`anchor_every`: publish deltas where they pay, and a version in full after so many; None: no deltas."""
        self.progress = Progress()
        self._line, self._chunk_bytes = line, chunk_bytes
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="version-stream")
        self._deltas: DeltaMaker | None = None
        if anchor_every is not None:
            self._deltas = DeltaMaker(line, anchor_every=anchor_every, chunk_bytes=chunk_bytes, threads=self._threads)

    async def prepare(self, version: int, captured: Captured) -> Prepared:
        """Packs and hashes the version; the hub is sent the buffer that comes with it.

        A delta that is asked for again before it was delivered becomes a full version: the hub has refused it.
        """
        assert captured.gathered is not None, "a stream is of gathered weights"
        return await asyncio.to_thread(self._pack, version, captured.gathered)

    async def deliver(self, version: int) -> Mapping[str, float]:
        """Nothing is left to do: engines fetch the version from the hub. The next one may lead from it."""
        if self._deltas is not None:
            self._deltas.delivered(version)
        return {}

    async def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(wait=False)

    def _pack(self, version: int, weights: GatheredWeights) -> Prepared:
        began_s = time.monotonic()
        buffer: NDArray[np.uint8] = np.empty(sum(tensor.num_bytes for tensor in weights.tensors), dtype=np.uint8)

        def copy(tensor: TensorEntry) -> None:
            target = buffer[tensor.offset : tensor.offset + tensor.num_bytes]
            target[:] = np.frombuffer(weights.bytes_of(tensor), dtype=np.uint8)
            self.progress.moved()

        def each(digest: Callable[[tuple[int, int]], bytes], spans: Iterable[tuple[int, int]]) -> Iterable[bytes]:
            for found in self._threads.map(digest, spans):
                self.progress.moved()
                yield found

        in_threads(self._threads, copy, weights.tensors)
        if self._deltas is not None:
            made = self._deltas.make(version, weights.tensors, buffer)
            buffer.flags.writeable = False
            self.progress.moved()
            return Prepared(manifest=made.manifest, buffer=made.payload, parts_s={"write": time.monotonic() - began_s})
        tensors, chunks = entries_of(buffer.data, weights.tensors, self._chunk_bytes, each=each)
        buffer.flags.writeable = False
        manifest = self._line.manifest(version, Transport.STREAM, tensors, chunks)
        return Prepared(manifest=manifest, buffer=buffer, parts_s={"write": time.monotonic() - began_s})


class RankedStreamTransport:
    """Rank 0's side where each sender rank brings its own rows: it decides, joins what they bring, and hashes it."""

    def __init__(
        self,
        line: VersionLine,
        ranks: AllRanks,
        share: StreamShare,
        tensors: tuple[TensorEntry, ...],
        *,
        num_shares: int = 1,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        num_threads: int = 1,
        anchor_every: int | None = None,
        stall_s: float = 60.0,
    ) -> None:
        """`share` is rank 0's own of `num_shares`, `tensors` the layout of versions.

        `anchor_every` as for `StreamTransport`; `stall_s`: how long a rank may do nothing of its share.
        """
        self.progress = share.progress
        self._line, self._ranks, self._share, self._tensors = line, ranks, share, tensors
        self._num_shares, self._chunk_bytes, self._stall_s = num_shares, chunk_bytes, stall_s
        self._num_bytes = sum(tensor.num_bytes for tensor in tensors)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="version-stream")
        self._rule = None if anchor_every is None else DeltaRule(anchor_every=anchor_every)
        self._digested: tuple[TensorEntry, ...] = ()  # of the version in `_made`
        self._made: Prepared | None = None

    async def prepare(self, version: int, captured: Captured) -> Prepared:
        """Has the ranks bring the version's bytes; the hub is sent the buffer that comes with it.

        A delta that is asked for again before it was delivered becomes a full version: the hub has refused it.
        """
        assert captured.gathered is None, "the ranks hold their rows themselves"
        return await asyncio.to_thread(self._prepare, version)

    async def deliver(self, version: int) -> Mapping[str, float]:
        """Engines fetch the version from the hub; the ranks keep it, since the next one may lead from it."""
        made, self._made = self._made, None
        if self._rule is None or made is None:
            return {}
        began_s = time.monotonic()
        self._rule.delivered(version)
        await asyncio.to_thread(self._ranks.call, PublishCall(do="keep", version=version), stall_s=self._stall_s)
        return {"keep": time.monotonic() - began_s}

    async def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(wait=False)
        self._share.close()

    def _prepare(self, version: int) -> Prepared:
        again = self._made is not None and self._made.manifest.version == version
        if self._made is None or not again or self._made.manifest.kind is VersionKind.DELTA:
            base = None if self._rule is None else self._rule.base_of(version, self._tensors)
            began_s, brings_delta = time.monotonic(), False
            if self._rule is not None and not again:
                brings_delta = self._encode(self._rule, version, base)
            encoded_s = time.monotonic()
            self._made = None  # and with it the last one's bytes
            manifest, payload = self._delta(version, base) if base and brings_delta else self._full(version)
            parts_s = {"encode": encoded_s - began_s, "write": time.monotonic() - encoded_s}
            self._made = Prepared(manifest=manifest, buffer=payload, parts_s=parts_s)
        return self._made

    def _encode(self, rule: DeltaRule, version: int, base: Manifest | None) -> bool:
        """Has the ranks digest their rows and encode what changed; returns whether that is what leaves."""
        call = PublishCall(do="encode", version=version, base=-1 if base is None else base.version)
        answers = self._ranks.call(call, stall_s=self._stall_s)
        lanes = np.zeros((len(self._tensors), 2), dtype=np.uint64)
        for answer in answers:
            lanes += np.frombuffer(bytes.fromhex(answer["digests"]["lanes"]), dtype="<u8").reshape(-1, 2)
        self._digested = with_lanes(self._tensors, lanes)
        return base is not None and rule.pays(
            version,
            delta_bytes=_total(answers, "delta"),
            changed_bytes=_total(answers, "changed"),
            num_bytes=self._num_bytes,
        )

    def _delta(self, version: int, base: Manifest) -> tuple[Manifest, NDArray[np.uint8]]:
        """Joins the ranks' pieces in the order of the stream."""
        assert self._rule is not None, "deltas are on"
        pieces: list[Packed] = list(self._share.pieces)
        if self._num_shares > 1:
            self._share.full_path.parent.mkdir(parents=True, exist_ok=True)
            self._ranks.call(PublishCall(do="hand", version=version), stall_s=self._stall_s)
            for share in range(1, self._num_shares):
                path = self._share.delta_path(share)
                pieces += split(np.frombuffer(path.read_bytes(), dtype=np.uint8))
                path.unlink()
            pieces.sort(key=lambda piece: piece.run.start)
        payload = join(pieces)
        full = self._line.manifest(version, Transport.STREAM, self._digested, digest_algorithm=SUM128)
        manifest = delta_manifest(base, full, chunks_of(payload.data, self._chunk_bytes, each=self._each))
        self._rule.made(manifest, full)
        return manifest, payload

    def _full(self, version: int) -> tuple[Manifest, NDArray[np.uint8]]:
        payload = self._share.on_host(version) if self._num_shares == 1 else self._written(version)
        if self._rule is None:
            tensors, chunks = entries_of(payload.data, self._tensors, self._chunk_bytes, each=self._each)
            return self._line.manifest(version, Transport.STREAM, tensors, chunks), payload
        chunks = chunks_of(payload.data, self._chunk_bytes, each=self._each)
        manifest = self._line.manifest(version, Transport.STREAM, self._digested, chunks, digest_algorithm=SUM128)
        self._rule.made(manifest, manifest)
        return manifest, payload

    def _written(self, version: int) -> NDArray[np.uint8]:
        """The version's bytes, which all ranks have written into one file; it goes with the last use of them."""
        path = self._share.full_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with path.open("xb+") as file:
            try:
                if self._num_bytes:  # room for all of it, now: a write into memory that is full would end the process
                    os.posix_fallocate(file.fileno(), 0, self._num_bytes)
                self._ranks.call(PublishCall(do="write", version=version), stall_s=self._stall_s)
                mapped = mmap.mmap(file.fileno(), self._num_bytes, access=mmap.ACCESS_READ) if self._num_bytes else b""
            finally:
                path.unlink()
        return np.frombuffer(mapped, dtype=np.uint8)

    def _each(self, digest: Callable[[tuple[int, int]], Made], spans: Iterable[tuple[int, int]]) -> Iterable[Made]:
        for found in self._threads.map(digest, spans):
            self.progress.moved()
            yield found


def _total(answers: Sequence[Answer], name: str) -> int:
    """The sum over ranks of a number of bytes that each has answered."""
    return sum(int(answer["bytes"][name]) for answer in answers)
