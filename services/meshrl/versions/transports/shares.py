"""What all transports ask of a sender rank: digests of its rows of a version, and their changes since the base."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.versions.deltas.base_rows import BaseRows
from meshrl.versions.deltas.digests import with_lanes
from meshrl.versions.deltas.rule import DeltaRule
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import HeldSnapshot, SideStream, Snapshot
from meshrl.versions.transports.base import Answer, PublishCall, VersionCall
from meshrl.wire.types import TensorEntry


@dataclass(frozen=True, kw_only=True)
class EncodeRows(VersionCall):
    """Digest the rank's rows of a version and encode their changes since `base`; None: no delta is wanted.

    `sparse` as of `codec.pack`.
    """

    base: int | None
    sparse: bool = True


class SetBase(VersionCall):
    """The version was published: the next delta is from it."""


class SenderShare:
    """One sender rank's share. Its training thread puts the newest snapshot into `held`."""

    def __init__(self, *, deadline_s: float, num_threads: int) -> None:
        """`deadline_s`: how long this rank's training may lag behind rank 0's."""
        self.deadline_s = deadline_s
        self.held = HeldSnapshot()
        self.progress = Progress()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="version-rows")
        self.base = BaseRows(self._threads, self.progress)
        self._side = SideStream()
        self._pinned: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._reading = False

    def release_snapshot(self) -> torch.Tensor | None:
        """Drops the last snapshot, since the training thread makes the next; returns a free buffer, if any."""
        snapshot = self.held.drop()
        with self._lock:
            return self.base.free_buffer(None if self._reading else snapshot)

    @property
    def handlers(self) -> Mapping[type[PublishCall], Callable[[Any], Answer]]:
        """What carries out each kind of call; blocking. They raise MeshError and OSError."""
        return {EncodeRows: self._encode, SetBase: self._set_base}

    def carry_out(self, call: PublishCall) -> Answer:
        return self.handlers[type(call)](call)

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def bytes_of(self, snapshot: Snapshot) -> NDArray[np.uint8]:
        """In host memory; of a snapshot on a GPU they are valid until the next call."""
        if snapshot.ready is None:
            return snapshot.flat.numpy()
        with self._side.reading(snapshot):
            if self._pinned is None:
                self._pinned = torch.empty(snapshot.flat.shape, dtype=torch.uint8, pin_memory=True)
            self._pinned.copy_(snapshot.flat, non_blocking=True)
        return self._pinned.numpy()

    def _encode(self, call: EncodeRows) -> Answer:
        with self._snapshot(call.version) as snapshot, self._side.reading(snapshot):
            size, changed = self.base.encode(snapshot, call.base, sparse=call.sparse)
        lanes = self.base.lanes.astype("<u8").tobytes().hex()
        return {"bytes": {"delta": str(size), "changed": str(changed)}, "digests": {"lanes": lanes}}

    def _set_base(self, call: SetBase) -> Answer:
        # The version is out: it does not wait for a copy to the host.
        with self._snapshot(call.version) as snapshot, self._side.reading(snapshot, wait=False):
            self.base.keep(snapshot, call.version)
        return {}

    @contextmanager
    def _snapshot(self, version: int) -> Iterator[Snapshot]:
        with self._lock:
            self._reading = True
        try:
            # Picked up after the flag is up, so that the training thread reuses no buffer that is about to be sent.
            yield self.held.get(version, deadline_s=self.deadline_s)
        finally:
            with self._lock:
                self._reading = False


def digested(tensors: Sequence[TensorEntry], answers: Sequence[Answer]) -> tuple[TensorEntry, ...]:
    lanes = np.zeros((len(tensors), 2), dtype=np.uint64)
    for answer in answers:
        lanes += np.frombuffer(bytes.fromhex(answer["digests"]["lanes"]), dtype="<u8").reshape(-1, 2)
    return with_lanes(tensors, lanes)


def pays(rule: DeltaRule, version: int, answers: Sequence[Answer], num_bytes: int) -> bool:
    delta, changed = (sum(int(answer["bytes"][name]) for answer in answers) for name in ("delta", "changed"))
    return rule.pays(version, delta_bytes=delta, changed_bytes=changed, num_bytes=num_bytes)
