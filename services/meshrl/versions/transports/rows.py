"""What the transports through the host share: each rank's rows of a version, and versions that leave as deltas.

Where all ranks are on one host, each contributes its own rows, and pieces of a delta go to rank 0 through files in
shared memory. Else rank 0 has gathered all weights, and its share is the only one.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from loguru import logger

from meshrl.versions.deltas.codec import joined, read_stream, write_stream
from meshrl.versions.deltas.rule import DeltaRule
from meshrl.versions.snapshot import Captured, Snapshot, whole_snapshot
from meshrl.versions.transports.base import Answer, Prepared, PublishCall, VersionCall, VersionLine
from meshrl.versions.transports.rank_calls import RankCalls
from meshrl.versions.transports.shares import EncodeRows, SenderShare, SetBase, digested, pays
from meshrl.versions.uploads import TODAY, Peers
from meshrl.wire.manifest import DEFAULT_CHUNK_BYTES, SUM128, chunks_of, delta_manifest
from meshrl.wire.types import Manifest, TensorEntry, Transport, VersionKind, capabilities

SLICE_BYTES = 32 * 2**20  # of one write; a multiple of the page size

Item = TypeVar("Item")
Result = TypeVar("Result")


class WriteDelta(VersionCall):
    """Write the last delta into a file for rank 0."""


def in_slices(pieces: Iterable[tuple[int, memoryview]]) -> list[tuple[int, memoryview]]:
    """Cuts (offset, bytes) into slices of at most SLICE_BYTES, for several threads."""
    return [
        (offset + start, data[start : start + SLICE_BYTES])
        for offset, data in pieces
        for start in range(0, len(data), SLICE_BYTES)
    ]


def in_threads(threads: ThreadPoolExecutor, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Applies `work` to each item on the threads. When one fails, those that have begun are over before this raises."""
    futures = [threads.submit(work, item) for item in items]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:  # after a failure nobody may use the files or the buffer any more
            if not future.cancel():
                future.exception()


class RowShare(SenderShare):
    """Share `share` of `num_shares`, whose files are in `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        epoch: int,
        share: int = 0,
        num_shares: int = 1,
        num_threads: int = 1,
        deadline_s: float = 60.0,
    ) -> None:
        super().__init__(deadline_s=deadline_s, num_threads=num_threads)
        self.folder = folder.absolute()
        self.epoch, self.share, self.num_shares, self.num_threads = epoch, share, num_shares, num_threads

    @property
    def handlers(self) -> Mapping[type[PublishCall], Callable[[Any], Answer]]:
        return {**super().handlers, WriteDelta: self._write_delta}

    def _write_delta(self, call: WriteDelta) -> Answer:
        if self.share:
            self.delta_path(self.share).write_bytes(write_stream(self.base.pieces).data)
        return {}

    def pieces_of(self, snapshot: Snapshot) -> list[tuple[int, memoryview]]:
        """(offset in the version's byte stream, bytes) as of `bytes_of`."""
        data = self.bytes_of(snapshot).data
        pieces = snapshot.plan.pieces(snapshot.sender)
        return [(offset, data[piece.place]) for (offset, _), piece in zip(snapshot.spans, pieces, strict=True)]

    def delta_path(self, share: int) -> Path:
        return self.folder / f"delta-{self.epoch}.{share}"

    def tensors_of(self, version: int) -> tuple[TensorEntry, ...]:
        return self.held.get(version, deadline_s=self.deadline_s).tensors


ShareT = TypeVar("ShareT", bound=RowShare)
Made = TypeVar("Made")


class RowTransport(ABC, Generic[ShareT]):
    """Rank 0's side: decides between a delta and a full version (`_full`), and joins the ranks' contributions.

    It makes deltas only for hubs with the capabilities `deltas_need`.
    """

    deltas_need: ClassVar[Collection[str]] = ()

    def __init__(
        self,
        line: VersionLine,
        ranks: RankCalls,
        share: ShareT,
        *,
        num_shares: int = 1,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        num_threads: int = 1,
        anchor_every: int | None = None,
        stall_s: float = 60.0,
    ) -> None:
        """`share` is rank 0's own of `num_shares`; `stall_s`: how long a rank may do nothing of its share.

        `anchor_every`: a version in full after so many deltas, None: no deltas.
        """
        self.progress = share.progress
        self._line, self._ranks, self._share = line, ranks, share
        self._num_shares, self._chunk_bytes, self._stall_s = num_shares, chunk_bytes, stall_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="version-bytes")
        self._rule = None if anchor_every is None else DeltaRule(anchor_every=anchor_every)
        self._gathered: Mapping[str, torch.Tensor] | None = None  # those that rank 0's share holds
        self._tensors: tuple[TensorEntry, ...] = ()  # of the version that is prepared, without digests
        self._digested: tuple[TensorEntry, ...] = ()  # the same with digests, where deltas are on
        self._made: Prepared | None = None

    async def prepare(self, version: int, captured: Captured, peers: Peers = TODAY) -> Prepared:
        """A delta that is asked for again before it was delivered becomes a full version: the hub has refused it."""
        return await asyncio.to_thread(self._prepare, version, captured.gathered, peers)

    async def deliver(self, version: int) -> Mapping[str, float]:
        """The ranks keep the version as the base of the next one; engines fetch it from the hub."""
        made, self._made, self._gathered = self._made, None, None
        if self._rule is None or made is None:
            return {}
        began_s = time.monotonic()
        self._rule.delivered(made.manifest, made.in_full)
        await asyncio.to_thread(self._ranks.call, SetBase(version=version), stall_s=self._stall_s)
        return {"keep": time.monotonic() - began_s}

    async def close(self) -> None:
        self._threads.shutdown(wait=False)
        self._share.close()

    def _prepare(self, version: int, gathered: Mapping[str, torch.Tensor] | None, peers: Peers) -> Prepared:
        began_s = time.monotonic()
        if gathered is not None and gathered is not self._gathered:
            self._gathered, self._made = gathered, None
            self._share.held.put(version, whole_snapshot(gathered, self._share.release_snapshot()))
            self.progress.moved()
        again = self._made is not None and self._made.manifest.version == version
        if self._made is None or not again or self._made.manifest.kind is VersionKind.DELTA:
            self._tensors = self._share.tensors_of(version)
            lacking = [name for name in self.deltas_need if name not in peers.hub]
            if self._rule is not None and lacking:
                text = "versions leave in full: the hub lacks the capability {}; start it from the trainer's release"
                logger.warning(text, " and ".join(lacking))
                self._rule = None
            base, goes_as_delta = None, False
            if self._rule is not None and not again:
                sparse = peers.engines_can(capabilities.SPARSE_DELTAS)
                base = self._rule.base_of(version, self._tensors, sparse=sparse)
                goes_as_delta = self._encode(self._rule, version, base, sparse=sparse)
            encoded_s = time.monotonic()
            self._made = None  # and with it the last one's bytes
            made = self._delta(version, base) if base and goes_as_delta else self._full(version)
            parts_s = {"encode": encoded_s - began_s, "write": time.monotonic() - encoded_s}
            self._made = replace(made, parts_s=parts_s)
        return self._made

    def _encode(self, rule: DeltaRule, version: int, base: Manifest | None, *, sparse: bool) -> bool:
        call = EncodeRows(version=version, base=None if base is None else base.version, sparse=sparse)
        answers = self._ranks.call(call, stall_s=self._stall_s)
        self._digested = digested(self._tensors, answers)
        num_bytes = sum(tensor.num_bytes for tensor in self._tensors)
        return base is not None and pays(rule, version, answers, num_bytes)

    def _delta(self, version: int, base: Manifest) -> Prepared:
        parts = [self._share.base.pieces]
        if self._num_shares > 1:
            self._share.folder.mkdir(parents=True, exist_ok=True)
            self._ranks.call(WriteDelta(version=version), stall_s=self._stall_s)
            for share in range(1, self._num_shares):
                path = self._share.delta_path(share)
                parts.append(read_stream(np.frombuffer(path.read_bytes(), dtype=np.uint8)))
                path.unlink()
        payload = joined(parts)
        in_full = self._line.manifest(version, Transport.STREAM, self._digested, digest_algorithm=SUM128)
        manifest = delta_manifest(base, in_full, chunks_of(payload.data, self._chunk_bytes, each=self._each))
        return Prepared(manifest=manifest, in_full=in_full, buffer=payload)

    @abstractmethod
    def _full(self, version: int) -> Prepared:
        """The version in full."""

    def _each(self, digest: Callable[[tuple[int, int]], Made], spans: Iterable[tuple[int, int]]) -> Iterable[Made]:
        for found in self._threads.map(digest, spans):
            self.progress.moved()
            yield found
