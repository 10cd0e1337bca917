"""The sending end of a broadcast: one sender rank of the trainer joins a group of engines and sends its snapshot.

Used by `BroadcastShare`; the other end is `receiving`. A snapshot (`versions.snapshot`) has its pieces in the order in
which they are sent, so nothing is copied once more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._distributed_c10d import Store

from meshrl.versions.collective.communicator import Communicator
from meshrl.versions.snapshot import Snapshot
from meshrl.wire.errors import MeshError, Reason


class Sender:
    """One sender rank's end of a group. Blocking: use it off the event loop and off the training thread."""

    def __init__(self, communicator: Communicator, *, sender: int, device: torch.device) -> None:
        self._communicator = communicator
        self._sender = sender
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch has none
        self._device = device

    @classmethod
    def meet(
        cls, store: Store, *, generation: int, backend: str, sender: int, num_receivers: int, device: torch.device,
        deadline_s: float,
    ) -> Sender:  # fmt: skip
        """Meets the receivers at `store`. Raises MeshError GROUP_BROKEN when they do not all come in time."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        communicator = Communicator(
            store, generation=generation, sender=sender, rank=0, size=1 + num_receivers, backend=backend,
            device=device, deadline_s=deadline_s,
        )  # fmt: skip
        return cls(communicator, sender=sender, device=device)

    def send(self, snapshot: Snapshot, *, stall_s: float, moved: Callable[[], object] = lambda: None) -> None:
        """Broadcasts a snapshot; returns when all its bytes have left. Raises MeshError GROUP_BROKEN.

        `moved` is called for each part that has.
        """
        if snapshot.sender != self._sender:
            raise MeshError(Reason.INTERNAL, f"sender {self._sender} was given the snapshot of {snapshot.sender}")
        if self._stream is None:
            self._send(snapshot, stall_s, moved)
            return
        torch.cuda.set_device(self._device)
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._send(snapshot, stall_s, moved)

    def _send(self, snapshot: Snapshot, stall_s: float, moved: Callable[[], object]) -> None:
        at, works = 0, []
        for bucket in snapshot.buckets:
            size = bucket.num_bytes(self._sender)
            if size:
                works.append(self._communicator.broadcast(snapshot.flat[at : at + size]))
                at += size
        for work in works:
            self._communicator.finish(work, stall_s)
            moved()

    def abort(self) -> None:
        """Ends the group, from any thread; a send under way raises GROUP_BROKEN."""
        self._communicator.abort()
