"""Decides on rank 0 which versions leave the trainer as deltas, and from which version each delta is made.

docs/weight-versions.md lists the versions that go in full.
"""

from __future__ import annotations

from collections.abc import Sequence

from loguru import logger

from meshrl.wire.types import Manifest, TensorEntry

PAYS_BELOW = 0.5  # of the full version's bytes


class DeltaRule:
    """For one `VersionLine`; called in the order `base_of`, `pays`, `delivered` of each version."""

    def __init__(self, *, anchor_every: int) -> None:
        self._anchor_every = anchor_every
        self._base: Manifest | None = None  # of the version delivered last, as if it had left in full
        self._deltas = 0  # since the last version in full
        self._sparse = False  # whether one of them may have low bytes of gaps
        self._next_sparse = True  # and whether the next one may

    def base_of(self, version: int, plan: Sequence[TensorEntry], *, sparse: bool = True) -> Manifest | None:
        """The version to make a delta from, described as if it had gone in full; None where `version` must go in full.

        `sparse`: all engines read gaps without their low bytes, which deltas before it may have.
        """
        base, self._next_sparse = self._base, sparse
        if base is None or base.version >= version or _layout(plan) != _layout(base.tensors):
            return None
        if self._sparse and not sparse:
            logger.info("version {} leaves in full: an engine of an older release reads no sparse deltas", version)
            return None
        if self._deltas >= self._anchor_every:
            logger.info("version {} leaves in full, after {} deltas", version, self._deltas)
            return None
        return base

    def pays(self, version: int, *, delta_bytes: int, changed_bytes: int, num_bytes: int) -> bool:
        share, changed = delta_bytes / max(1, num_bytes), changed_bytes / max(1, num_bytes)
        if share > PAYS_BELOW:
            logger.info("version {} leaves in full: {:.1%} of its weights changed", version, changed)
            return False
        logger.info("version {} leaves as a delta: {:.2%} changed, {:.2%} of its bytes", version, changed, share)
        return True

    def delivered(self, manifest: Manifest, full: Manifest) -> None:
        """`full` describes the version as if it had left in full."""
        self._base = full
        self._deltas = 0 if manifest is full else self._deltas + 1
        self._sparse = self._deltas > 0 and (self._sparse or self._next_sparse)


def _layout(tensors: Sequence[TensorEntry]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(entry.name, entry.dtype, tuple(entry.shape)) for entry in tensors]
