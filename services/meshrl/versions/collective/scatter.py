"""Which parts of a version go from each sender rank to each rank of an engine, where none gets more than it holds.

Ranks that know where a version's tensors lie in their parameters (`versions.placement`) offer that in the store of a
group. Where all have, and the busiest rank sends or receives less than by a broadcast, sender 0 sets a key before any
rank has met it. From the offers both ends compute the same messages: of each bucket one from each sender to each
receiver, with the receiver's parts of the sender's rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from loguru import logger
from torch._C._distributed_c10d import Store

from meshrl.versions.collective.plan import Bucket, Piece, PublishPlan
from meshrl.versions.layout import TORCH_DTYPES
from meshrl.versions.placement import Move
from meshrl.wire.types import TensorEntry

ALIGNMENT = 8  # bytes; no type has larger elements
_SCATTERED = "scattered"

Moves = Mapping[str, Sequence[Move]]
"""By tensor, the parts of it that a rank holds."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The parts that one rank holds; `engine` is its engine's first receiver."""

    engine: int
    moves: Moves


def write_offer(store: Store, receiver: int, offer: Offer) -> None:
    moves = [
        [move.tensor, move.from_offset, move.shape, move.from_stride]
        for moves in offer.moves.values()
        for move in moves
    ]
    store.set(_name(receiver), json.dumps({"engine": offer.engine, "moves": moves}))


def have_offered(store: Store, num_receivers: int) -> bool:
    return bool(store.check([_name(receiver) for receiver in range(num_receivers)]))


def read_offers(store: Store, plan: PublishPlan, num_receivers: int) -> list[Offer]:
    """The offers of all receivers, once they have made them.

    Raises RuntimeError when the store is gone, and ValueError, KeyError or TypeError for a malformed offer.
    """
    values = {entry.name: math.prod(entry.shape) for entry in plan.tensors}
    return [_parsed(store.get(_name(receiver)), values) for receiver in range(num_receivers)]


def scatter_offers(store: Store, plan: PublishPlan, num_receivers: int) -> list[Offer] | None:
    """The offers where a scatter pays; None where versions are to be broadcast."""
    if plan.collective.num_senders == 1 or not have_offered(store, num_receivers):
        return None
    try:
        offers = read_offers(store, plan, num_receivers)
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("versions are broadcast in full: an engine's rank offers what it cannot hold: {}", error)
        return None
    return offers if _is_whole(plan, offers) and _pays(plan, offers) else None


def announce(store: Store) -> None:
    """Makes a group that meets a scattered one; for sender 0."""
    store.set(_SCATTERED, "1")


def is_scattered(store: Store) -> bool:
    """Known to a rank that has met sender 0, or all receivers of another sender."""
    return bool(store.check([_SCATTERED]))


def _name(receiver: int) -> str:
    return f"offer/{receiver}"


def _parsed(text: bytes, values: Mapping[str, int]) -> Offer:
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("engine"), int):
        raise ValueError(f"an offer has an engine and moves, got {text[:80]!r}")
    moves: dict[str, list[Move]] = {}
    for tensor, offset, shape, stride in found["moves"]:
        numbers = (offset, *shape, *stride)
        if len(shape) != len(stride) or not all(isinstance(number, int) for number in numbers):
            raise ValueError(f"a part of {tensor!r} is {numbers}, not an offset, a shape and its strides")
        move = Move(
            tensor=tensor, parameter="", shape=tuple(shape), from_stride=tuple(stride), from_offset=offset,
            to_stride=(0,) * len(stride), to_offset=0,
        )  # fmt: skip
        if offset < 0 or min((*shape, *stride), default=0) < 1 or offset + move.extent > values.get(tensor, 0):
            raise ValueError(f"a part of {tensor!r}, {move.part}, is not within its {values.get(tensor, 0)} elements")
        moves.setdefault(tensor, []).append(move)
    return Offer(engine=found["engine"], moves=moves)


def _is_whole(plan: PublishPlan, offers: Sequence[Offer]) -> bool:
    """Whether each engine's ranks hold all of every tensor: else no digest shows it."""
    for engine in {offer.engine for offer in offers}:
        ranks = [offer.moves for offer in offers if offer.engine == engine]
        for entry in plan.tensors:
            parts = {move.part: move.values for moves in ranks for move in moves.get(entry.name, ())}
            if sum(parts.values()) != math.prod(entry.shape):
                return False
    return True


def _pays(plan: PublishPlan, offers: Sequence[Offer]) -> bool:
    sent, received = [0] * plan.collective.num_senders, [0] * len(offers)
    for bucket in plan.buckets:
        for sender in range(len(sent)):
            for receiver, offer in enumerate(offers):
                num_bytes = message(plan.tensors, bucket, sender, offer.moves).num_bytes
                sent[sender] += num_bytes
                received[receiver] += num_bytes
    return max(*sent, *received) < plan.num_bytes


# --- messages -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MessagePart:
    """A receiver's part of a sender's piece, at byte `at` of the message; it is all of `held`, or some of it."""

    piece: Piece
    held: Move
    move: Move
    dtype: torch.dtype
    at: int

    def within(self, message: torch.Tensor) -> torch.Tensor:
        num_bytes = self.move.values * self.dtype.itemsize
        return message[self.at : self.at + num_bytes].view(self.dtype).view(self.move.shape)

    def source(self, flat: torch.Tensor) -> torch.Tensor:
        piece = flat[self.piece.place].view(self.dtype)
        begin = self.move.from_offset - self.piece.start // self.dtype.itemsize
        return piece.as_strided(self.move.shape, self.move.from_stride, piece.storage_offset() + begin)


@dataclass(frozen=True, kw_only=True)
class Message:
    parts: tuple[MessagePart, ...]
    num_bytes: int


def message(tensors: Sequence[TensorEntry], bucket: Bucket, sender: int, moves: Moves) -> Message:
    parts, at = [], 0
    for piece in bucket.pieces[sender]:
        entry = tensors[piece.tensor]
        dtype = TORCH_DTYPES[entry.dtype]
        for held in moves.get(entry.name, ()):
            for move in clipped(held, piece.start // dtype.itemsize, piece.end // dtype.itemsize):
                parts.append(MessagePart(piece=piece, held=held, move=move, dtype=dtype, at=at))
                at += -(-move.values * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return Message(parts=tuple(parts), num_bytes=at)


def pack(messages: Collection[Message], flat: torch.Tensor, into: torch.Tensor) -> None:
    """Copies the parts of messages from the sender's buffer to `into`, one message after the other."""
    pairs, at = [], 0
    for each in messages:
        inside = into[at : at + each.num_bytes]
        pairs += [(part.within(inside), part.source(flat)) for part in each.parts]
        at += each.num_bytes
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def clipped(move: Move, start: int, end: int) -> Iterator[Move]:
    """The part of a move in elements [start, end) of its tensor, in few moves, in their order there.

    Their dimensions go from the widest stride in the tensor to the narrowest.
    """
    if end <= move.from_offset or move.from_offset + move.extent <= start:
        return
    steps = sorted(zip(move.from_stride, move.to_stride, move.shape, strict=True), reverse=True)
    strides, to_strides, shape = (tuple(each) for each in zip(*steps, strict=True))
    yield from _clipped(replace(move, shape=shape, from_stride=strides, to_stride=to_strides), 0, start, end)


def _clipped(move: Move, dim: int, start: int, end: int) -> Iterator[Move]:
    """As `clipped`, of a move with one element in each dimension before `dim`."""
    first, stride, size = move.from_offset, move.from_stride[dim], move.shape[dim]
    extent = move.extent - (size - 1) * stride  # of one of its slices
    low, high = max(0, (start - first - extent) // stride + 1), min(size, -((first - end) // stride))
    whole_low, whole_high = max(low, -((first - start) // stride)), min(high, (end - first - extent) // stride + 1)
    if whole_low >= whole_high:
        whole_low = whole_high = high

    def slices(begin: int, end: int) -> Move:
        shape = (*move.shape[:dim], end - begin, *move.shape[dim + 1 :])
        to_offset = move.to_offset + begin * move.to_stride[dim]
        return replace(move, shape=shape, from_offset=first + begin * stride, to_offset=to_offset)

    for index in range(low, whole_low):
        yield from _clipped(slices(index, index + 1), dim + 1, start, end)
    if whole_low < whole_high:
        yield slices(whole_low, whole_high)
    for index in range(whole_high, high):
        yield from _clipped(slices(index, index + 1), dim + 1, start, end)
