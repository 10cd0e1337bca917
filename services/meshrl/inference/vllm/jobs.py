"""Runs a vLLM worker's long work, such as filling a shadow, on a thread: one job after the other. Needs no vLLM."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypedDict

import torch

from meshrl.inference.out_of_memory import named_out_of_memory
from meshrl.wire.errors import MeshError, Reason

if TYPE_CHECKING:
    from meshrl.versions.placement import PartDigests

OUT_OF_MEMORY_REMEDY = (
    "lower inference.gpu_memory_utilization, which leaves less to the KV cache, or split the model over more GPUs"
    " (inference.tensor_parallel_size)"
)
SWITCH_S = 0.0002
BEFORE_DEADLINE_S = 600.0  # a checkpoint may be read to its end


class JobOutcome(TypedDict, total=False):
    seconds: float
    reason: str  # the name of a `Reason`
    message: str
    parts: PartDigests


class Job:
    """Work on the worker's device and a stream beside the model's, whose outcome the engine asks for.

    It begins once the job before it (`after`) has ended, since both write into one shadow, and on its stream: torch
    keeps memory for each stream, so a stream for each version would take ever more.
    """

    def __init__(
        self, work: Callable[[], None], device: torch.device, *, after: Job | None = None,
        doing: str = "a weight job", before_deadline_s: float = BEFORE_DEADLINE_S, ends: str = "",
    ) -> None:  # fmt: skip
        """`doing` names the work in an out-of-memory message; `ends` is a `JobEnds.address`."""
        self._work, self._device = work, device
        self._before: Job | None = after
        self._doing = doing
        self._before_deadline_s = before_deadline_s
        self._ends = ends
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device) if after is None else after._stream  # type: ignore[no-untyped-call]  # torch has none
        self.outcome: JobOutcome | None = None
        self._thread = threading.Thread(target=self._run, name="meshrl-weights", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began_s = time.perf_counter()
        try:
            before, self._before = self._before, None  # no chain of jobs is kept
            if before is not None and not before.join(self._before_deadline_s):
                text = f"the weight job before this one did not end within {self._before_deadline_s:g} s"
                raise MeshError(Reason.DEADLINE_PASSED, text)
            if self._stream is not None:
                torch.cuda.set_device(self._device)
            named = named_out_of_memory(doing=self._doing, device=self._device, remedy=OUT_OF_MEMORY_REMEDY)
            with named, torch.no_grad(), torch.cuda.stream(self._stream), _quick_switches():  # None: no stream
                self._work()
                if self._stream is not None:
                    self._stream.synchronize()
        except MeshError as error:
            self.outcome = {"reason": error.reason.name, "message": error.message}
        except Exception as error:  # noqa: BLE001 - a thread has no caller: the engine gets it as the outcome
            self.outcome = {"reason": Reason.LAYOUT_MISMATCH.name, "message": f"{type(error).__name__}: {error}"}
        else:
            self.outcome = {"seconds": time.perf_counter() - began_s}
        finally:
            if self._ends:
                # Blocked or refused: ends that nobody has looked at wait there, or the program is on another host.
                with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                    sender.setblocking(False)
                    sender.sendto(b".", self._ends)

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Lets threads hand the interpreter's lock on sooner: a wait for the device ends with one for that lock, of 5 ms
    beside a model that is stepped from Python."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class JobEnds:
    """Receives a datagram for each job that ends on this host."""

    def __init__(self) -> None:
        self.address = f"\0meshrl-jobs-{secrets.token_hex(16)}"  # Linux keeps such a name in memory, without a file
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self.address)

    def drain(self) -> None:
        """Forgets those of earlier jobs, such as the ends of other workers than the first."""
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(1)

    async def next(self, timeout_s: float) -> bool:
        """Also one before this call; False when none came within `timeout_s`."""
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._socket, 1), timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
