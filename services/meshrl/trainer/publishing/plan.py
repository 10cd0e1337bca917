"""Which sender rank holds which bytes of a version of a sharded model; the same on every rank.

The ranks of the first replica are the senders; the others hold the same rows and only take part in collectives. Made
once at the start; read by the snapshotter of each rank and by rank 0's transport.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from meshrl.models.state import published_tensors
from meshrl.versions.dtypes import dtype_name
from meshrl.wire.manifest import layout_signature, plan_tensors
from meshrl.wire.types import CollectivePlan, TensorEntry


@dataclass(frozen=True, kw_only=True)
class PublishPlan:
    """The layout of versions of one model: its tensors in stream order, and how senders share them."""

    tensors: tuple[TensorEntry, ...]  # without digests
    collective: CollectivePlan

    @classmethod
    def of(
        cls, model: nn.Module, dtype: torch.dtype | None, *, num_senders: int = 1, bucket_bytes: int = 1
    ) -> PublishPlan:
        """The plan for a model whose floating-point weights are published as `dtype` (None: each as it is)."""
        published = published_tensors(model, dtype)
        tensors = plan_tensors((tensor.name, dtype_name(tensor.dtype), tensor.shape) for tensor in published)
        whole = {tensor.name for tensor in published if not tensor.in_rows}
        return cls(
            tensors=tensors,
            collective=CollectivePlan(
                num_senders=num_senders,
                bucket_bytes=bucket_bytes,
                whole_tensors=tuple(i for i, tensor in enumerate(tensors) if tensor.name in whole and num_senders > 1),
            ),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of a version."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def layout(self) -> bytes:
        """The layout signature of versions."""
        return layout_signature((tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors)
