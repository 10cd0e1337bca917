"""Which sender rank broadcasts which bytes, and in what order: computed alike by senders and receivers. No I/O.

A version's tensors are sent in buckets, runs of whole tensors in manifest order. In a bucket each sender in turn
broadcasts one flat piece: its rows of each tensor, tensor after tensor. A sender keeps all its pieces in one buffer in
that order, so a piece is a slice of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshrl.wire.types import CollectivePlan, TensorEntry


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Bytes [start, end) of one tensor, at `at` in its sender's flat piece of the bucket."""

    tensor: int
    start: int
    end: int
    at: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    first: int
    last: int
    pieces: tuple[tuple[Piece, ...], ...]  # by sender

    def num_bytes(self, sender: int) -> int:
        pieces = self.pieces[sender]
        return pieces[-1].at + pieces[-1].end - pieces[-1].start if pieces else 0


def rows_of(num_rows: int, part: int, num_parts: int) -> tuple[int, int]:
    """Rows [start, end) of a part of a tensor: those of torch.chunk, where late parts may have none."""
    step = -(-num_rows // num_parts)
    return min(part * step, num_rows), min((part + 1) * step, num_rows)


def byte_range(
    entry: TensorEntry, sender: int, plan: CollectivePlan, *, whole: bool, reordered: bool
) -> tuple[int, int]:
    """Bytes [start, end) of a tensor that a sender sends; a `whole` one is sent by the first sender alone."""
    if whole or not entry.shape or plan.num_senders == 1:
        return (0, entry.num_bytes) if sender == 0 else (0, 0)
    rows = entry.shape[0]
    start, end = rows_of(rows, plan.row_order[sender] if reordered else sender, plan.num_senders)
    row_bytes = entry.num_bytes // rows if rows else 0
    return start * row_bytes, end * row_bytes


def buckets(tensors: Sequence[TensorEntry], plan: CollectivePlan) -> Iterator[Bucket]:
    whole, reordered = frozenset(plan.whole_tensors), frozenset(plan.reordered_tensors)
    first = 0
    while first < len(tensors):
        last, size = first + 1, tensors[first].num_bytes
        while last < len(tensors) and size + tensors[last].num_bytes <= plan.bucket_bytes:
            size += tensors[last].num_bytes
            last += 1
        pieces: list[list[Piece]] = [[] for _ in range(plan.num_senders)]
        filled = [0] * plan.num_senders
        for index in range(first, last):
            for sender in range(plan.num_senders):
                start, end = byte_range(
                    tensors[index], sender, plan, whole=index in whole, reordered=index in reordered
                )
                if end > start:
                    pieces[sender].append(Piece(tensor=index, start=start, end=end, at=filled[sender]))
                    filled[sender] += end - start
        yield Bucket(first=first, last=last, pieces=tuple(map(tuple, pieces)))
        first = last


def sender_bytes(tensors: Sequence[TensorEntry], plan: CollectivePlan, sender: int) -> int:
    return sum(bucket.num_bytes(sender) for bucket in buckets(tensors, plan))
