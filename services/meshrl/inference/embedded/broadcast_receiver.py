"""The embedded engine's rank in a group of the nccl transport: joins it, receives broadcast versions, leaves it.

Used by `Staging`, which puts the received tensors into the shadow. Calls into a group block, so each runs on a daemon
thread and is waited for until its deadline at most; the event loop and the engine's thread never block.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import torch
from loguru import logger

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import JoinGroup, Manifest

if TYPE_CHECKING:
    from meshrl.versions.collective.broadcasting import Receiver, ReceiveTimes, Sink

GRACE_S = 5.0  # beyond a deadline that the other side keeps itself
STALL_S = 30.0  # without a byte, after which a transfer ends

Result = TypeVar("Result")


class BroadcastReceiver:
    """One rank in at most one group at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._receiver: Receiver | None = None
        self._transfer: asyncio.Future[ReceiveTimes] | None = None

    async def join(self, group: JoinGroup) -> None:
        """Leaves the group before and meets the others. Raises MeshError GROUP_BROKEN when they do not all come."""
        await self.leave()
        from meshrl.versions.collective.broadcasting import Receiver  # torch.distributed is for engines in groups only

        meeting = _on_thread(lambda: Receiver.join(group, index=0, device=self._device))
        try:
            async with asyncio.timeout(group.deadline_s + GRACE_S):
                receiver = await asyncio.shield(meeting)
        except TimeoutError as error:
            meeting.add_done_callback(_close_late)
            text = f"group {group.generation} did not meet within {group.deadline_s:g} s"
            raise MeshError(Reason.GROUP_BROKEN, text) from error
        except asyncio.CancelledError:
            meeting.add_done_callback(_close_late)
            raise
        before, self._receiver = self._receiver, receiver
        if before is not None:  # two joined at once: the later one stays
            await _close(before)

    async def receive(self, manifest: Manifest, sink: Sink) -> None:
        """Takes a version's tensors. A transfer that fails or is cancelled ends the group."""
        receiver = self._receiver
        if receiver is None:
            raise MeshError(
                Reason.GROUP_BROKEN, f"version {manifest.version} travels in a group; this engine is in none"
            )
        self._transfer = _on_thread(lambda: receiver.receive(manifest, sink, stall_s=STALL_S))
        try:
            times = await asyncio.shield(self._transfer)
        except BaseException:  # cancelled, too: the senders must not wait for this rank
            if self._receiver is receiver:
                await asyncio.shield(self.leave())
            raise
        logger.debug("version {} came through the group: {}", manifest.version, times)

    async def leave(self) -> None:
        """Ends the group; a transfer under way raises GROUP_BROKEN."""
        receiver, self._receiver = self._receiver, None
        transfer, self._transfer = self._transfer, None
        if receiver is None:
            return
        receiver.abort()
        if transfer is not None:
            await asyncio.wait({transfer}, timeout=GRACE_S)
        await _close(receiver)


async def _close(receiver: Receiver) -> None:
    await asyncio.wait({_on_thread(receiver.close)}, timeout=GRACE_S)


def _close_late(meeting: asyncio.Future[Receiver]) -> None:
    """Closes the receiver of a join that was given up, once it is there."""
    if not meeting.cancelled() and meeting.exception() is None:
        _on_thread(meeting.result().close)


def _on_thread(function: Callable[[], Result]) -> asyncio.Future[Result]:
    """Runs on a daemon thread: unlike a pool's, it does not hold up the end of the program while it blocks."""
    done: Future[Result] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - belongs to whoever waits
            done.set_exception(error.with_traceback(None))  # whose frames hold the buffers of the group

    threading.Thread(target=run, name="group", daemon=True).start()
    future = asyncio.wrap_future(done)
    future.add_done_callback(_log_failure)
    return future


def _log_failure(future: asyncio.Future[Result]) -> None:
    """Logs a failure, so that asyncio does not report it as never retrieved."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.debug("work in a group ended: {}", error)
