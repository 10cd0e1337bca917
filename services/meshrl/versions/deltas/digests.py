"""Updates the additive digests of tensors after a delta, from the words that changed alone.

`collective.digest.sum128` adds a term for each 16-bit word, so the digest after a change is the digest before plus the
terms of the new words minus those of the old ones, modulo 2^64.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshrl.versions.collective.digest import GOLDEN, sums_of
from meshrl.versions.deltas.codec import Changes, Rows, Stretch, words_of
from meshrl.versions.deltas.words import Words, equal_runs
from meshrl.wire.types import TensorEntry

TILE_WORDS = 2**17  # 16-bit words at once: more than fit into a core's cache, for the sake of few calls
Lanes = NDArray[np.uint64]
"""(T, 2) digests of tensors, or differences of them, modulo 2^64."""
Differences = Mapping[int, Lanes]
"""By how much the digests (2,) of some tensors change, by index."""
Image = NDArray[np.uint8]
"""Bytes of a version's byte stream."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit:
    """C elements of a run that change: `places` (C,) in it, rising, and bits before and after."""

    run: Stretch
    places: NDArray[np.int64]
    old: Words
    new: Words

    @property
    def at(self) -> NDArray[np.int64]:
        """The first byte of each in the version's byte stream."""
        return self.run.start + self.places * self.run.width


def edits_of(found: Sequence[Changes], rows: Rows, old: Image, new: Image) -> list[Edit]:
    place = dict(zip((run.start for run in rows.runs), rows.at, strict=True))
    edits = []
    for each in found:
        run, at = each.run, place[each.run.start]
        words = (words_of(image, run, at)[each.places] for image in (old, new))
        edits.append(Edit(run=run, places=each.places, old=next(words), new=next(words)))
    return edits


def lanes_of(tensors: Sequence[TensorEntry]) -> Lanes:
    return np.frombuffer(b"".join(entry.digest for entry in tensors), dtype="<u8").reshape(-1, 2)


def lanes_after(
    tensors: Sequence[TensorEntry],
    lanes: Lanes,
    take: Callable[[NDArray[np.int64]], Image],
    edits: Sequence[Edit],
    threads: ThreadPoolExecutor,
) -> Lanes:
    """The digests of tensors once `edits` are made to weights whose digests are `lanes`. Blocking.

    `take` gives bytes of the weights before, by offset in the version's byte stream.
    """
    digester = Digester(tensors)
    wide = threads.map(digester.differences, [edit for edit in edits if edit.run.width > 1])
    return digester.after(lanes, wide, take, edits)


class Digester:
    """Computes how edits change the digests of tensors. Safe for threads."""

    def __init__(self, tensors: Sequence[TensorEntry]) -> None:
        self._tensors, self._offsets = tensors, [entry.offset for entry in tensors]

    def differences(self, edit: Edit) -> Differences:
        """By an edit of elements of 16 bits and more."""
        if not len(edit.places):
            return {}
        run, places, halves = edit.run, edit.places, edit.run.width // 2
        first, last = (bisect_right(self._offsets, run.start + int(place) * run.width) - 1 for place in places[[0, -1]])
        starts = [(offset - run.start) // run.width for offset in self._offsets[first + 1 : last + 1]]
        edges = [0, *(np.searchsorted(places, starts).tolist() if starts else ()), len(places)]
        number = places + 1 if halves == 1 else ((places * halves)[:, None] + np.arange(1, halves + 1)).reshape(-1)
        begins: dict[int, int] = {}
        for owner, (begin, end) in enumerate(pairwise(edges), first):
            if begin < end:
                number[begin * halves : end * halves] += (run.start - self._offsets[owner]) // 2
                begins[owner] = begin * halves
        words = np.stack([edit.old, edit.new]).view("<u2")
        return dict(zip(begins, _differences(number, words, list(begins.values())), strict=True))

    def after(
        self,
        lanes: Lanes,
        wide: Iterable[Differences],
        take: Callable[[NDArray[np.int64]], Image],
        edits: Sequence[Edit],
    ) -> Lanes:
        """The digests after `edits`; `wide` are the differences by those of 16 bits and more."""
        after = lanes.copy()
        for found in (*wide, self._of_bytes(take, edits)):
            for owner, difference in found.items():
                after[owner] += difference
        return after

    def _of_bytes(self, take: Callable[[NDArray[np.int64]], Image], edits: Sequence[Edit]) -> Differences:
        """By edits of single bytes, which count with the other byte of each 16-bit word."""
        bytewise = [edit for edit in edits if edit.run.width == 1]
        if not bytewise:
            return {}
        edited = np.concatenate([edit.at for edit in bytewise])
        owners = self._owners(edited)
        starts = np.array(self._offsets)[owners]
        sizes = np.array([entry.num_bytes for entry in self._tensors])[owners]
        other = (edited - starts) ^ 1
        at = np.union1d(edited, (starts + other)[other < sizes])
        old = take(at)
        new = old.copy()
        new[np.searchsorted(at, edited)] = np.concatenate([edit.new for edit in bytewise])
        found: dict[int, Lanes] = {}
        owners = self._owners(at)
        for begin, end in equal_runs(owners):
            owner = int(owners[begin])
            place = at[begin:end] - self._offsets[owner]
            low = place % 2 == 0
            alone = low & (place == self._tensors[owner].num_bytes - 1)  # the last of an odd number counts with a zero
            words = np.zeros((2, int(low.sum())), dtype=np.uint16)
            for row, elements in zip(words, (old[begin:end], new[begin:end]), strict=True):
                row |= elements[low]
                row[~alone[low]] |= elements[~low].astype(np.uint16) << np.uint16(8)
            found[owner] = _differences(place[low] // 2 + 1, words, [0])[0]
        return found

    def _owners(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tensor of each byte; the last of several at one offset, since the others are empty."""
        return np.searchsorted(np.array(self._offsets), at, side="right") - 1


def with_lanes(tensors: Sequence[TensorEntry], lanes: Lanes) -> tuple[TensorEntry, ...]:
    return tuple(
        replace(entry, digest=found.astype("<u8").tobytes()) for entry, found in zip(tensors, lanes, strict=True)
    )


def _differences(number: NDArray[np.int64], words: NDArray[np.uint16], begins: Sequence[int]) -> Lanes:
    """(S, 2) lanes of S tensors after a change of W words, less those before.

    `number` (W,) is each word's in its tensor, from 1 on; `words` (2, W) are before and after; `begins` (S,) is the
    first word of each tensor.
    """
    lanes = np.zeros((len(begins), 2), dtype=np.uint64)
    room = np.empty((2, 2, min(TILE_WORDS, len(number))), dtype=np.uint64)
    for at in range(0, len(number), TILE_WORDS):
        tile = slice(at, min(at + TILE_WORDS, len(number)))
        owners = slice(bisect_right(begins, at) - 1, bisect_left(begins, tile.stop))
        z, spare = room[..., : tile.stop - at]
        np.multiply(number[tile].view(np.uint64), np.uint64(GOLDEN), out=spare[0])
        np.add(spare[0], words[:, tile], out=z)
        before, after = sums_of(z, spare, [max(begin - at, 0) for begin in begins[owners]])
        lanes[owners] += after - before
    return lanes
