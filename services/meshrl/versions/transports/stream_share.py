"""One sender rank's share of the stream transport: it makes its part of a delta from its own rows, where these are.

Between two versions it keeps its rows of the one published last, on the GPU where they are small beside its memory,
else in host memory. Nothing is gathered: pieces of a delta, or the rows of a full version, go to rank 0 through files
in memory, and from rank 0's own share directly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray

from meshrl.versions.collective.digest import sum128
from meshrl.versions.deltas.codec import Packed, Rows, encode, join, joined_bytes
from meshrl.versions.deltas.digests import Lanes, edits_of, lanes_after
from meshrl.versions.deltas.on_device import encode_on_device
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import HeldSnapshot, Snapshot
from meshrl.versions.transports.base import Answer, PublishCall
from meshrl.versions.transports.version_files import SLICE_BYTES, in_threads

ON_GPU_BELOW = 1 / 16
"""Rows of the version published last stay on the GPU where they take less of its memory: training states take eight
times as much, or more."""
Bytes = NDArray[np.uint8]


class StreamShare:
    """One rank's share of streamed versions. Calls: encode, hand, write, keep."""

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
        self._host: torch.Tensor | None = None  # rows that left in full, of a GPU
        self._spare: torch.Tensor | None = None  # for the next snapshot
        self._base: torch.Tensor | None = None  # the rows published last
        self._base_version, self._base_lanes = -1, np.zeros((0, 2), dtype=np.uint64)
        self._lanes: Lanes = self._base_lanes  # of the version encoded last

    def make_way(self) -> torch.Tensor | None:
        """For the training thread, before its next snapshot: a buffer that nobody uses any more."""
        last, spare = self.held.drop(), self._spare
        self._spare = None
        if last is not None and spare is None and last.flat is not self._base:
            spare = last.flat
        return spare

    def carry_out(self, call: PublishCall) -> Answer:
        """Encodes, hands over or keeps what this rank holds of a version. Raises MeshError and OSError."""
        snapshot = self.held.get(call.version, deadline_s=self._deadline_s)
        with _beside_training(snapshot):
            if call.do == "encode":
                return self._encode(snapshot, call.base)
            if call.do == "hand":
                if self._share:
                    self.delta_path(self._share).write_bytes(join(self.pieces).data)
            elif call.do == "write":
                self._write(snapshot)
            else:
                self._keep(snapshot, call.version)
        return {}

    def delta_path(self, share: int) -> Path:
        """The file of a share's pieces."""
        return self._folder / f"delta-{self._epoch}.{share}"

    @property
    def full_path(self) -> Path:
        """The file of a version in full; rank 0 makes it."""
        return self._folder / f"full-{self._epoch}"

    def on_host(self, version: int) -> Bytes:
        """This rank's rows of a version in host memory."""
        snapshot = self.held.get(version, deadline_s=self._deadline_s)
        with _beside_training(snapshot):
            return self._on_host(snapshot)

    def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(wait=False)

    def _encode(self, snapshot: Snapshot, base_version: int) -> Answer:
        """The pieces of a delta from the version kept, or none without one, and the digests of the rows."""
        rows = self._rows_of(snapshot)
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
        whole = sum(tensor.num_bytes for tensor in snapshot.tensors)  # without pieces of this rank no delta is right
        size = joined_bytes(self.pieces) if has_base else whole
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
        data = self._on_host(snapshot).data
        slices, at = [], 0
        for offset, length in snapshot.spans:
            for start in range(0, length, SLICE_BYTES):
                end = min(length, start + SLICE_BYTES)
                slices.append((offset + start, data[at + start : at + end]))
            at += length
        fd = os.open(self.full_path, os.O_WRONLY | os.O_CLOEXEC)

        def put(piece: tuple[int, memoryview]) -> None:
            at, left = piece
            while left:
                written = os.pwrite(fd, left, at)
                at, left = at + written, left[written:]
                self.progress.moved()

        try:
            in_threads(self._threads, put, slices)
        finally:
            os.close(fd)

    def _keep(self, snapshot: Snapshot, version: int) -> None:
        """The version was published: the next one leads from it."""
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
        stays = flat.numel() < ON_GPU_BELOW * total
        if self._base is None:
            where = f"on {flat.device}" if stays else "in pinned host memory"
            logger.info(
                "the weights published last stay {}, for deltas: {:.2f} GB of this rank, {:.0f} GB on the GPU",
                where, flat.numel() / 1e9, total / 1e9,
            )  # fmt: skip
        return stays

    def _on_host(self, snapshot: Snapshot) -> Bytes:
        """The rows in host memory: pinned, since the copy from a GPU is then as fast as the bus."""
        if snapshot.ready is None:
            return snapshot.flat.numpy()
        if self._host is None:
            self._host = torch.empty(snapshot.flat.shape, dtype=torch.uint8, pin_memory=True)
        self._host.copy_(snapshot.flat)
        return self._host.numpy()

    def _rows_of(self, snapshot: Snapshot) -> Rows:
        if self._rows is None:
            self._rows = Rows(snapshot.tensors, snapshot.spans)
        return self._rows


@contextmanager
def _beside_training(snapshot: Snapshot) -> Iterator[None]:
    """What follows is done once the snapshot is there, on a stream of its own, and over at the end."""
    if snapshot.ready is None:
        yield
        return
    device = snapshot.flat.device
    snapshot.ready.synchronize()
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]  # torch has none
        yield
        torch.cuda.current_stream().synchronize()
