"""Makes a delta of weights on a GPU, and decodes one there.

The bytes are those of `codec.encode`. Elements are compared in areas of many runs at once, since each step over an area
costs a few kernels whatever its size. An area in which much changes is halved, which bounds the memory. Only two or
three bytes a change are copied to the host, to compress.

Legend: C changes of an area or a batch, R runs of an area.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from numpy.typing import NDArray

from meshrl.versions.deltas.codec import (
    ESCAPE,
    LOW_BITS,
    DeltaError,
    Packed,
    Rows,
    Stretch,
    batches,
    check_counts,
    compress,
    is_sparse,
    lows_of,
    streams_of,
)

AREA_VALUES = 2**27
AREA_CHANGES = 2**22  # from which on an area is halved: each takes about 100 bytes meanwhile
DECODED_CHANGES = 2**23  # at once: each takes about 50 bytes meanwhile
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Placed = tuple[Stretch, int]
"""A run, and where it begins in the buffers."""


@torch.no_grad()
def encode_on_device(
    rows: Rows, old: torch.Tensor, new: torch.Tensor, threads: ThreadPoolExecutor, *, sparse: bool = True
) -> list[Packed]:
    """The pieces of the runs that have changes, in stream order.

    `old` and `new` (bytes,) uint8 are two states of `rows`; `old` may be in pinned host memory. `sparse` as of
    `codec.pack`.
    """
    waiting: list[Future[Packed]] = []
    areas = list(_areas(list(zip(rows.runs, rows.at, strict=True))))[::-1]
    while areas:
        area = areas.pop()
        first, last = area[0][1], area[-1][1] + area[-1][0].values * area[-1][0].width
        dtype = _SIGNED[area[0][0].width]
        before = old[first:last].to(new.device, non_blocking=True).view(dtype)
        after = new[first:last].view(dtype)
        differs = before != after
        if len(area) > 1 and int(differs.sum()) > AREA_CHANGES:
            areas += [area[len(area) // 2 :], area[: len(area) // 2]]
            continue
        borders = [(at - first) // area[0][0].width for _, at in area]
        places, runs = torch.nonzero(differs).squeeze(1), [run for run, _ in area]
        streams = _streams(before, after, places, borders, runs, may_be_sparse=sparse)
        for (run, _), (changed, *of_run) in zip(area, streams, strict=True):
            if changed:
                waiting.append(threads.submit(compress, run, changed, tuple(of_run)))
    return [piece.result() for piece in waiting]


def _areas(runs: Sequence[Placed]) -> Iterator[list[Placed]]:
    area: list[Placed] = []
    values = 0
    for run, at in runs:
        if area and (area[0][0].width != run.width or values + run.values > AREA_VALUES):
            yield area
            area, values = [], 0
        area.append((run, at))
        values += run.values
    if area:
        yield area


def _streams(
    old: torch.Tensor,
    new: torch.Tensor,
    places_C: torch.Tensor,
    borders: Sequence[int],
    runs: Sequence[Stretch],
    *,
    may_be_sparse: bool,
) -> Iterator[tuple[int, NDArray, NDArray, NDArray, NDArray]]:  # type: ignore[type-arg]  # bytes of four streams
    """Of each run of an area: how many elements change, then what `compress` takes."""
    nothing = torch.empty(0, dtype=torch.uint8).numpy()
    if not len(places_C):
        return iter([(0, *(nothing,) * 4)] * len(borders))
    borders_R = torch.tensor([*borders, len(old)], device=old.device)
    edges_R = torch.searchsorted(places_C, borders_R)
    gaps_C = torch.diff(places_C, prepend=places_C.new_full((1,), -1)) - 1
    changed_R = edges_R[:-1] < edges_R[1:]
    firsts = edges_R[:-1][changed_R]
    gaps_C[firsts] = places_C[firsts] - borders_R[:-1][changed_R]  # the first of a run counts from its start
    changes_R = edges_R.diff()
    counted = zip(runs, changes_R.tolist(), strict=True)
    sparse, lows = [may_be_sparse and is_sparse(run, changed) for run, changed in counted], nothing
    if any(sparse):
        sparse_R = torch.tensor(sparse, device=old.device)
        sparse_C = torch.repeat_interleave(sparse_R, changes_R, output_size=len(places_C))
        lows = gaps_C.to(torch.uint8).cpu().numpy()
        gaps_C = torch.where(sparse_C, gaps_C >> LOW_BITS, gaps_C)
    skips_C = gaps_C // ESCAPE
    ends_C = torch.cumsum(skips_C + 1, dim=0)
    codes_C = _codes(old[places_C], new[places_C])
    wide_C = (codes_C >= ESCAPE) | (codes_C < 0)  # below 0 are unsigned numbers of 64 bits
    counts = torch.stack([ends_C, torch.cumsum(wide_C, dim=0)])
    counts = torch.cat([counts.new_zeros((2, 1)), counts], dim=1)[:, edges_R]
    edges, gap_edges, escape_edges = torch.cat([edges_R[None], counts]).tolist()
    gap_bytes = torch.full((gap_edges[-1],), ESCAPE, dtype=torch.uint8, device=old.device)
    gap_bytes[ends_C - 1] = (gaps_C - skips_C * ESCAPE).to(torch.uint8)
    steps = torch.where(wide_C, ESCAPE, codes_C).to(torch.uint8).cpu().numpy()
    escapes = codes_C[wide_C].to(old.dtype).view(torch.uint8).cpu().numpy()
    gaps = gap_bytes.cpu().numpy()
    width = old.itemsize
    return iter(
        [
            (
                edges[run + 1] - edges[run],
                gaps[gap_edges[run] : gap_edges[run + 1]],
                steps[edges[run] : edges[run + 1]],
                escapes[escape_edges[run] * width : escape_edges[run + 1] * width],
                lows[edges[run] : edges[run + 1]] if sparse[run] else nothing,
            )
            for run in range(len(borders))
        ]
    )


def _codes(old_C: torch.Tensor, new_C: torch.Tensor) -> torch.Tensor:
    """(C,) int64: the steps between signed integers of the elements' bits, in zigzag, without the 0 (see `words`)."""
    bits = 8 * old_C.itemsize
    steps = _wrapped(_places(new_C.long(), bits) - _places(old_C.long(), bits), bits)
    return ((steps << 1) ^ (steps >> 63)) - 1


def _places(signed: torch.Tensor, bits: int) -> torch.Tensor:
    """The places of signed integers in the order of the floats; its own inverse."""
    return torch.where(signed < 0, -1 - signed - (1 << (bits - 1)), signed)


def _wrapped(number: torch.Tensor, bits: int) -> torch.Tensor:
    """Modulo 2^bits, from -2^(bits-1) on."""
    half = 1 << (bits - 1)
    return number if bits == 64 else ((number + half) & ((1 << bits) - 1)) - half


def moved_bits(words_C: torch.Tensor, steps_C: torch.Tensor) -> torch.Tensor:
    """Signed integers of elements' bits after so many steps each."""
    bits = 8 * words_C.itemsize
    return _places(_wrapped(_places(words_C.long(), bits) + steps_C, bits), bits).to(words_C.dtype)


def decode_on_device(
    pieces: Sequence[Packed], device: torch.device, num_threads: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Of each batch of pieces: the width of its elements (4 bytes at most), which elements (C,) of the byte stream
    change, rising, and by how many steps (C,). Raises DeltaError.
    """
    for group in batches([piece for piece in pieces if piece.changed], DECODED_CHANGES):
        streams = streams_of(group, num_threads)
        check_counts(group, *streams[:2])
        width = group[0].run.width
        gaps, steps = (torch.from_numpy(stream).to(device) for stream in streams[:2])
        ends = gaps < ESCAPE
        counts, sizes, begins, values, low_bits = torch.tensor(
            [
                (each.changed, each.raw[0], each.run.start // width, each.run.values, LOW_BITS * bool(len(each.lows)))
                for each in group
            ],
            device=device,
        ).T
        onward = gaps.long()
        if (lows := lows_of(group)) is not None:
            onward <<= torch.repeat_interleave(low_bits, sizes, output_size=len(gaps))
            onward[ends] += torch.from_numpy(lows).to(device)
        passed = torch.cumsum(onward + ends, dim=0)  # places count from each piece's own start
        before = torch.cat([passed.new_zeros(1), passed[torch.cumsum(sizes, dim=0)[:-1] - 1]])
        at_C = passed[ends] + torch.repeat_interleave(begins - 1 - before, counts, output_size=len(steps))
        if bool((at_C[torch.cumsum(counts, dim=0) - 1] >= begins + values).any()):
            raise DeltaError("a piece changes an element beyond its own")
        codes_C = steps.long()
        if len(streams[2]):
            escapes = torch.from_numpy(streams[2].view(f"<i{width}")).to(device)
            codes_C[steps == ESCAPE] = escapes.long() & ((1 << 8 * width) - 1)
        codes_C += 1
        yield width, at_C, (codes_C >> 1) ^ -(codes_C & 1)
