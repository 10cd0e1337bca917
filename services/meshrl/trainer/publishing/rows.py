"""How a sharded model's rows make up a version: which rank brings which bytes, the same on every rank.

The ranks of the first replica bring them out; the others hold the same rows and only take part in collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from meshrl.models.state import own_rows, published_tensors
from meshrl.training.parallel.rank_group import SHARD, RankGroup
from meshrl.versions.collective.plan import buckets
from meshrl.versions.dtypes import TORCH_DTYPES, dtype_name
from meshrl.wire.manifest import layout_signature, plan_tensors
from meshrl.wire.types import CollectivePlan, TensorEntry


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The layout of versions of one model: its tensors in stream order, and how senders share them."""

    plans: tuple[TensorEntry, ...]
    collective: CollectivePlan

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype | None, *, num_senders: int, bucket_bytes: int) -> Rows:
        published = published_tensors(model, dtype)
        plans = plan_tensors((tensor.name, dtype_name(tensor.dtype), tensor.shape) for tensor in published)
        whole = {tensor.name for tensor in published if not tensor.in_rows}
        return cls(
            plans=plans,
            collective=CollectivePlan(
                num_senders=num_senders,
                bucket_bytes=bucket_bytes,
                whole_tensors=tuple(i for i, plan in enumerate(plans) if plan.name in whole and num_senders > 1),
            ),
        )

    @property
    def num_bytes(self) -> int:
        return sum(plan.num_bytes for plan in self.plans)

    @property
    def layout(self) -> bytes:
        """The layout signature of versions."""
        return layout_signature((plan.name, plan.dtype, plan.shape) for plan in self.plans)

    def tensors(self) -> tuple[TensorEntry, ...]:
        """What a manifest lists, without digests."""
        return self.plans

    def spans(self, sender: int) -> Iterator[tuple[TensorEntry, int, int]]:
        """(tensor, start, end): the bytes of each tensor that a sender brings, in stream order."""
        for bucket in buckets(self.tensors(), self.collective):
            for piece in bucket.pieces[sender]:
                yield self.plans[piece.tensor], piece.start, piece.end


def num_senders(parallel: RankGroup) -> int:
    """Ranks of the first replica, which are the first ranks."""
    return 1 if parallel.mesh is None else parallel.mesh[SHARD].size()


@dataclass(frozen=True, kw_only=True, eq=False)
class RowBytes:
    """One sender's bytes of a version: `flat` (bytes,) uint8 has them one after the other, as `spans` of the stream."""

    flat: torch.Tensor
    spans: tuple[tuple[int, int], ...]  # (offset in the stream, length)
    ready: torch.cuda.Event | None  # when the copy on the device is over


@torch.no_grad()
def copy_rows(model: nn.Module, dtype: torch.dtype | None, rows: Rows, sender: int, reuse: RowBytes | None) -> RowBytes:
    """Casts and copies this rank's rows aside; collective. `reuse` is an earlier copy that nobody needs any more."""
    own = own_rows(model, dtype)
    spans = tuple(rows.spans(sender)) if sender < rows.collective.num_senders else ()
    device = next(iter(own.values())).device
    num_bytes = sum(end - start for _, start, end in spans)
    fits = reuse is not None and reuse.flat.numel() == num_bytes and reuse.flat.device == device
    flat = reuse.flat if fits and reuse is not None else torch.empty(num_bytes, dtype=torch.uint8, device=device)
    at = 0
    for plan, start, end in spans:
        target = flat[at : at + end - start].view(TORCH_DTYPES[plan.dtype])
        target.copy_(own[plan.name].reshape(-1), non_blocking=True)
        at += end - start
    ready = None
    if device.type == "cuda":
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
        ready.record()
    return RowBytes(
        flat=flat, spans=tuple((plan.offset + start, end - start) for plan, start, end in spans), ready=ready
    )
