"""Communicators for the nccl transport, made directly over a store and never part of torch's default group.

Every wait ends at a deadline, or when another thread breaks the group, with a MeshError GROUP_BROKEN.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, Work
from torch.distributed import AllToAllOptions, BroadcastOptions, DistStoreError, ProcessGroupGloo

from meshrl.core.clock import AwakeClock
from meshrl.wire.errors import MeshError, Reason

POLL_S = 0.0002
ATTEMPT_S = 1.0
NCCL_OP_S = 24 * 3600.0  # deadlines are kept here: torch's own would end the process
GLOO_OP_S = 300.0  # as above, but gloo knows no way to end an operation before
EXIT_WAIT_S = 10.0  # for what torch is at, at the end of the program
KEEP_S = GLOO_OP_S + 30.0  # an operation of gloo's that is under way has ended by then
# torch's watchdog and its monitor end the whole process a minute after they saw that a peer is gone. Here that is an
# error of one broadcast: what they would do is left undone. torch reads these when a group is made, and nowhere else.
NCCL_SETTINGS: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
GIVEN_UP_S = 1.0
_ENVIRONMENT = threading.Lock()  # the environment is the process's own, and so is this


def open_store(host: str, *, deadline_s: float) -> TCPStore:
    """A store at a free port. Raises MeshError GROUP_BROKEN.

    It listens at `host` and nowhere else: any process that reaches a store may read and write it.
    """

    def connect(attempt: timedelta) -> TCPStore:
        listening = _listen(host)
        address, bound = listening.getsockname()[:2]
        fd = listening.detach()  # from here on it belongs to the store
        return TCPStore(address, bound, is_master=True, wait_for_workers=False, timeout=attempt, master_listen_fd=fd)

    return _persist(connect, f"no store opens at {host}", deadline_s)


def reach_store(address: str, *, deadline_s: float) -> TCPStore:
    """A client of the store at host:port. Raises MeshError GROUP_BROKEN when nobody answers there."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise MeshError(Reason.GROUP_BROKEN, f"a store's address is host:port, got {address!r}")

    def connect(attempt: timedelta) -> TCPStore:
        return TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=attempt)

    return _persist(connect, f"no store answers at {host}:{port}", deadline_s)


def _listen(host: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        text = f"a store cannot listen at {host}: {error}; name an address of this host (weight_broadcast.host)"
        raise MeshError(Reason.GROUP_BROKEN, text) from error


def _persist(connect: Callable[[timedelta], TCPStore], failed: str, deadline_s: float) -> TCPStore:
    """Tries again: a connection attempt of torch's can get lost, and then takes all its time."""
    end_s = time.monotonic() + deadline_s
    while True:
        attempt_s = min(ATTEMPT_S, max(0.1, end_s - time.monotonic()))
        try:
            with _KEEPER.in_torch():
                store = connect(timedelta(seconds=attempt_s))
        except RuntimeError as error:
            if time.monotonic() >= end_s:
                raise MeshError(Reason.GROUP_BROKEN, f"{failed}: {error}") from error
        else:
            store.set_timeout(timedelta(seconds=deadline_s))
            return store


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """A broadcast or a scatter. On a GPU `event` comes once it is over; NCCL's call returns for a failed one, too."""

    work: Work
    event: torch.cuda.Event | None = None

    def arrived(self) -> bool:
        if self.event is None:
            return bool(self.work.is_completed())
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # torch has none

    def given_up(self) -> bool:
        """Whether the backend has ended it, arrived or not."""
        return self.event is not None and bool(self.work.is_completed())

    def order(self, device: torch.device) -> None:
        """Makes the current stream follow it. Raises RuntimeError when it failed with gloo."""
        if self.event is None:
            self.work.wait()
        else:
            torch.cuda.current_stream(device).wait_event(self.event)


class Communicator:
    def __init__(
        self, store: Store, *, generation: int, sender: int, rank: int, size: int, backend: str, device: torch.device,
        deadline_s: float, met: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Meets the others. Raises MeshError GROUP_BROKEN naming the ranks that did not come in time.

        `met` is called once all are here; that of rank 0 has ended before the constructor of any other rank ends.
        """
        self._name = f"group {generation}, sender {sender}"
        self._broken = threading.Event()
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch has none
        own = PrefixStore(f"g{generation}/s{sender}", store)
        self._size = size
        self._meet(own, rank, size, deadline_s)
        try:
            met()
            self._group = _process_group(own, rank, size, backend, device, deadline_s)
            if backend == "gloo":
                self._outlived = _KEEPER.outlive(self, self._group)
            probe = torch.full((1,), generation % 251 if rank == 0 else 255, dtype=torch.uint8, device=device)
            self.finish(self.broadcast(probe), deadline_s)
        except RuntimeError as error:
            raise MeshError(Reason.GROUP_BROKEN, f"{self._name}: no communicator: {error}") from error
        if int(probe) != generation % 251:
            raise MeshError(Reason.GROUP_BROKEN, f"{self._name}: the probe came back wrong")

    def _meet(self, store: Store, rank: int, size: int, deadline_s: float) -> None:
        end_s, other, own = time.monotonic() + deadline_s, 0, secrets.token_hex(8)
        while other < size:
            wait_s = min(ATTEMPT_S, max(0.05, end_s - time.monotonic()))  # in pieces, so that the program can end
            try:
                with _KEEPER.in_torch():
                    if other == 0 and store.compare_set(f"here/{rank}", "", own) != own.encode():
                        # A killed process, maybe. The others have its address, and would wait for it until the end.
                        text = f"{self._name}: rank {rank} was taken before, by another process"
                        raise MeshError(Reason.GROUP_BROKEN, text)
                    store.wait([f"here/{other}"], timedelta(seconds=wait_s))
                other += 1
            except RuntimeError as error:  # torch's DistStoreError, a timeout, or the store is gone
                if isinstance(error, DistStoreError) and time.monotonic() < end_s:
                    time.sleep(POLL_S)
                    continue
                text = f"{self._name}: rank {other} of {size} did not come within {deadline_s:g} s"
                raise MeshError(Reason.GROUP_BROKEN, text) from error

    def broadcast(self, flat: torch.Tensor) -> Operation:
        """Starts to send (rank 0) or fill (others) a contiguous buffer; ordered after the current stream."""
        options = BroadcastOptions()
        options.rootRank = 0
        return self._start(lambda: self._group.broadcast([flat], options))

    def scatter(self, flat: torch.Tensor, sizes: Sequence[int]) -> Operation:
        """As `broadcast` (rank 0), but of `flat` (sum of `sizes`,) uint8 each receiver gets its own piece."""
        nothing = [0] * self._size
        return self._start(
            lambda: self._group.alltoall_base(flat.new_empty(0), flat, nothing, [0, *sizes], AllToAllOptions())
        )

    def receive_piece(self, piece: torch.Tensor) -> Operation:
        """As `broadcast`, for this receiver's piece (uint8) of a scatter."""
        from_rank_0, nothing = [piece.numel(), *[0] * (self._size - 1)], [0] * self._size
        return self._start(
            lambda: self._group.alltoall_base(piece, piece.new_empty(0), from_rank_0, nothing, AllToAllOptions())
        )

    def _start(self, begin: Callable[[], Work]) -> Operation:
        if self._broken.is_set():
            raise MeshError(Reason.GROUP_BROKEN, f"{self._name} was ended")
        try:
            work = begin()
            if self._side is None:
                return Operation(work=work)
            with torch.cuda.stream(self._side):
                work.wait()  # the stream does, not this thread
                return Operation(work=work, event=self._side.record_event())
        except RuntimeError as error:  # ended by another thread just now, or the backend's word on an earlier failure
            self.abort()
            raise MeshError(Reason.GROUP_BROKEN, f"{self._name}: {error}") from error

    def finish(self, under_way: Operation, stall_s: float) -> None:
        """Waits until an operation is over on this side. Time in which this process stood still does not count."""
        clock = AwakeClock()
        end_s, text = clock() + stall_s, f"nothing moved for {stall_s:g} s"
        try:
            while not under_way.arrived():
                if self._broken.is_set():
                    raise MeshError(Reason.GROUP_BROKEN, f"{self._name} was ended")
                now_s = clock()
                if now_s > end_s:
                    self.abort()
                    raise MeshError(Reason.GROUP_BROKEN, f"{self._name}: {text}")
                if under_way.given_up() and now_s + GIVEN_UP_S < end_s:
                    end_s, text = now_s + GIVEN_UP_S, "a peer is gone"
                time.sleep(POLL_S)
            if self._broken.is_set():  # ended broadcasts arrive, too, with whatever was there
                raise MeshError(Reason.GROUP_BROKEN, f"{self._name} was ended")
            under_way.order(self._device)
        except RuntimeError as error:  # what the backend says about a peer that is gone
            self.abort()
            raise MeshError(Reason.GROUP_BROKEN, f"{self._name}: {error}") from error

    def abort(self) -> None:
        """Ends the group, an operation under way included; from any thread, more than once."""
        if self._broken.is_set():
            return
        self._broken.set()
        group = getattr(self, "_group", None)  # absent while it is still being made
        if group is not None:
            group.abort()


class _Keeper:
    """Keeps gloo groups for a while after their communicators are gone, and the interpreter while torch is at work.

    gloo cannot end an operation under way. A group whose last reference goes waits for its own with the interpreter's
    lock held, for minutes.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, object]] = deque()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._in_torch: set[int] = set()
        self._ending = False
        atexit.register(self._wait_for_torch)

    @contextlib.contextmanager
    def in_torch(self) -> Iterator[None]:
        """While torch connects or waits: a thread that returns from it as the interpreter ends would abort the process.

        Raises MeshError GROUP_BROKEN once the program ends.
        """
        mine = threading.get_ident()
        self._in_torch.add(mine)
        try:
            if self._ending:  # looked at after this thread is known to be in it
                raise MeshError(Reason.GROUP_BROKEN, "the program ends")
            yield
        finally:
            self._in_torch.discard(mine)

    def _wait_for_torch(self) -> None:
        self._ending = True
        end_s = time.monotonic() + EXIT_WAIT_S
        while self._in_torch and time.monotonic() < end_s:
            time.sleep(0.02)

    def outlive(self, owner: object, group: object) -> weakref.finalize[..., object]:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=_let_go, args=(self._kept,), name="group-keeper", daemon=True)
                self._thread.start()
        kept = weakref.finalize(owner, _keep, self._kept, group)
        kept.atexit = False
        return kept


def _keep(kept: deque[tuple[float, object]], group: object) -> None:
    """Called by the garbage collector in any thread: it takes no lock."""
    kept.append((time.monotonic() + KEEP_S, group))


def _let_go(kept: deque[tuple[float, object]]) -> None:
    while True:
        time.sleep(KEEP_S / 10)
        while kept and kept[0][0] < time.monotonic():
            kept.popleft()


_KEEPER = _Keeper()


def _process_group(store: Store, rank: int, size: int, backend: str, device: torch.device, deadline_s: float) -> Any:
    if backend == "gloo":
        with _KEEPER.in_torch():
            group = ProcessGroupGloo(store, rank, size, timedelta(seconds=max(1.0, deadline_s)))  # to connect to all
        group._set_default_timeout(timedelta(seconds=GLOO_OP_S))  # for what is done in it; torch has no other name
        return group
    if backend == "nccl" and device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL  # only builds with CUDA have it

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=NCCL_OP_S)  # torch has no other way to say so for a group of its own
        with _environment(NCCL_SETTINGS):
            return ProcessGroupNCCL(store, rank, size, options)
    raise MeshError(
        Reason.GROUP_BROKEN, f"backend {backend!r} does not work on {device.type}; use nccl on GPUs, or gloo"
    )


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Groups made elsewhere keep their variables."""
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
