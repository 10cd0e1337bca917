"""Decides for each streamed version whether it leaves as a delta, and makes it, from what was published last.

Used by the stream transports on rank 0. A version goes in full where there is nothing to lead from, where its delta
would not pay, every so often as an anchor for engines that join, and where the hub has refused the delta.

Blocking: call it off the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray

from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.deltas.codec import Rows, encode, join
from meshrl.versions.deltas.digests import edits_of, lanes_after, lanes_of, with_lanes
from meshrl.versions.transports.base import VersionLine
from meshrl.wire.manifest import SUM128, chunks_of, delta_manifest
from meshrl.wire.types import Manifest, TensorEntry, Transport

PAYS_BELOW = 0.5  # of the full version's bytes
Bytes = NDArray[np.uint8]


class DeltaRule:
    """Which versions of one line leave as deltas; for one version at a time."""

    def __init__(self, *, anchor_every: int) -> None:
        """`anchor_every`: a version in full after so many deltas."""
        self._anchor_every = anchor_every
        self._base: Manifest | None = None  # of the version delivered last, as if it had left in full
        self._made: tuple[Manifest, Manifest] | None = None  # what leaves, and the same in full
        self._deltas = 0  # since the last version in full

    def base_of(self, version: int, plan: Sequence[TensorEntry]) -> Manifest | None:
        """What a delta would lead from: the version delivered last, described as if in full.

        None where a version with these tensors goes in full, as one does that is asked for once more.
        """
        base = self._base
        refused = self._made is not None and self._made[0].version == version
        if base is None or refused or base.version >= version or not _same(plan, base.tensors):
            return None
        return base

    def pays(self, version: int, *, delta_bytes: int, changed_bytes: int, num_bytes: int) -> bool:
        """Whether a version of `num_bytes` leaves as a delta of `delta_bytes`; says so in the log."""
        share, changed = delta_bytes / max(1, num_bytes), changed_bytes / max(1, num_bytes)
        if share > PAYS_BELOW or self._deltas >= self._anchor_every:
            logger.info("version {} leaves in full: {:.1%} of its weights changed", version, changed)
            return False
        logger.info("version {} leaves as a delta: {:.2%} changed, {:.2%} of its bytes", version, changed, share)
        return True

    def made(self, manifest: Manifest, full: Manifest) -> None:
        """A version leaves with a manifest; `full` is the one that it would have in full."""
        self._made = (manifest, full)

    def delivered(self, version: int) -> None:
        """The hub has taken the version: the next one leads from it."""
        made, self._made = self._made, None
        if made is not None and made[0].version == version:
            self._base = made[1]
            self._deltas = 0 if made[0] is made[1] else self._deltas + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class OutgoingVersion:
    """What leaves: a manifest and the bytes that it names; `image` are the weights in full."""

    manifest: Manifest
    payload: Bytes
    image: Bytes


class DeltaMaker:
    """Versions of one line, one after the other, from all their weights in the memory of this host."""

    def __init__(self, line: VersionLine, *, anchor_every: int, chunk_bytes: int, threads: ThreadPoolExecutor) -> None:
        """`anchor_every`: a version in full after so many deltas."""
        self._line, self._chunk_bytes, self._threads = line, chunk_bytes, threads
        self._rule = DeltaRule(anchor_every=anchor_every)
        self._published: OutgoingVersion | None = None
        self._made: OutgoingVersion | None = None

    def make(self, version: int, plan: Sequence[TensorEntry], image: Bytes) -> OutgoingVersion:
        """What leaves of a version whose byte stream is `image`. One that is asked for once more goes in full."""
        last, base = self._published, self._rule.base_of(version, plan)
        if last is not None and last.manifest.version == version and np.array_equal(last.image, image):
            return last
        if last is not None and base is not None:
            self._made = self._delta(version, base, last.image, image)
        else:
            self._made = self._full(version, self._digested(plan, image), image)
        return self._made

    def delivered(self, version: int) -> None:
        """The hub has taken the version: the next one leads from it."""
        self._rule.delivered(version)
        made, self._made = self._made, None
        if made is not None and made.manifest.version == version:
            self._published = made

    def _delta(self, version: int, base: Manifest, old: Bytes, image: Bytes) -> OutgoingVersion:
        rows = Rows(base.tensors)
        pairs = encode(rows, old, image, self._threads)
        edits = edits_of([found for found, _ in pairs], rows, old, image)
        lanes = lanes_after(base.tensors, lanes_of(base.tensors), old.take, edits, self._threads)
        tensors = with_lanes(base.tensors, lanes)
        payload = join([packed for _, packed in pairs])
        changed = sum(edit.new.nbytes for edit in edits)
        pays = self._rule.pays(version, delta_bytes=len(payload), changed_bytes=changed, num_bytes=len(image))
        if not pays:
            return self._full(version, tensors, image)
        full = self._line.manifest(version, Transport.STREAM, tensors, digest_algorithm=SUM128)
        manifest = delta_manifest(base, full, chunks_of(payload.data, self._chunk_bytes, each=self._threads.map))
        self._rule.made(manifest, full)
        return OutgoingVersion(manifest=manifest, payload=payload, image=image)

    def _full(self, version: int, tensors: tuple[TensorEntry, ...], image: Bytes) -> OutgoingVersion:
        chunks = chunks_of(image.data, self._chunk_bytes, each=self._threads.map)
        manifest = self._line.manifest(version, Transport.STREAM, tensors, chunks, digest_algorithm=SUM128)
        self._rule.made(manifest, manifest)
        return OutgoingVersion(manifest=manifest, payload=image, image=image)

    def _digested(self, plan: Sequence[TensorEntry], image: Bytes) -> tuple[TensorEntry, ...]:
        def digest(entry: TensorEntry) -> TensorEntry:
            data = torch.from_numpy(image[entry.offset : entry.offset + entry.num_bytes])
            return replace(entry, digest=digest_bytes(sum128(data)))

        return tuple(self._threads.map(digest, plan))


def _same(plan: Sequence[TensorEntry], tensors: Sequence[TensorEntry]) -> bool:
    """Whether two versions have the same tensors in the same places."""
    layouts = [[(entry.name, entry.dtype, entry.shape) for entry in entries] for entries in (plan, tensors)]
    return layouts[0] == layouts[1]
