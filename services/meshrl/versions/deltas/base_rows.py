"""A rank's rows of the version published last, the base of the next delta, and what changed in them since."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from loguru import logger

from meshrl.versions.collective.digest import sum128_each
from meshrl.versions.collective.plan import Piece
from meshrl.versions.deltas.codec import Packed, Rows, encode, stream_bytes
from meshrl.versions.deltas.digests import Lanes, edits_of, lanes_after
from meshrl.versions.deltas.on_device import encode_on_device
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import Snapshot

KEPT_ON_GPU_BELOW = 1 / 16  # of its memory: training states take eight times as much as the rows, or more


class BaseRows:
    """Blocking, for one publishing thread; GPU work is on the current stream.

    `pieces` and `lanes` (T, 2) are the delta and the digests of this rank's rows of the version encoded last.
    """

    def __init__(self, threads: ThreadPoolExecutor, progress: Progress) -> None:
        self._threads, self._progress = threads, progress
        self.pieces: list[Packed] = []
        self.lanes: Lanes = np.zeros((0, 2), dtype=np.uint64)
        self._rows: Rows | None = None
        self._spare: torch.Tensor | None = None  # for the next snapshot
        self._base: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None  # from the spare buffer to the base on the host
        self._version, self._base_lanes = -1, self.lanes

    def free_buffer(self, last: Snapshot | None) -> torch.Tensor | None:
        """A buffer for the next snapshot, if one is free; `last` is the one before it, which is not read any more."""
        spare, self._spare = self._spare, None
        if spare is None and last is not None and last.flat is not self._base:
            spare = last.flat
        if self._copied is not None:
            self._copied.synchronize()
        return spare

    def encode(self, snapshot: Snapshot, base: int | None, *, sparse: bool) -> tuple[int, int]:
        """Makes the delta of a version from version `base`, where that is kept here, and the digests.

        Returns the bytes of the delta, or of the full version without a base, and the bytes that changed. `sparse` as
        of `codec.pack`.
        """
        rows = self._rows = self._rows or Rows(snapshot.tensors, snapshot.spans)
        self.pieces = []
        has_base = self._base is not None and base == self._version
        if has_base and snapshot.ready is None:
            assert self._base is not None, "there is a base"
            old, new = self._base.numpy(), snapshot.flat.numpy()
            pairs = encode(rows, old, new, self._threads, self._progress.moved, sparse=sparse)
            self.pieces = [packed for _, packed in pairs]
            edits = edits_of([found for found, _ in pairs], rows, old, new)
            take = lambda at: old[rows.place(at)]  # noqa: E731  # it has one use
            self.lanes = lanes_after(snapshot.tensors, self._base_lanes, take, edits, self._threads)
        else:
            self.lanes = self._digests(snapshot)
            if has_base:
                assert self._base is not None, "there is a base"
                try:
                    self.pieces = encode_on_device(rows, self._base, snapshot.flat, self._threads, sparse=sparse)
                except torch.OutOfMemoryError as error:  # training needs it: a version in full needs none
                    device, has_base = snapshot.flat.device, False
                    logger.warning("no room on {} to make a delta, the version goes in full: {}", device, error)
        changed = sum(piece.changed * piece.run.width for piece in self.pieces)
        whole = sum(tensor.num_bytes for tensor in snapshot.tensors)  # which is larger than any delta that pays
        self._progress.moved()
        return stream_bytes(self.pieces) if has_base else whole, changed

    def keep(self, snapshot: Snapshot, version: int) -> None:
        """Makes a snapshot the base. A copy to the host may still be under way on the current stream."""
        self.pieces = []
        self._version, self._base_lanes = version, self.lanes
        former, flat = self._base, snapshot.flat
        if snapshot.ready is None or self._stays_on_gpu(flat):
            self._base, self._spare = flat, former
            return
        if former is None:
            former = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
        former.copy_(flat, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._copied.record()
        self._base, self._spare = former, flat

    def _digests(self, snapshot: Snapshot) -> Lanes:
        pieces = list(snapshot.plan.pieces(snapshot.sender))

        def digests(some: Sequence[Piece]) -> torch.Tensor:
            found = sum128_each([snapshot.flat[piece.place] for piece in some], [piece.start // 2 for piece in some])
            self._progress.moved()
            return found

        on_gpu = snapshot.ready is not None
        found = [digests(pieces)] if on_gpu else list(self._threads.map(digests, ([piece] for piece in pieces)))
        lanes = torch.zeros((len(snapshot.tensors), 2), dtype=torch.int64)
        if pieces:
            lanes[[piece.tensor for piece in pieces]] = torch.cat(found).cpu()
        return lanes.numpy().view(np.uint64)

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
