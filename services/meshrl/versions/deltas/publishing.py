"""Decides for each streamed version whether it leaves as a delta, and makes it, from what was published last.

Used by the stream transport on rank 0. A version goes in full where there is nothing to lead from, where its delta
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
from meshrl.versions.deltas.codec import encode, join, words_of
from meshrl.versions.deltas.digests import Edit, lanes_after, lanes_of
from meshrl.versions.transports.base import VersionLine
from meshrl.wire.manifest import SUM128, chunks_of, delta_manifest
from meshrl.wire.types import Manifest, TensorEntry, Transport

PAYS_BELOW = 0.5  # of the full version's bytes
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class OutgoingVersion:
    """What leaves: a manifest and the bytes that it names; `image` are the weights in full, `full` their manifest."""

    manifest: Manifest
    payload: Bytes
    full: Manifest
    image: Bytes


class DeltaMaker:
    """Versions of one line, one after the other."""

    def __init__(self, line: VersionLine, *, anchor_every: int, chunk_bytes: int, threads: ThreadPoolExecutor) -> None:
        """`anchor_every`: a version in full after so many deltas."""
        self._line, self._anchor_every, self._chunk_bytes = line, anchor_every, chunk_bytes
        self._threads = threads
        self._published: OutgoingVersion | None = None
        self._made: OutgoingVersion | None = None
        self._deltas = 0  # since the last version in full

    def make(self, version: int, plan: Sequence[TensorEntry], image: Bytes) -> OutgoingVersion:
        """What leaves of a version whose byte stream is `image`. One that is asked for once more goes in full."""
        last, refused = self._published, self._made is not None and self._made.manifest.version == version
        if last is not None and last.manifest.version == version and np.array_equal(last.image, image):
            return last
        follows = last is not None and not refused and last.manifest.version < version
        if last is not None and follows and _same(plan, last.full.tensors):
            self._made = self._delta(version, last, image)
        else:
            self._made = self._full(version, self._digested(plan, image), image)
        return self._made

    def delivered(self, version: int) -> None:
        """The hub has taken the version: the next one leads from it."""
        made, self._made = self._made, None
        if made is not None and made.manifest.version == version:
            self._published = made
            self._deltas = 0 if made.manifest is made.full else self._deltas + 1

    def _delta(self, version: int, last: OutgoingVersion, image: Bytes) -> OutgoingVersion:
        pairs = encode(last.full.tensors, last.image, image, self._threads)
        edits = [
            Edit(
                at=found.run.start + found.places * found.run.width,
                old=words_of(last.image, found.run)[found.places],
                new=words_of(image, found.run)[found.places],
            )
            for found, _ in pairs
        ]
        lanes = lanes_after(last.full.tensors, lanes_of(last.full.tensors), last.image, edits, self._threads)
        tensors = tuple(
            replace(entry, digest=digest.astype("<u8").tobytes())
            for entry, digest in zip(last.full.tensors, lanes, strict=True)
        )
        payload = join([packed for _, packed in pairs])
        share = len(payload) / max(1, len(image))
        changed = sum(len(edit.at) * edit.new.itemsize for edit in edits) / max(1, len(image))
        if share > PAYS_BELOW or self._deltas >= self._anchor_every:
            logger.info("version {} leaves in full: {:.1%} of its weights changed", version, changed)
            return self._full(version, tensors, image)
        logger.info("version {} leaves as a delta: {:.2%} changed, {:.2%} of its bytes", version, changed, share)
        full = self._line.manifest(version, Transport.STREAM, tensors, digest_algorithm=SUM128)
        manifest = delta_manifest(last.full, full, chunks_of(payload.data, self._chunk_bytes))
        return OutgoingVersion(manifest=manifest, payload=payload, full=full, image=image)

    def _full(self, version: int, tensors: tuple[TensorEntry, ...], image: Bytes) -> OutgoingVersion:
        chunks = chunks_of(image.data, self._chunk_bytes)
        manifest = self._line.manifest(version, Transport.STREAM, tensors, chunks, digest_algorithm=SUM128)
        return OutgoingVersion(manifest=manifest, payload=image, full=manifest, image=image)

    def _digested(self, plan: Sequence[TensorEntry], image: Bytes) -> tuple[TensorEntry, ...]:
        def digest(entry: TensorEntry) -> TensorEntry:
            data = torch.from_numpy(image[entry.offset : entry.offset + entry.num_bytes])
            return replace(entry, digest=digest_bytes(sum128(data)))

        return tuple(self._threads.map(digest, plan))


def _same(plan: Sequence[TensorEntry], tensors: Sequence[TensorEntry]) -> bool:
    """Whether two versions have the same tensors in the same places."""
    layouts = [[(entry.name, entry.dtype, entry.shape) for entry in entries] for entries in (plan, tensors)]
    return layouts[0] == layouts[1]
