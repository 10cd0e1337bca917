"""Where the elements of a version's tensors lie in an engine's own parameters: learned once, then used for deltas.

Engines hold tensors fused, divided over ranks, and under other names. A `PlacementTracer` watches the copies by which a
version is loaded. With this `WeightPlacement` a delta changes the parameters in place, and each rank digests the parts
that it holds.

Legend: C changes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl.versions.collective.digest import Words, WordSums, on_gpu, sum128, sum128_at, sum128_rows
from meshrl.versions.deltas.codec import DeltaError, read_stream
from meshrl.versions.deltas.on_device import decode_on_device, moved_bits
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.tensors import DTYPES
from meshrl.wire.types import Manifest

KERNEL_CHANGES, KERNEL_PROGRAMS = 1024, 256  # of a program at once; for one part at most
MOST_OF_ROW = 2**28
DIGEST_VALUES = 2**22  # of a part in columns, digested at once
_WORDS = {2: torch.int16, 4: torch.int32}
_FILLS = ("aten::fill_", "aten::zero_")


PartDigests = Mapping[str, Mapping[str, tuple[int, Sequence[int]]]]
"""By tensor and part of it: the elements of the part, and its two lanes of the tensor's digest."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A part of a tensor, and where it lies in a parameter: views of the same shape, in elements."""

    tensor: str
    parameter: str
    shape: tuple[int, ...]
    from_stride: tuple[int, ...]
    from_offset: int
    to_stride: tuple[int, ...]
    to_offset: int

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements of the tensor from the first of the part to the last."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.from_stride, strict=True))

    @property
    def part(self) -> str:
        """Names the part of the tensor: ranks that hold the same one have the same name for it."""
        return f"{self.from_offset}:{self.shape}:{self.from_stride}"

    @property
    def is_run(self) -> bool:
        return self.from_stride == (1,)

    @property
    def is_rows(self) -> bool:
        """Whether it is a run in tensor and parameter, or rows of one distance each, as of experts and of columns."""
        if self.from_stride[-1] != 1 or self.to_stride[-1] != 1:
            return False
        return len(self.shape) == 1 or (len(self.shape) == 2 and self.shape[1] < MOST_OF_ROW)

    def words(self, held: torch.Tensor) -> Words:
        """Of a part that `is_rows`, in the parameter on a GPU, of 2 bytes or more an element."""
        halves = held.itemsize // 2
        address = held.data_ptr() + self.to_offset * held.itemsize
        rows = () if self.is_run else (self.shape[-1], self.to_stride[0], self.from_stride[0])
        return Words(address, *(halves * each for each in (self.values, self.from_offset, *rows)))

    def of(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        held = parameters[self.parameter]
        return held.as_strided(self.shape, self.to_stride, held.storage_offset() + self.to_offset)

    def locate(self, at_C: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Of elements between the part's first and last: which are in it (None: all), and where in the parameter."""
        rest = at_C - self.from_offset
        if self.is_run:
            return None, rest * self.to_stride[0] + self.to_offset
        where, inside = torch.full_like(at_C, self.to_offset), torch.ones_like(at_C, dtype=torch.bool)
        for stride, to_stride, size in sorted(
            zip(self.from_stride, self.to_stride, self.shape, strict=True), reverse=True
        ):
            index = rest if stride == 1 else rest // stride
            inside &= index < size
            where += index * to_stride
            rest = rest - index * stride
        inside &= rest == 0
        return inside, torch.where(inside, where, self.to_offset)


def _change(move: Move, parameter: torch.Tensor, at_C: torch.Tensor, steps_C: torch.Tensor) -> None:
    """Moves elements by so many steps, without a wait for the device."""
    inside, where = move.locate(at_C)
    words = parameter.view(-1).view(_WORDS[parameter.itemsize])
    before = words[where]
    after = moved_bits(before, steps_C)
    if inside is None:
        words[where] = after
    else:
        words.index_add_(0, where, torch.where(inside, after - before, 0))  # the others stand for an element that stays


def _change_runs(rows: Sequence[tuple[int, ...]], bits: int, at_C: torch.Tensor, steps_C: torch.Tensor) -> None:
    """As `_change`, in many parameters of a GPU; rows as of `change_words`."""
    # compiled once a process; Triton is there only where torch has a GPU
    from meshrl.versions.deltas.change_kernel import change_words

    most = max(end - begin for begin, end, *_ in rows)
    grid = (len(rows), min(KERNEL_PROGRAMS, -(-most // KERNEL_CHANGES)))
    with torch.cuda.device(at_C.device):  # Triton launches on the thread's device, whatever the tensor's is
        change_words[grid](on_gpu(rows, at_C.device), at_C, steps_C, BITS=bits, CHANGES=KERNEL_CHANGES)


Steps = Sequence[tuple[int, int, int]]  # (size, stride in the tensor, stride in the parameter) of each dimension


def _move(tensor: str, parameter: str, from_offset: int, to_offset: int, steps: Steps) -> Move:
    found: list[tuple[int, int, int]] = []
    for size, stride, to_stride in steps:
        if found and found[-1][1:] == (size * stride, size * to_stride):
            found[-1] = (found[-1][0] * size, stride, to_stride)
        elif size > 1:
            found.append((size, stride, to_stride))
    sizes, strides, to_strides = zip(*(found or [(1, 1, 1)]), strict=True)
    return Move(
        tensor=tensor, parameter=parameter, shape=sizes, from_stride=strides, from_offset=from_offset,
        to_stride=to_strides, to_offset=to_offset,
    )  # fmt: skip


def _joined_moves(moves: Sequence[Move]) -> list[Move]:
    series: list[tuple[Move, int, int, int]] = []  # the first, how many, and the distances between them
    for move in moves:
        if series:
            first, count, step, to_step = series[-1]
            ahead, to_ahead = move.from_offset - first.from_offset, move.to_offset - first.to_offset
            alike = replace(first, from_offset=move.from_offset, to_offset=move.to_offset) == move
            if alike and count == 1 and ahead >= first.extent and to_ahead > 0:
                step, to_step = ahead, to_ahead
            if alike and step and (ahead, to_ahead) == (count * step, count * to_step):
                series[-1] = (first, count + 1, step, to_step)
                continue
        series.append((move, 1, 0, 0))
    return [
        _move(
            first.tensor, first.parameter, first.from_offset, first.to_offset,
            [(count, step, to_step), *zip(first.shape, first.from_stride, first.to_stride, strict=True)],
        )
        for first, count, step, to_step in series
    ]  # fmt: skip


class PlacementTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Watches copies into some parameters while it is entered; `sources` are the tensors copied from."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.obstacle = next((f"{name} has gaps" for name, p in parameters.items() if not p.is_contiguous()), "")
        self.parameters = parameters
        self._targets = _Ranges(parameters.items())
        self._sources = _Ranges(())
        self._moves: list[Move] = []
        self._filled: set[str] = set()

    def sources(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> PlacementTracer:
        self._sources = _Ranges(tensors)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for each in value if isinstance(value, list | tuple) else (value,):
                        if isinstance(each, torch.Tensor) and (target := self._targets.find(each)) is not None:
                            self._note(func._schema.name, target, each, args)
        return result

    def _note(self, operation: str, target: str, view: torch.Tensor, args: Sequence[Any]) -> None:
        if operation in _FILLS:
            self._filled.add(target)
            return
        source = args[1] if operation == "aten::copy_" else None
        tensor = self._sources.find(source) if isinstance(source, torch.Tensor) else None
        plain = source is not None and source.shape == view.shape and source.dtype == view.dtype
        if source is None or tensor is None or not plain or 0 in (*source.stride(), *view.stride()):
            self.obstacle = self.obstacle or f"{operation} makes {target} of more than copies"
            return
        at, to = self._sources.offset(tensor, source), self._targets.offset(target, view)
        steps = list(zip(view.shape, source.stride(), view.stride(), strict=True))
        self._moves.append(_move(tensor, target, at, to, steps))

    def placement(self) -> WeightPlacement | None:
        """None if not all of the parameters were seen; `obstacle` has the reason."""
        seen = dict.fromkeys(self.parameters, 0)
        for move in self._moves:
            seen[move.parameter] += move.values
        for name, parameter in self.parameters.items():
            if seen[name] > parameter.numel():
                self.obstacle = self.obstacle or f"{name} is written twice"
            if seen[name] < parameter.numel() and name not in self._filled:
                self.obstacle = self.obstacle or f"not all of {name} was seen"
        return None if self.obstacle else WeightPlacement(_joined_moves(self._moves))


class _Ranges:
    """Tensors by the memory that they take."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._starts = {name: tensor.data_ptr() for name, tensor in tensors if tensor.numel()}
        ends = {name: tensor.data_ptr() + tensor.numel() * tensor.itemsize for name, tensor in tensors}
        self._order = sorted((start, ends[name], name) for name, start in self._starts.items())

    def find(self, view: torch.Tensor) -> str | None:
        at = view.data_ptr()
        return next((name for start, end, name in self._order if view.numel() and start <= at < end), None)

    def offset(self, name: str, view: torch.Tensor) -> int:
        return (view.data_ptr() - self._starts[name]) // view.itemsize


class WeightPlacement:
    """The parts of a version's tensors that one rank holds. Blocking."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves: dict[str, list[Move]] = {}
        for move in moves:
            self._moves.setdefault(move.tensor, []).append(move)

    @classmethod
    def whole(cls, tensors: Mapping[str, torch.Tensor]) -> WeightPlacement:
        """Every tensor is a parameter, by the same name."""
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        return cls([_move(name, name, 0, 0, [(size, 1, 1)]) for name, size in sizes.items() if size])

    @property
    def tensors(self) -> Collection[str]:
        return self._moves.keys()

    @property
    def moves(self) -> Mapping[str, Sequence[Move]]:
        return self._moves

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor]) -> None:
        pairs = [
            (
                move.of(parameters),
                whole.as_strided(move.shape, move.from_stride, whole.storage_offset() + move.from_offset),
            )
            for name, whole in tensors
            for move in self._moves.get(name, ())
        ]
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

    @torch.no_grad()
    def patch(
        self, manifest: Manifest, delta: NDArray[np.uint8], parameters: Mapping[str, torch.Tensor], num_threads: int
    ) -> None:
        """Takes parameters from the base of a delta to its result. Raises MeshError NOT_SUPPORTED, DIGEST_MISMATCH."""
        device = next(iter(parameters.values())).device
        try:
            pieces = read_stream(delta)
            if odd := {piece.run.width for piece in pieces} - _WORDS.keys():
                raise MeshError(Reason.NOT_SUPPORTED, f"elements of {min(odd)} bytes are not changed in place")
            if pieces and pieces[-1].run.start + pieces[-1].run.values * pieces[-1].run.width > manifest.num_bytes:
                raise DeltaError("it changes what lies beyond the weights")
            for width, at_C, steps_C in decode_on_device(pieces, device, num_threads):
                at_once: list[tuple[int, ...]] = []
                for first, move, begin, end in self._spans(manifest, width, at_C):
                    if move is None:
                        raise DeltaError(f"it changes elements of {width} bytes that have another size")
                    parameter = parameters[move.parameter]
                    if at_C.device.type == "cuda" and move.is_run:
                        run = (first + move.from_offset, move.to_stride[0], move.to_offset)
                        at_once.append((begin, end, parameter.data_ptr(), *run))
                    else:
                        _change(move, parameter, at_C[begin:end] - first, steps_C[begin:end])
                if at_once:
                    _change_runs(at_once, 8 * width, at_C, steps_C)
        except DeltaError as error:
            text = f"the delta to version {manifest.version} is refused: {error}"
            raise MeshError(Reason.DIGEST_MISMATCH, text) from error

    def _spans(self, manifest: Manifest, width: int, at_C: torch.Tensor) -> Iterator[tuple[int, Move | None, int, int]]:
        """(first element of its tensor, move or None for another width, begin, end) of the changes in each move."""
        spans: list[tuple[int, Move | None, int, int]] = []
        for entry in manifest.tensors:
            first = entry.offset // width
            if DTYPES[entry.dtype].itemsize != width:
                spans.append((first, None, first, (entry.offset + entry.num_bytes) // width))
            else:
                for move in self._moves.get(entry.name, ()):
                    start = first + move.from_offset
                    spans.append((first, move, start, start + move.extent))
        borders = torch.tensor([border for *_, start, end in spans for border in (start, end)], device=at_C.device)
        edges = iter(torch.searchsorted(at_C, borders).tolist())
        for (first, found, *_), begin, end in zip(spans, edges, edges, strict=False):
            if begin < end:
                yield first, found, begin, end

    @torch.no_grad()
    def digests(self, parameters: Mapping[str, torch.Tensor], tensors: Collection[str] | None = None) -> PartDigests:
        """Of all parts, or of those of some tensors."""
        named = self._moves if tensors is None else {name: self._moves[name] for name in tensors}
        parts = [(tensor, move) for tensor, moves in named.items() for move in moves]
        device = next(iter(parameters.values())).device
        lanes = torch.zeros((len(parts), 2), dtype=torch.int64, device=device)
        at_once: dict[bool, dict[int, Words]] = {False: {}, True: {}}
        for index, (_, move) in enumerate(parts):
            held = parameters[move.parameter]
            if device.type == "cuda" and held.itemsize > 1 and move.is_rows:
                words = move.words(held)
                at_once[words.width > 0][index] = words
            else:
                lanes[index] = _lanes(move, move.of(parameters))
        for alike in filter(None, at_once.values()):
            sums = WordSums(list(alike.values()), device)
            sums.add(0, len(alike))
            lanes[on_gpu(list(alike), device)] = sums.lanes()
        found: dict[str, dict[str, tuple[int, Sequence[int]]]] = {tensor: {} for tensor in named}
        for (tensor, move), of_part in zip(parts, lanes.tolist(), strict=True):
            found[tensor][move.part] = (move.values, of_part)
        return found


def _lanes(move: Move, view: torch.Tensor) -> torch.Tensor:
    if move.is_run:
        return sum128(view.contiguous(), move.from_offset * view.itemsize // 2)
    if view.device.type == "cpu" and move.from_stride[-1] == 1 and view.itemsize > 1:
        starts = np.full((), move.from_offset, dtype=np.uint64)
        for size, stride in zip(move.shape[:-1], move.from_stride[:-1], strict=True):
            starts = starts[..., None] + np.arange(size, dtype=np.uint64) * np.uint64(stride)
        return sum128_rows(view.reshape(-1, view.shape[-1]), starts.reshape(-1) * np.uint64(view.itemsize // 2))
    lanes = torch.zeros(2, dtype=torch.int64, device=view.device)
    rows = max(1, DIGEST_VALUES // max(1, view[0].numel()))
    for first in range(0, len(view), rows):
        some = view[first : first + rows]
        at = torch.full((), move.from_offset + first * move.from_stride[0], dtype=torch.int64, device=view.device)
        for size, stride in zip(some.shape, move.from_stride, strict=True):
            at = at[..., None] + torch.arange(size, device=view.device) * stride
        lanes += sum128_at(some.contiguous(), at.reshape(-1))
    return lanes


def check_parts(manifest: Manifest, of_ranks: Sequence[PartDigests]) -> None:
    """Checks the parts that all ranks of an engine hold. Raises MeshError DIGEST_MISMATCH naming the tensor."""
    for entry in manifest.tensors:
        parts: dict[str, tuple[int, Sequence[int]]] = {}
        copies = [found for rank in of_ranks for found in rank.get(entry.name, {}).items()]
        parts.update(copies)
        same = all(list(parts[name][1]) == list(found[1]) for name, found in copies)
        lanes = [sum(found[1][lane] for found in parts.values()) % 2**64 for lane in range(2)]
        whole = sum(values for values, _ in parts.values()) == math.prod(entry.shape)
        if not whole or not same or b"".join(lane.to_bytes(8, "little") for lane in lanes) != entry.digest:
            text = f"tensor {entry.name!r} of version {manifest.version} is not what its manifest lists"
            raise MeshError(Reason.DIGEST_MISMATCH, text)
