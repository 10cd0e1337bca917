"""The byte stream of a delta, codec "gap-ulp.zstd": which elements of the base change, and by how many steps.

docs/contract.md defines the bytes. A piece covers a run of elements of one width in the version's byte stream. For each
element that changes it has a gap (elements skipped since the last change) and a step (see `words`), as a rule one byte
each, in two zstd frames. Blocking, and free of torch, which the hub does not need.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from meshrl.versions.deltas.words import UNSIGNED, Words, ordered, unzigzag, zigzag
from meshrl.wire.tensors import DTYPES
from meshrl.wire.types import TensorEntry

BLOCK_VALUES = 2**22  # elements of a piece, at most: as many as one thread takes at once
BATCH_CHANGES = 2**20  # decoded at once: threads hand the interpreter's lock on at each call of NumPy
ESCAPE = 255
LOW_BITS = 8
SPARSE = 400  # elements for each that changes, from which on gaps lose their low bytes: there both take the same room
MAX_PIECE_VALUES = 2**31
MOST_THREADS = 8
_LEVEL = 1
_HEAD = struct.Struct("<4sHHQ")
_ROW = struct.Struct("<QQQHHIIIII")
_MAGIC, _FORMATS = b"MRDL", (1, 2)  # without low bytes of gaps, and with some
Frame: TypeAlias = bytes | memoryview
"""A zstd frame; of a delta that was read, a view of its bytes."""


class DeltaError(Exception):
    """These bytes are no delta, or not one for these weights."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    start: int
    values: int
    width: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Changes:
    """C changes in a run: `places` (C,) of the elements in it, rising, and `steps` (C,) modulo 2^bits, never 0."""

    run: Stretch
    places: NDArray[np.int64]
    steps: Words


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Changes of a run as bytes; `raw` are the frames' sizes uncompressed. `lows` (changed,) may be empty."""

    run: Stretch
    changed: int
    raw: tuple[int, int, int]
    frames: tuple[Frame, Frame, Frame]
    lows: Frame = b""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.frames)) + len(self.lows)


def runs_of(tensors: Sequence[TensorEntry], spans: Iterable[tuple[int, int]]) -> list[Stretch]:
    """Cuts (offset, length) `spans` of the byte stream of `tensors` into runs of at most BLOCK_VALUES."""
    found: list[Stretch] = []
    starts = [entry.offset for entry in tensors]
    areas: list[list[int]] = []  # start, end, width
    for start, length in spans:
        first = max(0, bisect_right(starts, start) - 1)
        for entry in islice(tensors, first, bisect_left(starts, start + length, first)):
            width = DTYPES[entry.dtype].itemsize
            at, end = max(entry.offset, start), min(entry.offset + entry.num_bytes, start + length)
            if at >= end:
                continue
            if areas and areas[-1][1] == at and areas[-1][2] == width:
                areas[-1][1] = end
            else:
                areas.append([at, end, width])
    for start, end, width in areas:
        values = (end - start) // width
        found += [
            Stretch(start=start + at * width, values=min(BLOCK_VALUES, values - at), width=width)
            for at in range(0, values, BLOCK_VALUES)
        ]
    return found


class Rows:
    """Spans of a version's byte stream that lie one after the other in a buffer, such as the rows of a rank.

    `runs` cut the spans, `at` is the byte of the buffer where each run begins. Elements are aligned in the buffer as
    they are in the stream, which has the widest first.
    """

    def __init__(self, tensors: Sequence[TensorEntry], spans: Sequence[tuple[int, int]] | None = None) -> None:
        """`spans` are (offset, length), rising; None is the whole stream."""
        spans = [(0, sum(entry.num_bytes for entry in tensors))] if spans is None else spans
        self.runs = runs_of(tensors, spans)
        self._offsets = np.array([offset for offset, _ in spans], dtype=np.int64)
        self._before = np.cumsum([0, *(length for _, length in spans)], dtype=np.int64)[:-1]
        self.at: list[int] = self.place(np.array([run.start for run in self.runs], dtype=np.int64)).tolist()

    def place(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        span = np.searchsorted(self._offsets, at, side="right") - 1
        place: NDArray[np.int64] = at - self._offsets[span] + self._before[span]
        return place


def words_of(image: NDArray[np.uint8], run: Stretch, at: int | None = None) -> Words:
    """A view of the elements of a run, which begins at byte `at` of `image` (None: as in the stream), as integers."""
    at = run.start if at is None else at
    return image[at : at + run.values * run.width].view(UNSIGNED[run.width])


def changes(run: Stretch, old: Words, new: Words) -> Changes:
    places = np.flatnonzero(old != new)
    return Changes(run=run, places=places, steps=ordered(new[places]) - ordered(old[places]))


def pack(found: Changes, *, sparse: bool = True) -> Packed:
    """`sparse`: gaps may go without their low bytes, which readers of an older release refuse."""
    gaps = np.diff(found.places, prepend=-1) - 1
    lows = np.empty(0, np.uint8)
    if sparse and is_sparse(found.run, len(found.places)):
        lows = gaps.astype(np.uint8)
        gaps >>= LOW_BITS
    skips = gaps // ESCAPE
    ends = np.cumsum(skips + 1) - 1
    gap_bytes = np.full(int(ends[-1]) + 1 if len(ends) else 0, ESCAPE, dtype=np.uint8)
    gap_bytes[ends] = gaps - skips * ESCAPE
    codes = zigzag(found.steps) - found.steps.dtype.type(1)  # no step is 0
    wide = codes >= ESCAPE
    step_bytes = np.where(wide, found.steps.dtype.type(ESCAPE), codes).astype(np.uint8)
    return compress(found.run, len(found.places), (gap_bytes, step_bytes, codes[wide].view(np.uint8), lows))


def is_sparse(run: Stretch, changed: int) -> bool:
    return run.values >= SPARSE * changed > 0


def compress(run: Stretch, changed: int, streams: tuple[NDArray[np.uint8], ...]) -> Packed:
    """Compresses the streams of a run: gaps, steps, and steps that no byte holds, but not the low bytes."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    gaps, steps, escapes = (
        compressor.compress(np.ascontiguousarray(stream).data) if stream.size else b"" for stream in streams[:3]
    )
    sizes = (streams[0].size, streams[1].size, streams[2].size)
    return Packed(run=run, changed=changed, raw=sizes, frames=(gaps, steps, escapes), lows=streams[3].tobytes())


def batches(pieces: Iterable[Packed], most: int | None = None) -> list[list[Packed]]:
    """Groups pieces that follow each other to be decoded at once: of one width, with `most` changes or one piece."""
    most = BATCH_CHANGES if most is None else most
    found: list[list[Packed]] = []
    changed = 0
    for piece in pieces:
        changed += piece.changed
        if not found or found[-1][0].run.width != piece.run.width or changed > most:
            found.append([])
            changed = piece.changed
        found[-1].append(piece)
    return found


def unpack(*pieces: Packed) -> Changes:
    """Decodes pieces of one width in stream order, as changes of the run from the first to the last of them.

    Raises DeltaError for bytes that `pack` does not make.
    """
    first, last, width = pieces[0].run, pieces[-1].run, pieces[0].run.width
    run = Stretch(start=first.start, values=(last.start - first.start) // width + last.values, width=width)
    gap_bytes, step_bytes, escapes = streams_of(pieces)
    check_counts(pieces, gap_bytes, step_bytes)
    ends, wide = gap_bytes < ESCAPE, step_bytes == ESCAPE
    onward = gap_bytes.astype(np.int64)  # from an element that changes, or an escape, to the next
    gaps = 0  # of the pieces before
    for piece in pieces:
        if len(piece.lows):
            onward[gaps : gaps + piece.raw[0]] <<= LOW_BITS
        gaps += piece.raw[0]
    if (lows := lows_of(pieces)) is not None:
        onward[ends] += lows
    onward += ends
    passed = np.cumsum(onward)  # without a cast, which would hold the interpreter's lock
    places = passed[ends]
    gaps = changed = 0  # of the pieces before
    for piece in pieces:
        its_changes = slice(changed, changed + piece.changed)
        begin = (piece.run.start - run.start) // width
        places[its_changes] += begin - 1 - (passed[gaps - 1] if gaps else 0)
        gaps, changed = gaps + piece.raw[0], its_changes.stop
        if piece.changed and places[changed - 1] >= begin + piece.run.values:
            raise DeltaError(f"the piece at {piece.run.start} changes an element beyond its {piece.run.values}")
    codes = step_bytes.astype(UNSIGNED[width])
    codes[wide] = escapes.view(codes.dtype)
    codes += codes.dtype.type(1)
    return Changes(run=run, places=places, steps=unzigzag(codes))


def lows_of(pieces: Sequence[Packed]) -> NDArray[np.uint8] | None:
    """The low bytes of the gaps of pieces, 0 for those without; None where no piece has any."""
    if not any(len(piece.lows) for piece in pieces):
        return None
    found = [np.frombuffer(piece.lows or bytes(piece.changed), dtype=np.uint8) for piece in pieces]
    return np.concatenate(found)


def streams_of(pieces: Sequence[Packed], threads: int = 1) -> list[NDArray[np.uint8]]:
    """The gaps, steps and escapes of pieces, in one call: each that ends waits for the interpreter's lock.

    Raises DeltaError.
    """
    held = [[piece for piece in pieces if piece.raw[stream]] for stream in range(3)]
    frames = [(piece.frames[stream], piece.raw[stream]) for stream in range(3) for piece in held[stream]]
    if not frames:
        return [np.empty(0, np.uint8)] * 3
    try:
        if any(zstandard.frame_content_size(frame) != size for frame, size in frames):  # before any room is made for it
            raise DeltaError("a frame does not hold the bytes that its piece names")
        found = zstandard.ZstdDecompressor().multi_decompress_to_buffer([frame for frame, _ in frames], threads=threads)
    except (zstandard.ZstdError, ValueError) as error:
        raise DeltaError(f"a frame cannot be decompressed: {error}") from error
    parts = (np.frombuffer(found[index].tobytes(), dtype=np.uint8) for index in range(len(frames)))
    return [np.concatenate([np.empty(0, np.uint8), *islice(parts, len(held[stream]))]) for stream in range(3)]


def check_counts(pieces: Sequence[Packed], gap_bytes: NDArray[np.uint8], step_bytes: NDArray[np.uint8]) -> None:
    """Raises DeltaError where pieces have other numbers of changes than they name."""
    gaps = changed = 0  # of the pieces before
    for piece in pieces:
        ends = int(np.count_nonzero(gap_bytes[gaps : gaps + piece.raw[0]] < ESCAPE))
        wide = int(np.count_nonzero(step_bytes[changed : changed + piece.changed] == ESCAPE))
        if (ends, wide * piece.run.width) != (piece.changed, piece.raw[2]):
            raise DeltaError(f"the piece at {piece.run.start} does not hold the {piece.changed} changes that it names")
        gaps, changed = gaps + piece.raw[0], changed + piece.changed


def write_stream(pieces: Sequence[Packed]) -> NDArray[np.uint8]:
    """A delta's byte stream: a header, a table of the pieces, then their frames."""
    form = _FORMATS[any(len(piece.lows) for piece in pieces)]
    stream: list[Frame] = [_HEAD.pack(_MAGIC, form, 0, len(pieces))]
    for piece in pieces:
        run, lengths = piece.run, map(len, piece.frames)
        low_bits = LOW_BITS if len(piece.lows) else 0
        row = _ROW.pack(run.start, run.values, piece.changed, run.width, low_bits, *piece.raw[::2], *lengths)
        stream.append(row)
    stream += [part for piece in pieces for part in (*piece.frames, piece.lows)]
    return np.frombuffer(b"".join(stream), dtype=np.uint8)


def joined(parts: Iterable[Sequence[Packed]]) -> NDArray[np.uint8]:
    """One delta's byte stream from the pieces of several ranks, which each have rows of their own."""
    return write_stream(sorted((piece for part in parts for piece in part), key=lambda piece: piece.run.start))


def stream_bytes(pieces: Iterable[Packed]) -> int:
    return sum(_ROW.size + piece.num_bytes for piece in pieces)


def table_end(stream: NDArray[np.uint8], wait_for: Callable[[int], object]) -> int:
    """Where the first frame of a delta begins. `wait_for` returns once the bytes up to an offset are here."""
    wait_for(min(_HEAD.size, len(stream)))
    count = _HEAD.unpack(stream[: _HEAD.size].tobytes())[3] if len(stream) >= _HEAD.size else 0
    return min(_HEAD.size + int(count) * _ROW.size, len(stream))


def read_stream(stream: NDArray[np.uint8]) -> list[Packed]:
    """The pieces of a delta, which are views of its byte stream. Raises DeltaError."""
    view = memoryview(stream)  # type: ignore[arg-type]  # numpy arrays are buffers; its stubs say so from 3.12 on
    if len(view) < _HEAD.size:
        raise DeltaError("a delta has at least a header")
    magic, form, _, count = _HEAD.unpack_from(view)
    at = _HEAD.size + count * _ROW.size
    if magic != _MAGIC or form not in _FORMATS or at > len(view):
        raise DeltaError("these bytes do not start as a delta does")
    pieces, end = [], 0
    for row in range(count):
        of_row = _ROW.unpack_from(view, _HEAD.size + row * _ROW.size)
        start, values, changed, width, low_bits, gaps, escapes, *lengths = of_row
        lengths.append(changed if low_bits else 0)
        sound = width in UNSIGNED and start >= end and start % width == 0 and changed <= values <= MAX_PIECE_VALUES
        sound = sound and low_bits in ((0,) if form == _FORMATS[0] else (0, LOW_BITS))
        if not sound or gaps > values or escapes > changed * width or at + sum(lengths) > len(view):
            raise DeltaError(f"row {row} of the table of pieces makes no sense")
        frames = []
        for length in lengths:
            frames.append(view[at : at + length])
            at += length
        pieces.append(
            Packed(
                run=Stretch(start=start, values=values, width=width),
                changed=changed,
                raw=(gaps, changed, escapes),
                frames=(frames[0], frames[1], frames[2]),
                lows=frames[3],
            )
        )
        end = start + values * width
    if at != len(view):
        raise DeltaError(f"{len(view) - at} bytes follow the last piece")
    return pieces


def encode(
    rows: Rows,
    old: NDArray[np.uint8],
    new: NDArray[np.uint8],
    threads: ThreadPoolExecutor,
    moved: Callable[[], object] = lambda: None,
    *,
    sparse: bool = True,
) -> list[tuple[Changes, Packed]]:
    """The changes between two states of `rows`, with their bytes, of the runs that have any.

    `moved` is called after each run, on its thread; `sparse` as of `pack`.
    """

    def one(run: Stretch, at: int) -> tuple[Changes, Packed]:
        found = changes(run, words_of(old, run, at), words_of(new, run, at))
        made = found, pack(found, sparse=sparse)
        moved()
        return made

    return [pair for pair in threads.map(one, rows.runs, rows.at) if pair[1].changed]


def merge(deltas: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """One delta that does what `deltas` do one after the other. Raises DeltaError.

    It has low bytes of gaps only if they have some. Time grows with the changes; memory is one block for each thread.
    """
    by_block: dict[tuple[int, int], list[Packed]] = {}
    pieces = [piece for stream in deltas for piece in read_stream(stream)]
    sparse = any(len(piece.lows) for piece in pieces)
    for piece in pieces:
        run = piece.run
        first = run.start // run.width
        for block in range(first // BLOCK_VALUES, (first + run.values - 1) // BLOCK_VALUES + 1):
            by_block.setdefault((run.width, block), []).append(piece)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS), thread_name_prefix="delta-merge") as threads:
        merged = threads.map(lambda key: _merge_block(key[0], key[1], by_block[key], sparse=sparse), by_block)
        return joined([[piece for piece in merged if piece is not None]])


def _merge_block(width: int, block: int, pieces: Sequence[Packed], *, sparse: bool) -> Packed | None:
    begin = block * BLOCK_VALUES
    steps = np.zeros(BLOCK_VALUES, dtype=UNSIGNED[width])
    for piece in pieces:
        found = unpack(piece)
        places = found.places + (piece.run.start // width - begin)
        here = slice(*np.searchsorted(places, (0, BLOCK_VALUES)))
        steps[places[here]] += found.steps[here]  # a piece names each place once
    places = np.flatnonzero(steps)
    if not len(places):
        return None
    start = int(places[0])  # not that of the block: before it may lie elements of another width
    run = Stretch(start=(begin + start) * width, values=int(places[-1]) + 1 - start, width=width)
    return pack(Changes(run=run, places=places - start, steps=steps[places]), sparse=sparse)
