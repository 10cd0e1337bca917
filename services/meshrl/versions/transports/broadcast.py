"""The broadcast transport (nccl, or gloo on a CPU): the trainer's ranks send a version to the engines directly.

A version is staged and sealed at the hub as a manifest without bytes; the bytes are sent once, in a group of engines
that the hub forms. A delta is broadcast where that pays and every engine of the group serves the version before. Else
the tensors are broadcast in full, or scattered (see `collective.scatter`) where that pays and every rank of the engines
has learned from a first version what it holds; then the group meets anew.

Engines that miss a version are in the group of the next one. Where none comes, the ranks send their rows to rank 0,
which brings the hub a copy in chunks. The copy takes a version's size of its memory and of the hub's disk, so it is
made only while an engine lacks the version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore, Store

from meshrl.client import WeightSyncClient
from meshrl.client.backoff import Backoff
from meshrl.versions.collective.broadcasting import Receiver, Sender
from meshrl.versions.collective.communicator import reach_store
from meshrl.versions.collective.plan import PublishPlan
from meshrl.versions.collective.scatter import have_offered, scatter_offers
from meshrl.versions.deltas.codec import write_stream
from meshrl.versions.deltas.rule import DeltaRule, FasterWay
from meshrl.versions.snapshot import Captured
from meshrl.versions.transports.base import Answer, Prepared, PublishCall, VersionCall, VersionLine
from meshrl.versions.transports.rank_calls import RankCalls
from meshrl.versions.transports.shares import EncodeRows, SenderShare, SetBase, digested, pays
from meshrl.versions.uploads import TODAY, Peers, Uploader
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import DEFAULT_CHUNK_BYTES, chunks_of, delta_manifest, digest
from meshrl.wire.types import (
    AgentState,
    ChunkEntry,
    EngineInfo,
    JoinGroup,
    Manifest,
    OpenedGroup,
    Transport,
    capabilities,
)

CPU = torch.device("cpu")
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class MeetEngines(PublishCall):
    """Leave the group before, and meet the receivers of a new one."""

    generation: int
    num_receivers: int
    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class SendVersion(VersionCall):
    """Send the group the rank's rows of a version, or their delta."""

    delta: bool = False


@dataclass(frozen=True, kw_only=True)
class CopyVersion(VersionCall):
    """Send rank 0 the rank's rows of a version, in a gloo group of their own."""

    generation: int
    deadline_s: float


class BroadcastShare(SenderShare):
    def __init__(
        self, *, sender: int, device: torch.device, store_address: str, backend: str, deadline_s: float,
        plan: PublishPlan, num_threads: int = 1,
    ) -> None:  # fmt: skip
        """`deadline_s`: also how long a broadcast may stand still."""
        super().__init__(deadline_s=deadline_s, num_threads=num_threads)
        self.store_address, self.backend = store_address, backend
        self.may_scatter = True
        self._plan = plan
        self._sender, self._device = sender, device
        self._store: Store | None = None
        self._group: Sender | None = None
        self._delta: tuple[int, Bytes] | None = None  # that was encoded last: its version, and its byte stream

    @property
    def handlers(self) -> Mapping[type[PublishCall], Callable[[Any], Answer]]:
        return {
            **super().handlers,
            MeetEngines: self._meet_engines,
            SendVersion: self._send,
            CopyVersion: self._copy,
        }

    def _meet_engines(self, call: MeetEngines) -> Answer:
        self.leave()
        plan = self._plan if self.may_scatter else None
        self._group = self._meet(self.backend, self._device, call.generation, call.num_receivers, call.deadline_s, plan)
        return {}

    def _encode(self, call: EncodeRows) -> Answer:
        answer, stream = super()._encode(call), write_stream(self.base.pieces)
        self._delta = (call.version, stream)
        return {**answer, "stream": {"length": str(len(stream)), "digest": digest(stream.data).hex()}}

    def _copy(self, call: CopyVersion) -> Answer:
        with self._snapshot(call.version) as snapshot:
            rows = torch.from_numpy(self.bytes_of(snapshot))
            to_rank_0 = self._meet("gloo", CPU, call.generation, 1, call.deadline_s)
            try:
                to_rank_0.send(replace(snapshot, flat=rows), stall_s=self.deadline_s, moved=self.progress.moved)
            finally:
                to_rank_0.abort()
        return {}

    def _send(self, call: SendVersion) -> Answer:
        with self._snapshot(call.version) as snapshot:
            group = self._group
            if group is None:
                raise MeshError(Reason.GROUP_BROKEN, "this sender has left the group")
            try:
                if not call.delta:
                    group.send(snapshot, stall_s=self.deadline_s, moved=self.progress.moved)
                elif self._delta is None or self._delta[0] != call.version:
                    raise MeshError(Reason.GROUP_BROKEN, f"this sender has no delta to version {call.version}")
                else:
                    delta = self._delta[1]
                    group.send_delta(delta, snapshot.plan, stall_s=self.deadline_s, moved=self.progress.moved)
            except MeshError:
                self.leave()
                raise
        return {}

    def on_host(self, version: int) -> NDArray[np.uint8]:
        """This rank's rows of a version in host memory, valid until the next copy."""
        with self._snapshot(version) as snapshot:
            rows = self.bytes_of(snapshot)
            return rows.copy() if snapshot.ready is None else rows  # the snapshot's own buffer is used again

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def close(self) -> None:
        self.leave()
        super().close()

    @property
    def scatters(self) -> bool:
        return self._group is not None and self._group.scatters

    def _meet(
        self,
        backend: str,
        device: torch.device,
        generation: int,
        num_receivers: int,
        deadline_s: float,
        plan: PublishPlan | None = None,
    ) -> Sender:
        self._store = self._store or reach_store(self.store_address, deadline_s=deadline_s)
        return Sender.meet(
            self._store,
            generation=generation,
            backend=backend,
            sender=self._sender,
            num_receivers=num_receivers,
            device=device,
            deadline_s=deadline_s,
            plan=plan,
        )


MOST_DELTA_BYTES = 2**32 - 1  # of a sender: of a chunk in a manifest
ATTEMPTS = 3  # to form a group for a version
MEET_S = 30.0
WATCH_S = 1.0  # between two looks for engines that lack the newest version
LATE_S = 30.0  # for which engines that lack it wait for the next version at most, before they get a copy
STUCK_S = 60.0
COPY_AGAIN_S = 60.0  # at most, after a copy that failed
GRACE_S = 10.0  # what the other ranks may take beyond the deadlines that they keep themselves
_PASSING = frozenset({Reason.UNREACHABLE, Reason.DRAINING, Reason.DEADLINE_PASSED, Reason.GROUP_BROKEN})
_BUSY = frozenset({AgentState.SEEDING, AgentState.FETCHING})

Result = TypeVar("Result")


class BroadcastTransport:
    """Rank 0's side: keeps a group of engines, has the ranks send, and copies missed versions to the hub."""

    def __init__(
        self,
        line: VersionLine,
        ranks: RankCalls,
        share: BroadcastShare,
        plan: PublishPlan,
        client: WeightSyncClient,
        store: Store,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        anchor_every: int | None = None,
        watch_s: float = WATCH_S,
    ) -> None:
        """`share` is rank 0's own; `store` is at its `store_address`, where all meet; the rest as of `RowTransport`."""
        self.progress = share.progress
        self._line, self._ranks, self._share, self._client, self._store = line, ranks, share, client, store
        self._plan, self._layout = plan, plan.layout
        self._uploader = Uploader(client, self.progress)
        self._meet_s = min(MEET_S, share.deadline_s)
        self._chunk_bytes, self._watch_s = chunk_bytes, watch_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")  # the GPU belongs to a thread
        self._group: OpenedGroup | None = None
        self._compared = 0  # generation of the last group whose ranks have all offered what they hold
        self._rule = None if anchor_every is None else DeltaRule(anchor_every=anchor_every)
        self._captured: Captured | None = None  # the newest version
        self._made: Prepared | None = None  # of it
        self._took: set[str] = set()  # engines that it was broadcast to
        self._takes_deltas = False  # whether all of the group do
        self._anchor_every = anchor_every
        self._way = self._new_way()
        self._compared_s: float | None = None  # what the newest version's comparison with its base took
        self._delivered_s: float | None = None
        self._stuck: dict[str, float] = {}  # engines that are asked into no group until then
        self._misfits: set[str] = set()  # engines of another layout; each is named in the log once
        self._copies = 0
        self._hub: Collection[str] = ()  # its capabilities
        self._late: asyncio.Task[None] | None = None  # looks after the engines that lack the newest version

    async def prepare(self, version: int, captured: Captured, peers: Peers = TODAY) -> Prepared:
        """Makes sure that there is a group of all engines. Raises also a defect of the last copy, and NOT_SUPPORTED for
        a hub that would drop the order of the senders' rows."""
        if self._plan.collective.reordered_tensors and capabilities.ROW_ORDER not in peers.hub:
            raise MeshError(
                Reason.NOT_SUPPORTED,
                f"the experts' rows of version {version} are in the order of the trainer's ranks, and the hub lacks the"
                f" capability {capabilities.ROW_ORDER}; start it from the trainer's release, or choose another"
                " weight_broadcast.type",
            )
        await self._end_late()
        self._hub = peers.hub
        began_s = time.monotonic()
        await self._open_group()
        opened_s = time.monotonic()
        if self._made is None or captured is not self._captured:  # else the hub may have it already
            self._made = await self._encode(version)
            self._captured = captured
        parts_s = {"group": opened_s - began_s, "encode": time.monotonic() - opened_s}
        return replace(self._made, parts_s=parts_s)

    async def deliver(self, version: int) -> Mapping[str, float]:
        """Sends a sealed version to the group; the ranks keep it as the base of the next one."""
        assert self._made is not None, "it was prepared"
        manifest, in_full, began_s = self._made.manifest, self._made.in_full, time.monotonic()
        self._took = set()
        whole = await self._send(SendVersion(version=version, delta=manifest is not in_full))
        ended_s = time.monotonic()
        parts_s = {"wire": ended_s - began_s}
        if self._took and manifest is in_full:
            self._way.took_in_full(parts_s["wire"], in_full.payload_bytes)
        if self._took and self._compared_s is not None:
            self._way.took_as_delta(self._compared_s + parts_s["wire"])
        if self._rule is not None and self._takes_deltas and not self._way.is_full_faster:
            await self._keep(self._rule, manifest, in_full)
            parts_s["keep"] = time.monotonic() - ended_s
        pace_s = self._watch_s if self._delivered_s is None else ended_s - self._delivered_s
        self._delivered_s = ended_s
        wait_s = min(LATE_S, 2 * pace_s) if whole else 0.0
        self._late = asyncio.create_task(self._look_after_late(in_full, wait_s, broken=not whole))
        return parts_s

    async def close(self) -> None:
        if self._late is not None:
            self._late.cancel()
            await asyncio.wait({self._late})
        await asyncio.to_thread(self._share.close)
        self._thread.shutdown(wait=False)

    # --- deltas -----------------------------------------------------------------------------------

    async def _encode(self, version: int) -> Prepared:
        base, began_s = await self._base_of(version), time.monotonic()
        answers = await self._call(EncodeRows(version=version, base=None if base is None else base.version))
        self._compared_s = None if base is None else time.monotonic() - began_s
        tensors, plan = digested(self._plan.tensors, answers), self._plan.collective
        in_full = self._line.manifest(version, Transport.NCCL, tensors, collective=plan)
        chunks, offset = [], 0
        for answer in answers:
            length = int(answer["stream"]["length"])
            chunks.append(ChunkEntry(offset=offset, length=length, digest=bytes.fromhex(answer["stream"]["digest"])))
            offset += length
        fits = max(chunk.length for chunk in chunks) <= MOST_DELTA_BYTES
        manifest, rule = in_full, self._rule
        if base is not None and rule is not None and fits and pays(rule, version, answers, in_full.num_bytes):
            manifest = delta_manifest(base, in_full, tuple(chunks))
        return Prepared(manifest=manifest, in_full=in_full)

    async def _base_of(self, version: int) -> Manifest | None:
        rule, group, self._takes_deltas = self._rule, self._group, False
        if rule is None or group is None or capabilities.BROADCAST_DELTAS not in self._hub:
            return None
        engines = await self._capable()
        members = [engine for member in group.members if (engine := engines.get(member.engine_id)) is not None]
        able = [engine for engine in members if capabilities.BROADCAST_DELTAS in engine.capabilities]
        self._takes_deltas = len(able) == len(group.members)
        base = rule.base_of(version, self._plan.tensors)
        if base is None or self._way.is_full_faster or not self._takes_deltas:
            return None
        if behind := [engine.engine_id for engine in able if engine.serving_version != base.version]:
            text = "version {} leaves in full: engines {} do not serve version {}"
            logger.info(text, version, behind, base.version)
            return None
        return base

    async def _keep(self, rule: DeltaRule, manifest: Manifest, in_full: Manifest) -> None:
        try:
            await self._call(SetBase(version=in_full.version))
        except MeshError as error:
            if error.reason not in _PASSING:
                raise
            logger.warning("the next version leaves in full, since version {} was not kept: {}", in_full.version, error)
        else:
            rule.delivered(manifest, in_full)

    async def _call(self, call: PublishCall) -> list[Answer]:
        self.progress.moved()
        return await self._in_thread(lambda: self._ranks.call(call, stall_s=self._share.deadline_s + GRACE_S))

    # --- the group --------------------------------------------------------------------------------

    async def _capable(self) -> dict[str, EngineInfo]:
        engines = {
            engine.engine_id: engine
            for engine in await self._client.list_engines()
            if Transport.NCCL in engine.transports
            and engine.collective_ranks
            and engine.collective_backend == self._share.backend
        }
        misfits = {name for name, engine in engines.items() if engine.layout_signature not in (b"", self._layout)}
        for name in sorted(misfits - self._misfits):
            logger.error("engine {} is sent nothing: it serves a model of another layout than the trainer's", name)
        self._misfits = misfits
        return {name: engine for name, engine in engines.items() if name not in misfits}

    async def _open_group(self, *, with_busy: bool = False) -> None:
        """Busy engines pull the last version, or wait for it in a group that broke: the others would wait for them."""
        try:
            for _ in range(ATTEMPTS):
                now_s = time.monotonic()
                self._stuck = {name: until_s for name, until_s in self._stuck.items() if until_s > now_s}
                capable, generation = await self._capable(), 0 if self._group is None else self._group.generation
                busy = {name for name, engine in capable.items() if engine.state in _BUSY and name not in self._took}
                without = {*self._stuck, *self._misfits, *(() if with_busy else busy)}
                names = capable.keys() - without
                in_group = {name for name in names if capable[name].group_generation == generation}
                members = set() if self._group is None else {member.engine_id for member in self._group.members}
                if not names or (members == names == in_group and not await self._in_thread(self._scatters_next)):
                    return
                missing = await self._meet(without)
                if not missing:
                    return
                self._stuck |= dict.fromkeys(missing, now_s + STUCK_S)
        except MeshError as error:
            if error.reason not in _PASSING:
                raise
            logger.warning("no group of engines yet: {}", error)

    async def _meet(self, without: set[str]) -> set[str]:
        """Returns the engines that did not come; there is no group then. Raises MeshError GROUP_BROKEN, and as the
        hub."""
        self._group = None
        opened = await self._client.open_group(
            run_id=self._line.run_id,
            epoch=self._line.epoch,
            store_address=self._share.store_address,
            backend=self._share.backend,
            num_senders=self._plan.collective.num_senders,
            without=sorted(without),
            deadline_s=self._meet_s,
        )
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
        how = "each rank gets the parts that it holds" if self._share.scatters else "each rank gets all"
        logger.info("group {} has {} engine(s), {}", opened.generation, len(opened.members), how)
        self._group, self._way = opened, self._new_way()
        return set()

    def _new_way(self) -> FasterWay:
        return FasterWay(is_fast=self._share.backend == "nccl", again_after=self._anchor_every or 1)

    def _scatters_next(self) -> bool:
        group = self._group
        if group is None or group.generation == self._compared or self._share.scatters or not self._share.may_scatter:
            return False
        num_receivers = sum(member.num_ranks for member in group.members)
        store = PrefixStore(f"g{group.generation}", self._store)
        if not have_offered(store, num_receivers):
            return False
        self._compared = group.generation
        return scatter_offers(store, self._plan, num_receivers) is not None

    def _absent(self, opened: OpenedGroup) -> set[str]:
        """All ranks meet sender 0 first."""
        store = PrefixStore(f"g{opened.generation}/s0", self._store)
        return {
            member.engine_id
            for member in opened.members
            if not all(
                store.check([f"here/{1 + rank}"])
                for rank in range(member.first_receiver, member.first_receiver + member.num_ranks)
            )
        }

    async def _send(self, call: SendVersion) -> bool:
        if self._group is None:
            return True
        scattered = self._share.scatters and not call.delta
        try:
            await self._call(call)  # each rank ends a send that stands still
        except MeshError as error:
            self._group = None
            if scattered:  # whatever broke it, a broadcast is what worked before
                self._share.may_scatter = False
            if error.reason not in _PASSING:
                raise
            logger.warning("version {} did not reach the group, its engines get a copy: {}", call.version, error)
            return False
        self._took = {member.engine_id for member in self._group.members}
        return True

    # --- engines that lack the newest version -----------------------------------------------------

    async def _look_after_late(self, manifest: Manifest, wait_s: float, *, broken: bool) -> None:
        again = Backoff(self._watch_s, COPY_AGAIN_S, jitter=0.0)
        if broken:  # engines that still wait for it leave that group
            await self._open_group(with_busy=True)
        await asyncio.sleep(wait_s)
        while True:
            pause_s = self._watch_s
            try:
                lacking = await self._lacking(manifest.version)
                if lacking and capabilities.COPIES not in self._hub:
                    text = "engines {} lack version {}, and the hub lacks {}; start it from the trainer's release"
                    logger.warning(text, lacking, manifest.version, capabilities.COPIES)
                    return
                if lacking:
                    logger.info("engines {} lack version {}: the hub gets a copy", lacking, manifest.version)
                    await self._copy(manifest)
                    return
            except MeshError as error:  # the hub or a rank is away, or nobody wants the version any more
                logger.warning("version {} was not copied to the hub: {}", manifest.version, error)
                pause_s = again.next_s()
            await asyncio.sleep(pause_s)

    async def _lacking(self, version: int) -> Sequence[str]:
        return sorted(
            name
            for name, engine in (await self._capable()).items()
            if (
                engine.state in (AgentState.JOINING, AgentState.READY, AgentState.POISONED)
                and (engine.serving_version != version or name not in self._took)
            )
            # Busy with an older version while the group met, it has that one prepared now.
            or (engine.state is AgentState.PREPARED and name not in self._took)
        )

    async def _copy(self, manifest: Manifest) -> None:
        payload = await self._collect(manifest)
        chunks = await asyncio.to_thread(chunks_of, payload.data, self._chunk_bytes)
        copy = replace(manifest, transport=Transport.STREAM, collective=None, chunks=chunks)
        staged = await self._uploader.stage(copy, payload)
        await self._uploader.seal(copy, staged.artifact_id, "", payload)

    async def _collect(self, manifest: Manifest) -> NDArray[np.uint8]:
        if self._plan.collective.num_senders == 1:  # sockets and additive digests would take most of the time
            return await self._in_thread(lambda: self._share.on_host(manifest.version))
        self._copies += 1
        group = JoinGroup(
            generation=-self._copies, store_address=self._share.store_address, backend="gloo",
            num_senders=self._plan.collective.num_senders, num_receivers=1, first_receiver=0, deadline_s=self._meet_s,
        )  # fmt: skip
        call = CopyVersion(version=manifest.version, generation=group.generation, deadline_s=self._meet_s)
        payload = np.empty(manifest.payload_bytes, dtype=np.uint8)
        offsets = {tensor.name: tensor.offset for tensor in manifest.tensors}

        def sink(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in tensors:
                found = tensor.reshape(-1).view(torch.uint8).numpy()
                payload[offsets[name] : offsets[name] + found.size] = found

        joined: Future[Receiver] = Future()

        def receive() -> None:
            receiver = Receiver.join(group, index=0, device=CPU)
            joined.set_result(receiver)
            try:
                receiver.receive(manifest, sink, stall_s=self._share.deadline_s)
            finally:
                receiver.close()

        stall_s = self._meet_s + self._share.deadline_s + GRACE_S
        sending = self._in_thread(lambda: self._ranks.call(call, stall_s=stall_s))
        try:
            ends = await asyncio.gather(sending, asyncio.to_thread(receive), return_exceptions=True)
        except asyncio.CancelledError:  # the next version needs the ranks: their sends end with this receiver
            joined.add_done_callback(lambda met: met.result().abort())
            raise
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return payload

    async def _end_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            late.cancel()
            await asyncio.wait({late})
            if not late.cancelled():
                late.result()

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
