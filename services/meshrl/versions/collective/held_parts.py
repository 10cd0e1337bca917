"""Takes the parts that a rank of an engine holds out of what its senders have sent, to their places, and digests them.

A GPU copies and digests the parts of a bucket in one pass, by a table that is made once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from meshrl.versions.collective.digest import Words, WordSums
from meshrl.versions.collective.plan import PublishPlan
from meshrl.versions.collective.scatter import MessagePart, message
from meshrl.versions.placement import PartDigests, WeightPlacement


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Where a part lies in a bucket as it arrives: from byte `at` on, with strides in elements."""

    part: MessagePart
    at: int
    strides: tuple[int, ...]

    def source(self, bucket: torch.Tensor) -> torch.Tensor:
        shape, dtype = self.part.move.shape, self.part.dtype
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, self.strides, strict=True))
        there = bucket[self.at : self.at + extent * dtype.itemsize]
        if there.storage_offset() % dtype.itemsize:
            there = there.clone()  # behind a part of a narrower type
        values = there.view(dtype)
        return values.as_strided(shape, self.strides, values.storage_offset())

    def words(self, bucket: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> Words | None:
        """None: no kernel copies it."""
        move, held = self.part.move, parameters[self.part.move.parameter]
        if held.itemsize == 1 or not move.is_rows or self.at % 2:
            return None
        to = move.words(held)
        step = self.strides[0] * held.itemsize // 2 if to.width else 0
        return to._replace(address=bucket.data_ptr() + self.at, step=step, target=to.address, target_step=to.step)


class HeldParts:
    """Of versions of one form in a group, whose buckets arrive in two buffers in turns."""

    def __init__(self, plan: PublishPlan, placement: WeightPlacement, *, scattered: bool) -> None:
        """`scattered`: of each bucket come messages with the rank's parts, and not the senders' whole pieces."""
        self.plan, self._placement = plan, placement
        self.sizes: list[list[int]] = []
        """Of each bucket, the bytes of each sender."""

        self._arrivals: list[list[Arrival]] = []  # of each bucket
        for bucket in plan.buckets:
            messages = [message(plan.tensors, bucket, sender, placement.moves) for sender in range(len(bucket.spans))]
            whole = [end - begin for begin, end in bucket.spans]
            sizes = [each.num_bytes for each in messages] if scattered else whole
            arrivals = []
            for each, (begin, _), at in zip(messages, bucket.spans, accumulate(sizes, initial=0), strict=False):
                for part in each.parts:
                    move, itemsize = part.move, part.dtype.itemsize
                    if scattered:
                        there, strides = part.at, torch.empty(move.shape, device="meta").stride()
                    else:
                        there = part.piece.at - begin + move.from_offset * itemsize - part.piece.start
                        strides = move.from_stride
                    arrivals.append(Arrival(part=part, at=at + there, strides=strides))
            self.sizes.append(sizes)
            self._arrivals.append(arrivals)
        self._tables: _Tables | None = None

    def are_of(self, plan: PublishPlan) -> bool:
        forms = [[(entry.name, entry.num_bytes) for entry in each.tensors] for each in (self.plan, plan)]
        return self.plan.collective == plan.collective and forms[0] == forms[1]

    def open(self, buffers: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        """Before a version is taken."""
        memory = tuple(each.data_ptr() for each in (*buffers, *parameters.values()))
        if self._tables is None or self._tables.memory != memory:
            self._tables = _Tables(self._arrivals, buffers, parameters, memory)

    def take(self, turn: int, bucket: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> None:
        """Takes the parts of a bucket; on a GPU after what is on the current stream, and without a wait."""
        assert self._tables is not None, "it is open"
        self._tables.take(turn)
        pairs = [(each.part.move.of(parameters), each.source(bucket)) for each in self._tables.others[turn]]
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

    def digests(self, parameters: Mapping[str, torch.Tensor]) -> PartDigests:
        """Of all parts, once all buckets are taken; waits for the device."""
        assert self._tables is not None, "it is open"
        found, rest = self._tables.digests(), self._tables.digested_last
        return {**found, **self._placement.digests(parameters, rest)} if rest else found


class _Tables:
    """What the GPU copies and digests in one pass. Has addresses of weights and buffers, and keeps neither."""

    def __init__(
        self, arrivals: Sequence[Sequence[Arrival]], buffers: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor], memory: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.memory = memory
        self.others: list[list[Arrival]] = []  # of each bucket, what is copied by torch
        device = buffers[0].device
        kinds: dict[bool, list[tuple[int, Arrival, Words]]] = {False: [], True: []}
        for turn, bucket in enumerate(arrivals):
            others = []
            for each in bucket:
                words = each.words(buffers[turn % 2], parameters) if device.type == "cuda" else None
                if words is None:
                    others.append(each)
                else:
                    kinds[words.width > 0].append((turn, each, words))
            self.others.append(others)
        self.digested_last = {each.part.held.tensor for others in self.others for each in others}
        self._kinds = [
            (
                [id(each.part.held) for _, each, _ in rows],
                np.searchsorted([turn for turn, *_ in rows], np.arange(len(arrivals) + 1)).tolist(),
                WordSums([words for *_, words in rows], device),
            )
            for rows in filter(None, kinds.values())
        ]
        held = {id(each.part.held): each.part.held for rows in kinds.values() for _, each, _ in rows}
        self._named = [(key, each.tensor, each.part, each.values) for key, each in held.items()]

    def take(self, turn: int) -> None:
        for _, begins, sums in self._kinds:
            if begins[turn] < begins[turn + 1]:
                sums.add(begins[turn], begins[turn + 1])

    def digests(self) -> PartDigests:
        lanes: dict[int, list[int]] = {}
        for keys, _, sums in self._kinds:
            for key, some in zip(keys, sums.lanes().tolist(), strict=True):
                if (others := lanes.get(key)) is not None:  # of the other pieces that it came in
                    some = [(a + b + 2**63) % 2**64 - 2**63 for a, b in zip(others, some, strict=True)]
                lanes[key] = some
        found: dict[str, dict[str, tuple[int, Sequence[int]]]] = {}
        for key, tensor, part, values in self._named:
            found.setdefault(tensor, {})[part] = (values, lanes[key])
        return found
