"""The broadcast transport (nccl, or gloo on a CPU): the trainer's ranks send a version to the engines directly.

A version is staged and sealed at the hub as a manifest without bytes; the bytes are broadcast in a group of engines,
which the hub forms. A group that breaks is replaced by one of the engines that still lack the version; engines that
appear later get the newest version in a group of their own, while nothing else is published. The hub never has the
bytes: each rank has its rows alone, and a late engine's download of them would take a version's size of rank 0's memory
and of the hub's disk. The training thread puts the newest snapshot into `BroadcastShare.held`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from loguru import logger
from torch._C._distributed_c10d import PrefixStore, Store

from meshrl.client import WeightSyncClient
from meshrl.client.backoff import Backoff
from meshrl.versions.collective.broadcasting import Sender
from meshrl.versions.collective.communicator import reach_store
from meshrl.versions.collective.digest import digest_bytes
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import Captured, HeldSnapshot, Snapshot
from meshrl.versions.transports.base import Answer, Prepared, PublishCall, VersionCall, VersionLine
from meshrl.versions.transports.rank_calls import RankCalls
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import layout_signature
from meshrl.wire.types import (
    AgentState,
    CollectivePlan,
    EngineInfo,
    OpenedGroup,
    TensorEntry,
    Transport,
    capabilities,
)


@dataclass(frozen=True, kw_only=True)
class MeetEngines(PublishCall):
    """Leave the group before, and meet the receivers of a new one."""

    generation: int
    num_receivers: int
    deadline_s: float


class SendVersion(VersionCall):
    """Send the group the rank's rows of a version."""


class BroadcastShare:
    """One sender rank's share of the broadcasts."""

    calls = (MeetEngines, SendVersion)

    def __init__(
        self, *, sender: int, device: torch.device, store_address: str, backend: str, deadline_s: float
    ) -> None:
        """`deadline_s`: how long a broadcast may stand still, and this rank's training may lag behind rank 0's."""
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


ATTEMPTS = 3  # groups of all that a publication tries
MEET_S = 30.0
WATCH_S = 1.0
REPORT_S = 0.2  # for engines of a broken group that had all of it to say so
STUCK_S = 60.0
BACKOFF_S = (2.0, 60.0)  # between two sends to the same engine on its own
GRACE_S = 10.0  # what the other ranks may take beyond the deadlines that they keep themselves
_PASSING = frozenset({Reason.UNREACHABLE, Reason.DRAINING, Reason.DEADLINE_PASSED, Reason.GROUP_BROKEN})

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, eq=False)
class MeetingPoint:
    """Where senders and engines meet: a store that this process hosts and engines reach at `address`.

    `deadline_s`: how long a broadcast may stand still.
    """

    store: Store
    address: str
    backend: str
    deadline_s: float


@dataclass
class _Pause:
    """When an engine may be sent a version on its own again."""

    backoff: Backoff = field(default_factory=lambda: Backoff(*BACKOFF_S, jitter=0.0))
    until_s: float = 0.0


class BroadcastTransport:
    """Rank 0's side: keeps a group of engines, has the ranks send, and sends again to engines that lack the newest."""

    def __init__(
        self,
        line: VersionLine,
        ranks: RankCalls,
        share: BroadcastShare,
        tensors: tuple[TensorEntry, ...],
        plan: CollectivePlan,
        client: WeightSyncClient,
        place: MeetingPoint,
        *,
        watch_s: float = WATCH_S,
    ) -> None:
        """`share` is rank 0's own; `tensors` need no digests; `plan` is how the senders share them."""
        self.progress = share.progress
        self._line, self._ranks, self._share, self._client, self._place = line, ranks, share, client, place
        self._tensors, self._plan = tensors, plan
        self._layout = layout_signature((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
        self._meet_s = min(MEET_S, place.deadline_s)
        self._watch_s = watch_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")  # the GPU belongs to a thread
        self._sending = asyncio.Lock()
        self._group: OpenedGroup | None = None
        self._newest: int | None = None  # None from the preparation of a version until it is sealed
        self._stuck: dict[str, float] = {}  # engines that are asked into no group of all until then
        self._misfits: set[str] = set()  # engines of another layout; each is named in the log once
        self._has: set[str] = set()  # engines that took the newest version from us
        self._pauses: defaultdict[str, _Pause] = defaultdict(_Pause)
        self._watching: asyncio.Task[None] | None = None

    async def prepare(self, version: int, captured: Captured, hub: Collection[str] = capabilities.HUB) -> Prepared:
        """Makes sure that there is a group of all engines. Raises also what ended the watch for late engines."""
        assert captured.digests is not None, "a broadcast is of what the sender ranks hold"
        if self._watching is not None and self._watching.done():
            self._watching.result()
        lanes = torch.from_numpy(captured.digests)
        tensors = tuple(
            replace(tensor, digest=digest_bytes(lanes[index])) for index, tensor in enumerate(self._tensors)
        )
        manifest = self._line.manifest(version, Transport.NCCL, tensors, collective=self._plan)
        async with self._sending:
            began_s = time.monotonic()
            self._newest = None
            await self._open_group_of_all()
        return Prepared(manifest=manifest, parts_s={"group": time.monotonic() - began_s})

    async def deliver(self, version: int) -> Mapping[str, float]:
        """Sends a sealed version to the engines in the group; those that come later get it from the watch."""
        async with self._sending:
            began_s = time.monotonic()
            self._newest, self._has = version, set()
            self._pauses.clear()
            await self._send_to_all(version)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return {"wire": time.monotonic() - began_s}

    async def close(self) -> None:
        """Stops to look for engines and leaves the group."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await asyncio.to_thread(self._share.leave)
        self._thread.shutdown(wait=False)

    # --- groups -----------------------------------------------------------------------------------

    async def _capable(self) -> dict[str, EngineInfo]:
        engines = {
            engine.engine_id: engine
            for engine in await self._client.list_engines()
            if Transport.NCCL in engine.transports
            and engine.collective_ranks
            and engine.collective_backend == self._place.backend
        }
        misfits = {name for name, engine in engines.items() if engine.layout_signature not in (b"", self._layout)}
        for name in sorted(misfits - self._misfits):
            logger.error("engine {} is sent nothing: it serves a model of another layout than the trainer's", name)
        self._misfits = misfits
        return {name: engine for name, engine in engines.items() if name not in misfits}

    async def _open_group_of_all(self) -> None:
        try:
            for _ in range(ATTEMPTS):
                now_s = time.monotonic()
                self._stuck = {name: until_s for name, until_s in self._stuck.items() if until_s > now_s}
                engines = {name: engine for name, engine in (await self._capable()).items() if name not in self._stuck}
                if not engines or self._is_group_of(engines):
                    return
                missing = await self._open(without={*self._stuck, *self._misfits})
                if not missing:
                    return
                self._stuck |= dict.fromkeys(missing, now_s + STUCK_S)
        except MeshError as error:
            if error.reason not in _PASSING:
                raise
            logger.warning("no group of engines yet: {}", error)

    def _is_group_of(self, engines: Mapping[str, EngineInfo]) -> bool:
        group = self._group
        if group is None or {member.engine_id for member in group.members} != engines.keys():
            return False
        return all(engine.group_generation == group.generation for engine in engines.values())

    async def _open(
        self, *, engine_ids: Collection[str] = (), without: Collection[str] = (), unless: Collection[str] = ()
    ) -> set[str]:
        """Opens a group and meets its engines; returns those that did not come, and there is no group then. Raises
        MeshError GROUP_BROKEN when no engine can take part or it failed otherwise, and as the hub."""
        self._group = None
        opened = await self._client.open_group(
            run_id=self._line.run_id,
            epoch=self._line.epoch,
            store_address=self._place.address,
            backend=self._place.backend,
            num_senders=self._plan.num_senders,
            engine_ids=sorted(engine_ids),
            without=sorted(without),
            deadline_s=self._meet_s,
        )
        if {member.engine_id for member in opened.members} == set(unless):
            return set()
        call = MeetEngines(
            generation=opened.generation,
            num_receivers=sum(member.num_ranks for member in opened.members),
            deadline_s=self._meet_s,
        )
        try:
            self.progress.moved(unseen_s=self._meet_s + GRACE_S)
            await self._in_thread(lambda: self._ranks.call(call, stall_s=self._meet_s + GRACE_S))
            self.progress.moved()
        except MeshError as error:
            missing = await self._in_thread(lambda: self._absent(opened))
            logger.warning("group {} did not meet, {} missing: {}", opened.generation, sorted(missing), error)
            if not missing:
                raise
            return missing
        logger.info("group {} has {} engine(s)", opened.generation, len(opened.members))
        self._group = opened
        return set()

    def _absent(self, opened: OpenedGroup) -> set[str]:
        """Engines of which a rank did not come to sender 0, where everybody is met first (see `Communicator`)."""
        store = PrefixStore(f"g{opened.generation}/s0", self._place.store)
        return {
            member.engine_id
            for member in opened.members
            if not all(
                store.check([f"here/{1 + rank}"])
                for rank in range(member.first_receiver, member.first_receiver + member.num_ranks)
            )
        }

    # --- sending ----------------------------------------------------------------------------------

    async def _send_to_all(self, version: int) -> None:
        broken: Collection[str] = ()
        if self._group is not None:
            broken = [member.engine_id for member in self._group.members]
            if await self._try_to_send(version):
                return
            await asyncio.sleep(REPORT_S)
        # The hub leaves out who is dead. Who lives and is stuck shows when each is sent the version alone.
        lacking = await self._lacking(version)
        if lacking and not await self._try_to_send(version, lacking, unless=broken):
            for name in sorted(await self._lacking(version)):
                if not await self._try_to_send(version, {name}):
                    self._stuck[name] = time.monotonic() + STUCK_S
                    logger.error("engine {} did not take version {}; it gets it again later", name, version)

    async def _try_to_send(self, version: int, engine_ids: Collection[str] = (), unless: Collection[str] = ()) -> bool:
        """Sends a version to the group, or to one of `engine_ids`, but not to just the engines in `unless`. Returns
        whether there was nothing left to do for them."""
        try:
            if engine_ids:
                await self._open(engine_ids=engine_ids, unless=unless)
            group = self._group
            if group is None:
                return False
            call = SendVersion(version=version)
            stall_s = self._place.deadline_s + GRACE_S  # each rank ends a send that stands still
            self.progress.moved()
            try:
                await self._in_thread(lambda: self._ranks.call(call, stall_s=stall_s))
            except MeshError:
                self._group = None
                raise
        except MeshError as error:
            if error.reason not in _PASSING:
                raise
            logger.warning("version {} did not reach {}: {}", version, sorted(engine_ids) or "the group", error)
            return False
        self._has |= {member.engine_id for member in group.members}
        return True

    async def _lacking(self, version: int) -> set[str]:
        lacking: set[str] = set()
        for name, engine in (await self._capable()).items():
            if engine.state in (AgentState.PREPARED, AgentState.APPLYING):
                self._has.add(name)
            elif engine.serving_version != version or name not in self._has:
                lacking.add(name)
        return lacking

    # --- engines that come late -------------------------------------------------------------------

    async def _watch(self) -> None:
        suspects: set[str] = set()
        while True:
            await asyncio.sleep(self._watch_s)
            if self._sending.locked():
                continue
            try:
                async with self._sending:
                    suspects = await self._send_to_late(suspects)
            except MeshError as error:  # the hub is away, or a new version came in between: looked at again
                logger.warning("the newest version was not sent again: {}", error)

    async def _send_to_late(self, suspects: set[str]) -> set[str]:
        version = self._newest
        if version is None:
            return set()
        now_s = time.monotonic()
        lacking = await self._lacking(version)
        late = {name for name in lacking & suspects if now_s >= self._pauses[name].until_s}
        if not late:
            return lacking
        name = min(late)  # one by one: an engine that breaks its group breaks no other's
        self._pauses[name].until_s = now_s + self._pauses[name].backoff.next_s()
        logger.info("sending version {} again, to {}", version, name)
        if await self._try_to_send(version, {name}):
            self._stuck.pop(name, None)
        return lacking - {name}

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
