"""The weights of the embedded engine: the live ones, and the shadow of the next version, which is built beside them.

Adapters are no shadow: see `low_rank`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from loguru import logger
from torch import nn

from meshrl.inference.engine import HostVersion
from meshrl.inference.out_of_memory import named_out_of_memory
from meshrl.models.state import hf_state
from meshrl.versions.layout import Layout, layout_of, mismatch
from meshrl.versions.placement import WeightPlacement, check_parts
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import digest, root_of
from meshrl.wire.types import JoinGroup, Manifest

if TYPE_CHECKING:
    from meshrl.versions.collective.broadcasting import Bytes, Receiver, Sink

GRACE_S = 5.0  # beyond a deadline that the other side keeps itself
STALL_S = 30.0  # without a byte, after which a broadcast ends

Result = TypeVar("Result")
_REMEDY = (
    "lower inference.kv_cache_bytes, inference.max_num_seqs or inference.max_model_len, which bound the KV cache, or"
    " take a device with more memory"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shadow:
    version: int
    tensors: Mapping[str, torch.Tensor]


class LiveWeights:
    """Parameters and persistent buffers of one model, by Hugging Face name."""

    def __init__(self, model: nn.Module) -> None:
        own = dict(model.named_parameters()) | dict(model.named_buffers())
        self._owners = {name: own[name] for name in hf_state(model)}
        self.layout: Layout = layout_of(self._owners)

    def stage(self, version: int, tensors: Mapping[str, torch.Tensor], *, copy: bool = True) -> Shadow:
        """Takes a whole version, copied unless `copy` is off. Raises MeshError LAYOUT_MISMATCH."""
        refused = mismatch(version, self.layout, layout_of(tensors))
        if refused is not None:
            raise refused
        shadow = {
            name: tensors[name].detach().to(owner.device, copy=copy).contiguous()
            for name, owner in self._owners.items()
        }
        return Shadow(version=version, tensors=shadow)

    @torch.no_grad()
    def patch(self, manifest: Manifest, delta: Bytes) -> Shadow:
        """Makes a version of its delta and the live weights. Raises MeshError NOT_SUPPORTED, DIGEST_MISMATCH."""
        shadow = {name: owner.detach().clone().contiguous() for name, owner in self._owners.items()}
        placement = WeightPlacement.whole(shadow)
        placement.patch(manifest, delta, shadow, num_threads=1)
        check_parts(manifest, [placement.digests(shadow)])
        return Shadow(version=manifest.version, tensors=shadow)

    def swap(self, shadow: Shadow) -> None:
        """Exchanges storage: no bytes move, and tied modules follow their owner."""
        with torch.no_grad():
            for name, tensor in shadow.tensors.items():
                self._owners[name].data = tensor

    def root(self) -> bytes:
        return root_of(
            (name, dtype, shape, digest(tensor_bytes(self._owners[name]))) for name, dtype, shape in self.layout
        )


class Staging:
    def __init__(self, weights: LiveWeights, device: torch.device) -> None:
        self._weights = weights
        self._device = device
        self.receiver = BroadcastReceiver(device)
        self._shadow: Shadow | None = None

    def staged(self, version: int) -> Shadow:
        """Raises MeshError VERSION_NOT_SEALED when another version, or none, is staged."""
        if self._shadow is None or self._shadow.version != version:
            held = "nothing" if self._shadow is None else f"version {self._shadow.version}"
            text = f"version {version} is not staged here, but {held}; stage it first"
            raise MeshError(Reason.VERSION_NOT_SEALED, text)
        return self._shadow

    def drop(self) -> None:
        self._shadow = None

    async def stage(self, host: HostVersion, *, copy: bool = True) -> None:
        self._shadow = None
        with self.named_out_of_memory(host.version):
            self._shadow = await asyncio.to_thread(self._weights.stage, host.version, host.tensors, copy=copy)

    async def receive(self, manifest: Manifest) -> HostVersion:
        """Raises MeshError GROUP_BROKEN, DIGEST_MISMATCH, OUT_OF_MEMORY."""
        self._shadow = None
        arrived: dict[str, torch.Tensor] = {}

        def sink(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
            arrived.update((name, tensor.to(self._device, copy=True)) for name, tensor in tensors)

        with self.named_out_of_memory(manifest.version):
            await self.receiver.receive(manifest, sink)
        return HostVersion(run_id=manifest.run_id, version=manifest.version, tensors=arrived, adapter=manifest.adapter)

    async def receive_delta(self, manifest: Manifest) -> None:
        """Builds the shadow from the live weights and a delta. Raises also NOT_SUPPORTED."""
        self._shadow = None
        delta = await self.receiver.receive_delta(manifest)
        with self.named_out_of_memory(manifest.version):
            self._shadow = await asyncio.to_thread(self._weights.patch, manifest, delta)

    def named_out_of_memory(self, version: int) -> AbstractContextManager[None]:
        return named_out_of_memory(doing=f"staging version {version}", device=self._device, remedy=_REMEDY)


class BroadcastReceiver:
    """In at most one group of the nccl transport at a time. Calls into a group block, so each runs on a daemon thread
    and is awaited until its deadline at most."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._receiver: Receiver | None = None
        self._receiving: asyncio.Future[Any] | None = None

    async def join(self, group: JoinGroup) -> None:
        """As `Engine.join_group`."""
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
        """A broadcast that fails or is cancelled ends the group."""
        times = await self._take(manifest, lambda receiver: receiver.receive(manifest, sink, stall_s=STALL_S))
        logger.debug("version {} came through the group: {}", manifest.version, times)

    async def receive_delta(self, manifest: Manifest) -> Bytes:
        return await self._take(manifest, lambda receiver: receiver.receive_delta(manifest, stall_s=STALL_S))

    async def _take(self, manifest: Manifest, take: Callable[[Receiver], Result]) -> Result:
        receiver = self._receiver
        if receiver is None:
            raise MeshError(
                Reason.GROUP_BROKEN, f"version {manifest.version} travels in a group; this engine is in none"
            )
        self._receiving = receiving = _on_thread(lambda: take(receiver))
        try:
            return await asyncio.shield(receiving)
        except BaseException:  # cancelled, too: the senders must not wait for this rank
            if self._receiver is receiver:
                await asyncio.shield(self.leave())
            raise

    async def leave(self) -> None:
        receiver, self._receiver = self._receiver, None
        receiving, self._receiving = self._receiving, None
        if receiver is None:
            return
        receiver.abort()
        if receiving is not None:
            await asyncio.wait({receiving}, timeout=GRACE_S)
        await _close(receiver)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Little-endian C-order bytes of a tensor, without a copy when it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers; its stubs say so from 3.12 on


async def _close(receiver: Receiver) -> None:
    await asyncio.wait({_on_thread(receiver.close)}, timeout=GRACE_S)


def _close_late(meeting: asyncio.Future[Receiver]) -> None:
    if not meeting.cancelled() and meeting.exception() is None:
        _on_thread(meeting.result().close)


def _on_thread(function: Callable[[], Result]) -> asyncio.Future[Result]:
    """Runs on a daemon thread, which unlike a pool's does not hold up the end of the program."""
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
    """So that asyncio does not report it as never retrieved."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.debug("work in a group ended: {}", error)
