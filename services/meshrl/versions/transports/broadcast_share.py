"""One sender rank's share of the broadcast transport: joins groups of engines and sends them its snapshot.

Carries out the calls of rank 0's `BroadcastTransport` on a publishing thread. The training thread puts the newest
snapshot into `BroadcastShare.held`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import Store

from meshrl.versions.collective.communicator import reach_store
from meshrl.versions.collective.sending import Sender
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import HeldSnapshot, Snapshot
from meshrl.versions.transports.base import Answer, PublishCall
from meshrl.wire.errors import MeshError, Reason


@dataclass(frozen=True, kw_only=True)
class MeetEngines(PublishCall):
    """Leave the group before, and meet the receivers of a new one."""

    generation: int
    num_receivers: int
    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class SendVersion(PublishCall):
    """Send the group the rank's rows of a version."""

    version: int


class BroadcastShare:
    """One sender rank's share of the broadcasts."""

    calls = (MeetEngines, SendVersion)

    def __init__(
        self, *, sender: int, device: torch.device, store_address: str, backend: str, deadline_s: float
    ) -> None:
        """`deadline_s`: how long a transfer may stand still, and this rank's training may lag behind rank 0's."""
        self.held: HeldSnapshot[Snapshot] = HeldSnapshot()
        self.progress = Progress()
        self._sender, self._device, self._backend = sender, device, backend
        self._store_address, self._deadline_s = store_address, deadline_s
        self._store: Store | None = None
        self._group: Sender | None = None
        self._lock = threading.Lock()
        self._sending = False

    def carry_out(self, call: MeetEngines | SendVersion) -> Answer:
        """Meets the receivers of a group, or sends what this rank holds."""
        if isinstance(call, MeetEngines):
            self.leave()
            if self._store is None:
                self._store = reach_store(self._store_address, deadline_s=call.deadline_s)
            self._group = Sender.meet(
                self._store,
                generation=call.generation,
                backend=self._backend,
                sender=self._sender,
                num_receivers=call.num_receivers,
                device=self._device,
                deadline_s=call.deadline_s,
            )
        else:
            self._send(call.version)
        return {}

    def leave(self) -> None:
        """Ends the group, a send under way included; from any thread."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def release_snapshot(self) -> torch.Tensor | None:
        """Drops the last snapshot, since the training thread makes the next; a re-send of it is broken off.

        Returns the buffer of the last snapshot when nobody uses it any more.
        """
        snapshot = self.held.drop()
        with self._lock:
            if not self._sending:
                return None if snapshot is None else snapshot.flat
        self.leave()
        return None

    def _send(self, version: int) -> None:
        with self._lock:
            self._sending = True
        try:
            # Picked up after the flag is up, so that the training thread reuses no buffer that is about to be sent.
            snapshot = self.held.get(version, deadline_s=self._deadline_s)
            group = self._group
            if group is None:
                raise MeshError(Reason.GROUP_BROKEN, "this sender has left the group")
            group.send(snapshot, stall_s=self._deadline_s, moved=self.progress.moved)
        except MeshError:
            self.leave()
            raise
        finally:
            with self._lock:
                self._sending = False
