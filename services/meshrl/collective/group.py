"""Communicators for the nccl transport, made directly over a store and never part of torch's default group.

Every wait ends: at a deadline, or when another thread breaks the group. What went wrong is a MeshError GROUP_BROKEN.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from meshrl.wire.errors import MeshError, Reason

POLL_S = 0.0002
ATTEMPT_S = 1.0
NCCL_OP_S = 24 * 3600.0  # deadlines are kept here: torch's own would end the process
GLOO_OP_S = 300.0  # also how long gloo looks for its peers, which have met just before


def open_store(host: str, port: int = 0, *, deadline_s: float) -> TCPStore:
    """The store that a publisher hosts; its `port` is a free one unless given. Raises MeshError GROUP_BROKEN."""
    return _store(host, port, deadline_s, is_master=True)


def reach_store(address: str, *, deadline_s: float) -> TCPStore:
    """A client of the store at host:port. Raises MeshError GROUP_BROKEN when nobody answers there."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise MeshError(Reason.GROUP_BROKEN, f"a store's address is host:port, got {address!r}")
    return _store(host.strip("[]"), int(port), deadline_s, is_master=False)


def _store(host: str, port: int, deadline_s: float, *, is_master: bool) -> TCPStore:
    """Tries again and again: a connection attempt of torch's can get lost, and then takes all its time."""
    end_s = time.monotonic() + deadline_s
    while True:
        attempt_s = min(ATTEMPT_S, max(0.1, end_s - time.monotonic()))
        try:
            store = TCPStore(
                host, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=attempt_s)
            )
        except RuntimeError as error:
            if time.monotonic() >= end_s:
                text = f"no store {'opens' if is_master else 'answers'} at {host}:{port}: {error}"
                raise MeshError(Reason.GROUP_BROKEN, text) from error
        else:
            store.set_timeout(timedelta(seconds=deadline_s))
            return store


class Communicator:
    """One sender (rank 0) and its receivers; broadcasts from rank 0."""

    def __init__(
        self, store: Store, *, generation: int, sender: int, rank: int, size: int, backend: str, device: torch.device,
        deadline_s: float,
    ) -> None:  # fmt: skip
        """Meets the others. Raises MeshError GROUP_BROKEN naming the ranks that did not come in time."""
        self._name = f"group {generation}, sender {sender}"
        self._broken = threading.Event()
        own = PrefixStore(f"g{generation}/s{sender}", store)
        self._meet(own, rank, size, deadline_s)
        try:
            self._group = _process_group(own, rank, size, backend, device)
            probe = torch.full((1,), generation % 251 if rank == 0 else 255, dtype=torch.uint8, device=device)
            self.finish(self.broadcast(probe), deadline_s)
        except RuntimeError as error:
            raise MeshError(Reason.GROUP_BROKEN, f"{self._name}: no communicator: {error}") from error
        if int(probe) != generation % 251:
            raise MeshError(Reason.GROUP_BROKEN, f"{self._name}: the probe came back wrong")

    def _meet(self, store: Store, rank: int, size: int, deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        try:
            store.set(f"here/{rank}", "1")
            for other in range(size):
                left_s = max(0.05, end_s - time.monotonic())
                store.wait([f"here/{other}"], timedelta(seconds=left_s))
        except RuntimeError as error:  # torch's DistStoreError, a timeout, or the store is gone
            text = f"{self._name}: rank {other} of {size} did not come within {deadline_s:g} s"
            raise MeshError(Reason.GROUP_BROKEN, text) from error

    def broadcast(self, flat: torch.Tensor) -> Any:
        """Starts to send (rank 0) or to fill (the others) a contiguous buffer; ordered after the current stream."""
        if self._broken.is_set():
            raise MeshError(Reason.GROUP_BROKEN, f"{self._name} was ended")
        options = BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([flat], options)

    def finish(self, work: Any, stall_s: float) -> None:
        """Waits until a broadcast is over on this side. Raises MeshError GROUP_BROKEN."""
        end_s = time.monotonic() + stall_s
        try:
            while not work.is_completed():
                if self._broken.is_set():
                    raise MeshError(Reason.GROUP_BROKEN, f"{self._name} was ended")
                if time.monotonic() > end_s:
                    self.abort()
                    raise MeshError(Reason.GROUP_BROKEN, f"{self._name}: nothing moved for {stall_s:g} s")
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as error:  # what the backend says about a peer that is gone
            self.abort()
            raise MeshError(Reason.GROUP_BROKEN, f"{self._name}: {error}") from error

    def abort(self) -> None:
        """Ends the group, a broadcast under way included; safe from any thread, more than once."""
        if self._broken.is_set():
            return
        self._broken.set()
        group = getattr(self, "_group", None)  # absent while it is still being made
        if group is not None:
            group.abort()


def _process_group(store: Store, rank: int, size: int, backend: str, device: torch.device) -> Any:
    if backend == "gloo":
        return ProcessGroupGloo(store, rank, size, timedelta(seconds=GLOO_OP_S))
    if backend == "nccl" and device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL  # only builds with CUDA have it

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=NCCL_OP_S)  # torch has no other way to say so for a group of its own
        return ProcessGroupNCCL(store, rank, size, options)
    raise MeshError(
        Reason.GROUP_BROKEN, f"backend {backend!r} does not work on {device.type}; use nccl on GPUs, or gloo"
    )
