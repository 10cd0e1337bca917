"""The stream transport: a version's bytes go through the hub, from a buffer on rank 0, and engines fetch them there.

Where all ranks are on one host, each contributes its own rows; else rank 0 has gathered them all, and its share is the
only one. Where deltas are on, the ranks' shares list the changes and `DeltaRule` decides what leaves.
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

from meshrl.versions.deltas.codec import Packed, read_stream, write_stream
from meshrl.versions.deltas.digests import with_lanes
from meshrl.versions.deltas.rule import DeltaRule
from meshrl.versions.snapshot import Captured, GatheredWeights
from meshrl.versions.transports.base import AllRanks, Answer, Prepared, VersionLine
from meshrl.versions.transports.stream_share import EncodeRows, SetBase, StreamShare, WriteDelta, WriteRows
from meshrl.wire.manifest import DEFAULT_CHUNK_BYTES, SUM128, chunks_of, delta_manifest, entries_of
from meshrl.wire.types import Manifest, TensorEntry, Transport, VersionKind

Made = TypeVar("Made")


class StreamTransport:
    """Rank 0's side: decides between a delta and a full version, joins what the ranks contribute, and hashes it."""

    def __init__(
        self,
        line: VersionLine,
        ranks: AllRanks,
        share: StreamShare,
        *,
        num_shares: int = 1,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        num_threads: int = 1,
        anchor_every: int | None = None,
        stall_s: float = 60.0,
    ) -> None:
        """`share` is rank 0's own of `num_shares`; `stall_s`: how long a rank may do nothing of its share.

        `anchor_every`: publish deltas where they pay, and a version in full after so many; None: no deltas.
        """
        self.progress = share.progress
        self._line, self._ranks, self._share = line, ranks, share
        self._num_shares, self._chunk_bytes, self._stall_s = num_shares, chunk_bytes, stall_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="version-stream")
        self._rule = None if anchor_every is None else DeltaRule(anchor_every=anchor_every)
        self._gathered: GatheredWeights | None = None  # those that rank 0's share holds
        self._tensors: tuple[TensorEntry, ...] = ()  # of the version that is prepared, without digests
        self._digested: tuple[TensorEntry, ...] = ()  # the same with digests, where deltas are on
        self._made: Prepared | None = None

    async def prepare(self, version: int, captured: Captured) -> Prepared:
        """Collects the version's bytes, or those of its delta, from the ranks; they are the `buffer` for the hub.

        A delta that is asked for again before it was delivered becomes a full version: the hub has refused it.
        """
        return await asyncio.to_thread(self._prepare, version, captured.gathered)

    async def deliver(self, version: int) -> Mapping[str, float]:
        """Engines fetch the version from the hub; the ranks keep it, to make the next version's delta from."""
        made, self._made, self._gathered = self._made, None, None
        if self._rule is None or made is None:
            return {}
        began_s = time.monotonic()
        self._rule.delivered(version)
        await asyncio.to_thread(self._ranks.call, SetBase(version=version), stall_s=self._stall_s)
        return {"keep": time.monotonic() - began_s}

    async def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(wait=False)
        self._share.close()

    def _prepare(self, version: int, gathered: GatheredWeights | None) -> Prepared:
        began_s = time.monotonic()
        if gathered is not None and gathered is not self._gathered:
            self._gathered, self._made = gathered, None
            self._share.held.put(version, gathered.snapshot(self._share.release_snapshot()))
            self.progress.moved()
        again = self._made is not None and self._made.manifest.version == version
        if self._made is None or not again or self._made.manifest.kind is VersionKind.DELTA:
            self._tensors = self._share.tensors_of(version)
            base = None if self._rule is None else self._rule.base_of(version, self._tensors)
            goes_as_delta = False
            if self._rule is not None and not again:
                goes_as_delta = self._encode(self._rule, version, base)
            encoded_s = time.monotonic()
            self._made = None  # and with it the last one's bytes
            manifest, payload = self._delta(version, base) if base and goes_as_delta else self._full(version)
            parts_s = {"encode": encoded_s - began_s, "write": time.monotonic() - encoded_s}
            self._made = Prepared(manifest=manifest, buffer=payload, parts_s=parts_s)
        return self._made

    def _encode(self, rule: DeltaRule, version: int, base: Manifest | None) -> bool:
        """Has the ranks digest their rows and encode what changed; returns whether that is what leaves."""
        call = EncodeRows(version=version, base=None if base is None else base.version)
        answers = self._ranks.call(call, stall_s=self._stall_s)
        lanes = np.zeros((len(self._tensors), 2), dtype=np.uint64)
        for answer in answers:
            lanes += np.frombuffer(bytes.fromhex(answer["digests"]["lanes"]), dtype="<u8").reshape(-1, 2)
        self._digested = with_lanes(self._tensors, lanes)
        return base is not None and rule.pays(
            version,
            delta_bytes=_total(answers, "delta"),
            changed_bytes=_total(answers, "changed"),
            num_bytes=sum(tensor.num_bytes for tensor in self._tensors),
        )

    def _delta(self, version: int, base: Manifest) -> tuple[Manifest, NDArray[np.uint8]]:
        """Joins the ranks' pieces in the order of the stream."""
        assert self._rule is not None, "deltas are on"
        pieces: list[Packed] = list(self._share.pieces)
        if self._num_shares > 1:
            self._share.full_path.parent.mkdir(parents=True, exist_ok=True)
            self._ranks.call(WriteDelta(version=version), stall_s=self._stall_s)
            for share in range(1, self._num_shares):
                path = self._share.delta_path(share)
                pieces += read_stream(np.frombuffer(path.read_bytes(), dtype=np.uint8))
                path.unlink()
            pieces.sort(key=lambda piece: piece.run.start)
        payload = write_stream(pieces)
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
        path, num_bytes = self._share.full_path, sum(tensor.num_bytes for tensor in self._tensors)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with path.open("xb+") as file:
            try:
                if num_bytes:  # room for all of it, now: a write into memory that is full would end the process
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                self._ranks.call(WriteRows(version=version), stall_s=self._stall_s)
                mapped = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ) if num_bytes else b""
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
