"""Which sender rank sends which bytes of a version, and in what order: computed alike by senders and receivers. No I/O.

Tensors are sent in buckets, runs of whole tensors in manifest order. In a bucket each sender in turn broadcasts one
flat piece: its rows of each tensor. A sender keeps all its pieces in one buffer in that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from meshrl.wire.manifest import layout_signature
from meshrl.wire.types import CollectivePlan, TensorEntry

ONE_SENDER = CollectivePlan(num_senders=1, bucket_bytes=1)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Bytes [start, end) of one tensor, at `at` of the sender's buffer."""

    tensor: int
    start: int
    end: int
    at: int

    @property
    def place(self) -> slice:
        return slice(self.at, self.at + self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Tensors [first, last); by sender its pieces of them, and the bytes [begin, end) of its buffer."""

    first: int
    last: int
    pieces: tuple[tuple[Piece, ...], ...]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class PublishPlan:
    """The tensors of every version in stream order, without digests, and which sender rank holds which bytes.

    The ranks of a trainer's first replica are the senders.
    """

    tensors: tuple[TensorEntry, ...]
    collective: CollectivePlan = ONE_SENDER

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def layout(self) -> bytes:
        return layout_signature((tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        found: list[Bucket] = []
        filled, first = [0] * self.collective.num_senders, 0
        while first < len(self.tensors):
            last, size = first + 1, self.tensors[first].num_bytes
            while last < len(self.tensors) and size + self.tensors[last].num_bytes <= self.collective.bucket_bytes:
                size += self.tensors[last].num_bytes
                last += 1
            pieces: list[list[Piece]] = [[] for _ in filled]
            begins = tuple(filled)
            for index in range(first, last):
                for sender in range(len(filled)):
                    start, end = self._byte_range(index, sender)
                    if end > start:
                        pieces[sender].append(Piece(tensor=index, start=start, end=end, at=filled[sender]))
                        filled[sender] += end - start
            spans = tuple(zip(begins, filled, strict=True))
            found.append(Bucket(first=first, last=last, pieces=tuple(map(tuple, pieces)), spans=spans))
            first = last
        return tuple(found)

    def pieces(self, sender: int) -> Iterator[Piece]:
        for bucket in self.buckets:
            yield from bucket.pieces[sender]

    def sender_bytes(self, sender: int) -> int:
        return self.buckets[-1].spans[sender][1] if self.buckets else 0

    def _byte_range(self, index: int, sender: int) -> tuple[int, int]:
        entry, plan = self.tensors[index], self.collective
        if index in plan.whole_tensors or not entry.shape or plan.num_senders == 1:
            return (0, entry.num_bytes) if sender == 0 else (0, 0)
        part = plan.row_order[sender] if index in plan.reordered_tensors else sender
        start, end = rows_of(entry.shape[0], part, plan.num_senders)
        row_bytes = entry.num_bytes // entry.shape[0] if entry.shape[0] else 0
        return start * row_bytes, end * row_bytes


def rows_of(num_rows: int, part: int, num_parts: int) -> tuple[int, int]:
    """Rows [start, end) of a part of a tensor, as of torch.chunk."""
    step = -(-num_rows // num_parts)
    return min(part * step, num_rows), min((part + 1) * step, num_rows)
