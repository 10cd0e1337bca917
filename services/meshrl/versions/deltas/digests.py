"""What a few changes do to the additive digests of tensors: found from the changed words alone.

`collective.digest.sum128` adds a term for each 16-bit word of a tensor, so a digest after changes is the digest before
plus the terms of the new words minus those of the old ones, modulo 2^64. Publishers name the digests of a version this
way, and agents check the root of a version without reading the rest of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshrl.versions.collective.digest import BLOCK_WORDS, GOLDEN, sums_of
from meshrl.versions.deltas.codec import Changes, Rows, words_of
from meshrl.versions.deltas.words import Words
from meshrl.wire.types import TensorEntry

Lanes = NDArray[np.uint64]
"""(T, 2) digests of tensors, or differences of them, modulo 2^64."""
Image = NDArray[np.uint8]
"""Bytes of a version's byte stream."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit:
    """C elements that change: their first bytes `at` (C,) in the version's byte stream, rising, and what they hold."""

    at: NDArray[np.int64]
    old: Words
    new: Words


def edits_of(found: Sequence[Changes], rows: Rows, old: Image, new: Image) -> list[Edit]:
    """What `found` changes of `rows`, of which `old` and `new` are two states."""
    place = dict(zip((run.start for run in rows.runs), rows.at, strict=True))
    edits = []
    for each in found:
        run, at = each.run, place[each.run.start]
        words = (words_of(image, run, at)[each.places] for image in (old, new))
        edits.append(Edit(at=run.start + each.places * run.width, old=next(words), new=next(words)))
    return edits


def lanes_of(tensors: Sequence[TensorEntry]) -> Lanes:
    """The digests of a manifest's tensors as numbers."""
    return np.frombuffer(b"".join(entry.digest for entry in tensors), dtype="<u8").reshape(-1, 2)


def lanes_after(
    tensors: Sequence[TensorEntry],
    lanes: Lanes,
    take: Callable[[NDArray[np.int64]], Image],
    edits: Sequence[Edit],
    threads: ThreadPoolExecutor,
) -> Lanes:
    """The digests of tensors once `edits` are made to weights whose digests are `lanes`. Blocking.

    `take` gives the weights' bytes as they are before, by their offsets in the version's byte stream.
    """
    after = lanes.copy()
    wide = [edit for edit in edits if edit.old.itemsize > 1]
    for found in threads.map(lambda edit: _differences(tensors, edit), [*wide, *_whole_words(tensors, take, edits)]):
        for owner, difference in found.items():
            after[owner] += difference
    return after


def _differences(tensors: Sequence[TensorEntry], edit: Edit) -> dict[int, Lanes]:
    """How the digests of tensors change, by their index."""
    if not len(edit.at):
        return {}
    first, last = _owners(tensors, edit.at[[0, -1]]).tolist()
    inner = np.searchsorted(edit.at, [tensor.offset for tensor in tensors[first + 1 : last + 1]]).tolist()
    found: dict[int, Lanes] = {}
    for owner, (begin, end) in enumerate(pairwise([0, *inner, len(edit.at)]), first):
        if begin < end:
            at = edit.at[begin:end] - tensors[owner].offset
            size = tensors[owner].num_bytes
            before, after = (_terms(at, words[begin:end], size) for words in (edit.old, edit.new))
            found[owner] = after - before
    return found


def _owners(tensors: Sequence[TensorEntry], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tensor of each byte; of several at one offset it is the last, since the others are empty."""
    return np.searchsorted(np.array([entry.offset for entry in tensors]), at, side="right") - 1


def with_lanes(tensors: Sequence[TensorEntry], lanes: Lanes) -> tuple[TensorEntry, ...]:
    """Tensors with these digests."""
    return tuple(
        replace(entry, digest=found.astype("<u8").tobytes()) for entry, found in zip(tensors, lanes, strict=True)
    )


def _whole_words(
    tensors: Sequence[TensorEntry], take: Callable[[NDArray[np.int64]], Image], edits: Sequence[Edit]
) -> list[Edit]:
    """The edits of single bytes as one, with the other byte of each 16-bit word, where its tensor has one."""
    bytewise = [edit for edit in edits if edit.old.itemsize == 1]
    if not bytewise:
        return []
    edited = np.concatenate([edit.at for edit in bytewise])
    owners = _owners(tensors, edited)
    starts = np.array([entry.offset for entry in tensors])[owners]
    sizes = np.array([entry.num_bytes for entry in tensors])[owners]
    other = (edited - starts) ^ 1
    at = np.union1d(edited, (starts + other)[other < sizes])
    old = take(at)
    new = old.copy()
    new[np.searchsorted(at, edited)] = np.concatenate([edit.new for edit in bytewise])
    return [Edit(at=at, old=old, new=new)]


def _terms(at: NDArray[np.int64], elements: Words, num_bytes: int) -> Lanes:
    """(2,) sums of the terms of elements at byte `at` of a tensor."""
    if elements.itemsize == 1:
        low = at % 2 == 0
        alone = low & (at == num_bytes - 1)  # the last byte of an odd number counts with a zero
        place = at[low] // 2
        high = np.zeros(len(place), dtype=np.uint64)
        high[~alone[low]] = elements[~low]
        return _sums(place, elements[low].astype(np.uint64) | high << np.uint64(8))
    halves = elements.itemsize // 2
    words = np.ascontiguousarray(elements).view("<u2")
    place = (at // 2)[:, None] + np.arange(halves) if halves > 1 else at // 2
    return _sums(place.reshape(-1), words)


def _sums(place: NDArray[np.int64], words: Words) -> Lanes:
    lanes, spare = [0, 0], np.empty(min(BLOCK_WORDS, len(words)), dtype=np.uint64)
    for at in range(0, len(words), BLOCK_WORDS):
        z = place[at : at + BLOCK_WORDS].astype(np.uint64)
        z += np.uint64(1)
        z *= np.uint64(GOLDEN)
        z += words[at : at + BLOCK_WORDS]
        for lane, found in enumerate(sums_of(z, spare[: len(z)])):
            lanes[lane] += found
    return np.array([lane % 2**64 for lane in lanes], dtype=np.uint64)
