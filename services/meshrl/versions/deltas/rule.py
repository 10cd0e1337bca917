"""Decides on rank 0 which versions leave the trainer as deltas, and from which version each delta is made.

docs/weight-versions.md lists the versions that go in full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from loguru import logger

from meshrl.wire.types import Manifest, TensorEntry

PAYS_BELOW = 0.5  # of the full version's bytes
DENSE = 0.08  # of them; more than a quarter of the weights changed
FAST_LINK = 8e9
"""Bytes a second. A group that takes more has a version in full sooner than its delta is found and applied, which is
about 1 s on an H100 for the 8 GB of a 4B model."""
LOSES_BY_S = 1.0  # a delta that takes so much longer than a version in full; less is noise
FULL_TRIES, DELTA_TRIES = 3, 2  # the best of which counts


class DeltaRule:
    """For one `VersionLine`; called in the order `base_of`, `pays`, `delivered` of each version."""

    def __init__(self, *, anchor_every: int) -> None:
        self._anchor_every = anchor_every
        self._base: Manifest | None = None  # of the version delivered last, as if it had left in full
        self._deltas = 0  # since the last version in full
        self._sparse = False  # whether one of them may have low bytes of gaps
        self._next_sparse = True  # and whether the next one may
        self._warned_of_dense = False

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
        if share > DENSE and not self._warned_of_dense:
            self._warned_of_dense = True
            logger.warning(
                "{:.0%} of the weights changed with version {}; making and applying such deltas takes long: where"
                ' trainer and engines are on one site, weight_broadcast.deltas = "off" is faster', changed, version,
            )  # fmt: skip
        return True

    def delivered(self, manifest: Manifest, full: Manifest) -> None:
        """`full` describes the version as if it had left in full."""
        self._base = full
        self._deltas = 0 if manifest is full else self._deltas + 1
        self._sparse = self._deltas > 0 and (self._sparse or self._next_sparse)


class FasterWay:
    """Whether a version in full reaches a group of engines sooner than its delta, by what the last of both took here.

    The best of several counts: with the first ones NCCL sets up its channels, and kernels are compiled.
    """

    def __init__(self, *, is_fast: bool, again_after: int) -> None:
        """`is_fast`: so is the link, until `FULL_TRIES` versions in full have left. `again_after` so many versions in
        full a delta that lost is tried again."""
        self._is_fast, self._again_after = is_fast, again_after
        self._full: deque[tuple[float, int]] = deque(maxlen=FULL_TRIES)  # seconds and bytes
        self._delta_s: deque[float] = deque(maxlen=DELTA_TRIES)
        self._since = 0  # versions in full since the last delta

    @property
    def is_full_faster(self) -> bool:
        if len(self._full) < (FULL_TRIES if self._is_fast else 1):
            return self._is_fast
        full_s, num_bytes = min(self._full)
        return num_bytes > FAST_LINK * full_s or self._deltas_lose(full_s)

    def took_in_full(self, seconds: float, num_bytes: int) -> None:
        self._full.append((seconds, num_bytes))
        self._since += 1
        if self._since == self._again_after and self._delta_s:
            self._delta_s.popleft()

    def took_as_delta(self, seconds: float) -> None:
        """`seconds`: of making and sending it; also where it did not pay and the version left in full after all."""
        self._delta_s.append(seconds)
        self._since = 0
        if self._full and self._deltas_lose(full_s := min(self._full)[0]):
            logger.info(
                "the next {} versions leave in full, which took {:.1f} s: {} deltas took {:.1f} s or more",
                self._again_after, full_s, DELTA_TRIES, min(self._delta_s),
            )  # fmt: skip

    def _deltas_lose(self, full_s: float) -> bool:
        return len(self._delta_s) == DELTA_TRIES and min(self._delta_s) > full_s + LOSES_BY_S


def _layout(tensors: Sequence[TensorEntry]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(entry.name, entry.dtype, tuple(entry.shape)) for entry in tensors]
