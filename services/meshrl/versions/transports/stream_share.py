"""One sender rank's share of the stream transport: encodes the delta of its own rows, or writes them out in full.

Carries out the calls of rank 0's `StreamTransport`. Between two versions it keeps its rows of the version published
last, the base of the next delta: on the GPU where they are small beside its memory, else in host memory. Nothing is
gathered over the ranks' collectives: pieces of a delta, or the rows of a full version, go to rank 0 through files in
shared memory, and from rank 0's own share directly.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray

from meshrl.core.durable import write_at
from meshrl.versions.collective.digest import sum128
from meshrl.versions.deltas.codec import Packed, Rows, encode, stream_bytes, write_stream
from meshrl.versions.deltas.digests import Lanes, edits_of, lanes_after
from meshrl.versions.deltas.on_device import encode_on_device
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import HeldSnapshot, HostCopies, SideStream, Snapshot
from meshrl.versions.transports.base import Answer, PublishCall
from meshrl.versions.transports.filesystem import in_slices, in_threads
from meshrl.wire.types import TensorEntry

KEPT_ON_GPU_BELOW = 1 / 16
"""Rows of the version published last stay on the GPU where they take less of its memory: training states take eight
times as much, or more."""
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class EncodeRows(PublishCall):
    """Digest the rank's rows of a version and encode what changed in them since `base`; None: no delta is wanted."""

    version: int
    base: int | None


@dataclass(frozen=True, kw_only=True)
class WriteDelta(PublishCall):
    """Write what was encoded last into a file for rank 0."""

    version: int


@dataclass(frozen=True, kw_only=True)
class WriteRows(PublishCall):
    """Write the rank's rows of a version into the file of the version in full."""

    version: int


@dataclass(frozen=True, kw_only=True)
class SetBase(PublishCall):
    """The version was published: the next delta is from it."""

    version: int


class StreamShare:
    """One rank's share of streamed versions."""

    calls = (EncodeRows, WriteDelta, WriteRows, SetBase)

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
        """This is share `share` of `num_shares`; `deadline_s`: how long its training may lag behind rank 0's."""
        self.held: HeldSnapshot[Snapshot] = HeldSnapshot()
        self.progress = Progress()
        self.pieces: list[Packed] = []  # of the version encoded last
        self._folder, self._epoch = folder.absolute(), epoch
        self._share, self._num_shares, self._deadline_s = share, num_shares, deadline_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="version-stream")
        self._rows: Rows | None = None
        self._host_copies = HostCopies()
        self._side = SideStream()
        self._spare: torch.Tensor | None = None  # for the next snapshot
        self._base: torch.Tensor | None = None  # the rows published last
        self._base_version, self._base_lanes = -1, np.zeros((0, 2), dtype=np.uint64)
        self._lanes: Lanes = self._base_lanes  # of the version encoded last

    def release_snapshot(self) -> torch.Tensor | None:
        """Drops the last snapshot, since the training thread makes the next; returns a free buffer, if any."""
        last, spare = self.held.drop(), self._spare
        self._spare = None
        if last is not None and spare is None and last.flat is not self._base:
            spare = last.flat
        return spare

    def carry_out(self, call: EncodeRows | WriteDelta | WriteRows | SetBase) -> Answer:
        """Encodes or writes this rank's rows of a version, or makes them the base. Raises MeshError, OSError."""
        snapshot = self.held.get(call.version, deadline_s=self._deadline_s)
        with self._side.reading(snapshot):
            match call:
                case EncodeRows():
                    return self._encode(snapshot, call.base)
                case WriteDelta():
                    if self._share:
                        self.delta_path(self._share).write_bytes(write_stream(self.pieces).data)
                case WriteRows():
                    self._write(snapshot)
                case SetBase():
                    self._set_base(snapshot, call.version)
        return {}

    def delta_path(self, share: int) -> Path:
        """The file of a share's pieces."""
        return self._folder / f"delta-{self._epoch}.{share}"

    @property
    def full_path(self) -> Path:
        """The file of a version in full; rank 0 makes it."""
        return self._folder / f"full-{self._epoch}"

    def tensors_of(self, version: int) -> tuple[TensorEntry, ...]:
        """The tensors of a version that this rank holds, without digests."""
        return self.held.get(version, deadline_s=self._deadline_s).tensors

    def on_host(self, version: int) -> Bytes:
        """This rank's rows of a version in host memory."""
        return self._host_copies.bytes_of(self.held.get(version, deadline_s=self._deadline_s))

    def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(wait=False)

    def _encode(self, snapshot: Snapshot, base_version: int | None) -> Answer:
        """Makes the pieces of a delta from the base, where it is `base_version`, and the digests of the rows.

        Answers the digests, and the bytes of the delta: those of the full version where this rank has no base.
        """
        rows = self._rows = self._rows or Rows(snapshot.tensors, snapshot.spans)
        self.pieces = []
        has_base = self._base is not None and base_version == self._base_version
        if has_base and snapshot.ready is None:
            assert self._base is not None, "there is a base"
            old, new = self._base.numpy(), snapshot.flat.numpy()
            pairs = encode(rows, old, new, self._threads, self.progress.moved)
            self.pieces = [packed for _, packed in pairs]
            edits = edits_of([found for found, _ in pairs], rows, old, new)
            take = lambda at: old[rows.place(at)]  # noqa: E731  # it has one use
            self._lanes = lanes_after(snapshot.tensors, self._base_lanes, take, edits, self._threads)
        else:
            self._lanes = self._digests(snapshot)
            if has_base:
                assert self._base is not None, "there is a base"
                has_base = self._encode_on_gpu(rows, self._base, snapshot.flat)
        changed = sum(piece.changed * piece.run.width for piece in self.pieces)
        whole = sum(tensor.num_bytes for tensor in snapshot.tensors)  # which is larger than any delta that pays
        size = stream_bytes(self.pieces) if has_base else whole
        self.progress.moved()
        return {
            "bytes": {"delta": str(size), "changed": str(changed)},
            "digests": {"lanes": self._lanes.astype("<u8").tobytes().hex()},
        }

    def _encode_on_gpu(self, rows: Rows, old: torch.Tensor, new: torch.Tensor) -> bool:
        try:
            self.pieces = encode_on_device(rows, old, new, self._threads)
        except torch.OutOfMemoryError as error:  # training needs it: a version in full needs none
            logger.warning("no room on {} to make a delta, the version goes in full: {}", new.device, error)
            return False
        return True

    def _digests(self, snapshot: Snapshot) -> Lanes:
        """(T, 2) digests of this rank's rows of each tensor, made where they are."""
        at, pieces = 0, []
        for bucket in snapshot.buckets:
            for piece in bucket.pieces[snapshot.sender]:
                size = piece.end - piece.start
                pieces.append((piece.tensor, piece.start // 2, snapshot.flat[at : at + size]))
                at += size

        def digest(piece: tuple[int, int, torch.Tensor]) -> torch.Tensor:
            found = sum128(piece[2], piece[1])
            self.progress.moved()
            return found

        on_gpu = snapshot.ready is not None
        found = list(map(digest, pieces)) if on_gpu else in_threads(self._threads, digest, pieces)
        lanes = torch.zeros((len(snapshot.tensors), 2), dtype=torch.int64)
        if pieces:
            lanes[[tensor for tensor, _, _ in pieces]] = torch.stack(found).cpu()
        return lanes.numpy().view(np.uint64)

    def _write(self, snapshot: Snapshot) -> None:
        """Writes this rank's rows where they belong in the file of the version in full."""
        pieces = self._host_copies.pieces_of(snapshot)
        fd = os.open(self.full_path, os.O_WRONLY | os.O_CLOEXEC)

        def put(piece: tuple[int, memoryview]) -> None:
            offset, data = piece
            write_at(fd, data, offset)
            self.progress.moved()

        try:
            in_threads(self._threads, put, in_slices(pieces))
        finally:
            os.close(fd)

    def _set_base(self, snapshot: Snapshot, version: int) -> None:
        """The version was published: the next delta is from it."""
        self.pieces = []
        self._base_version, self._base_lanes = version, self._lanes
        former, flat = self._base, snapshot.flat
        if snapshot.ready is None or self._stays_on_gpu(flat):
            self._base, self._spare = flat, former
            return
        if former is None:
            former = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
        former.copy_(flat)
        self._base, self._spare = former, flat

    def _stays_on_gpu(self, flat: torch.Tensor) -> bool:
        total = torch.cuda.get_device_properties(flat.device).total_memory
        stays = flat.numel() < KEPT_ON_GPU_BELOW * total
        if self._base is None:
            where = f"on {flat.device}" if stays else "in pinned host memory"
            logger.info(
                "the weights published last stay {}, for deltas: {:.2f} GB of this rank, {:.0f} GB on the GPU",
                where, flat.numel() / 1e9, total / 1e9,
            )  # fmt: skip
        return stays
