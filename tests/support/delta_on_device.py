"""Makes a delta where the weights are: on a GPU, two or three bytes a change come to the host, to be compressed there.

The same bytes as `codec.encode` makes from images in host memory. No publisher uses it yet: it measures, for
bench_deltas, what one on GPUs would gain. Elements are compared as integers, in areas of many
runs at once, since each step over an area costs a few kernels whatever its size.

Legend: C changes of an area, R runs of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from numpy.typing import NDArray

from meshrl.versions.deltas.codec import BLOCK_VALUES, ESCAPE, Packed, Stretch, packed

AREA_RUNS = 64
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def encode_on_device(
    old: torch.Tensor, new: torch.Tensor, runs: Sequence[Stretch], threads: ThreadPoolExecutor
) -> list[Packed]:
    """The pieces of the runs in which there are changes; `old` and `new` (bytes,) uint8 are whole byte streams."""
    waiting: list[Future[Packed]] = []
    for area in _areas(runs):
        first, last = area[0].start, area[-1].start + area[-1].values * area[-1].width
        dtype = _SIGNED[area[0].width]
        streams = _streams(old[first:last].view(dtype), new[first:last].view(dtype), len(area))
        for run, (changed, *of_run) in zip(area, streams, strict=True):
            if changed:
                waiting.append(threads.submit(packed, run, changed, tuple(of_run)))
    return [piece.result() for piece in waiting]


def _areas(runs: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Neighbouring runs of one width, all but the last of an area with BLOCK_VALUES elements."""
    area: list[Stretch] = []
    for run in runs:
        last = area[-1] if area else None
        follows = last is not None and last.start + last.values * last.width == run.start and last.width == run.width
        if area and not (follows and last is not None and last.values == BLOCK_VALUES and len(area) < AREA_RUNS):
            yield area
            area = []
        area.append(run)
    if area:
        yield area


def _streams(old: torch.Tensor, new: torch.Tensor, num_runs: int) -> Iterator[tuple[int, NDArray, NDArray, NDArray]]:  # type: ignore[type-arg]  # bytes of three streams
    """Of each run of an area: how many elements change, then its gaps, its steps and those that no byte holds."""
    places_C = torch.nonzero(old != new).squeeze(1)
    if not len(places_C):
        return iter([(0, *(torch.empty(0, dtype=torch.uint8).numpy(),) * 3)] * num_runs)
    within_C = places_C % BLOCK_VALUES
    gaps_C = torch.diff(places_C, prepend=places_C.new_full((1,), -1)) - 1
    gaps_C = torch.where(gaps_C > within_C, within_C, gaps_C)  # the first of a run counts from its start
    skips_C = gaps_C // ESCAPE
    ends_C = torch.cumsum(skips_C + 1, dim=0)
    codes_C = _codes(old[places_C], new[places_C])
    wide_C = (codes_C >= ESCAPE) | (codes_C < 0)  # below 0 are unsigned numbers of 64 bits
    borders_R = torch.arange(num_runs + 1, device=old.device) * BLOCK_VALUES
    edges_R = torch.searchsorted(places_C, borders_R)
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
            )
            for run in range(num_runs)
        ]
    )


def _codes(old_C: torch.Tensor, new_C: torch.Tensor) -> torch.Tensor:
    """(C,) int64: the steps between signed integers of the elements' bits, in zigzag, without the 0; `words` says how.

    Signed integers are the places of `words.ordered` but for the negative ones, which go the other way.
    """
    bits = 8 * old_C.itemsize
    lowest = -(1 << (bits - 1))
    old, new = (torch.where(side < 0, -1 - side + lowest, side) for side in (old_C.long(), new_C.long()))
    steps = new - old
    if bits < 64:  # modulo 2^bits, from -2^(bits-1) on
        steps = ((steps - lowest) & ((1 << bits) - 1)) + lowest
    return ((steps << 1) ^ (steps >> 63)) - 1
