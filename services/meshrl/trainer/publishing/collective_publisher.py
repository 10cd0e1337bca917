"""Publishes versions by broadcasting them from the trainer's ranks to the engines (nccl, or gloo on a CPU).

Rank 0 only. A version is staged and sealed at the hub as a manifest without bytes; the bytes go through a group that
the hub forms of the engines. A group that breaks is replaced by one of the engines that come and still lack the
version; engines that appear later get the newest version in a group of their own, while nothing else is published.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore, Store

from meshrl.client import WeightSyncClient
from meshrl.trainer.publishing.rank_calls import Crew
from meshrl.trainer.publishing.rows import Rows
from meshrl.trainer.publishing.uploading import PublishReport
from meshrl.versions.collective.digest import digest_bytes
from meshrl.versions.transfer import Uploader
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import SUM128, build_manifest
from meshrl.wire.types import AgentState, EngineInfo, Manifest, OpenedGroup, Transport

ATTEMPTS = 3  # groups of all that a publication tries
MEET_S = 30.0
WATCH_S = 1.0
SETTLE_S = 0.2
STUCK_S = 60.0
BACKOFF_S = (2.0, 60.0)  # between two sends to the same engine on its own
GRACE_S = 10.0  # what the other ranks may take beyond the deadlines that they keep themselves
_PASSING = frozenset({Reason.UNREACHABLE, Reason.DRAINING, Reason.DEADLINE_PASSED, Reason.GROUP_BROKEN})

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, eq=False)
class TakenRows:
    """What the training thread says of a snapshot that the ranks hold: `digests` (T, 2) int64 are the tensors' sums."""

    digests: NDArray[np.int64]
    snapshot_s: float
    digest_s: float


@dataclass(kw_only=True)
class _Pause:
    """When an engine may be sent a version on its own again."""

    until_s: float
    next_s: float


class CollectivePublisher:
    """Publishes versions of one run in one epoch. `publish` one version at a time."""

    def __init__(
        self,
        client: WeightSyncClient,
        crew: Crew,
        rows: Rows,
        store: Store,
        *,
        run_id: str,
        epoch: int,
        backend: str,
        store_address: str,
        transfer_deadline_s: float,
        uploader: Uploader | None = None,
        watch_s: float = WATCH_S,
    ) -> None:
        """`store` is hosted by this process, and engines reach it at `store_address`."""
        self.progress = crew.own.progress
        self._client, self._uploader = client, uploader or Uploader(client, self.progress.moved)
        self._crew, self._rows, self._store = crew, rows, store
        self._run_id, self._epoch = run_id, epoch
        self._backend, self._store_address = backend, store_address
        self._transfer_deadline_s = transfer_deadline_s
        self._meet_s = min(MEET_S, transfer_deadline_s)
        self._watch_s = watch_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")  # the GPU belongs to a thread
        self._busy = asyncio.Lock()
        self._group: OpenedGroup | None = None
        self._newest: int | None = None
        self._stuck: dict[str, float] = {}  # engines that are asked into no group of all until then
        self._has: set[str] = set()  # engines that took the newest version from us
        self._pauses: dict[str, _Pause] = {}
        self._watching: asyncio.Task[None] | None = None

    async def publish(self, version: int, taken: TakenRows, traceparent: str = "") -> PublishReport:
        """Publishes what the ranks hold for `version`; returns once it is sealed and was sent to whoever came.

        Raises MeshError: STALE_EPOCH when a newer trainer took over; VERSION_CONFLICT or VERSION_SUPERSEDED;
        UNREACHABLE for a hub that stays away. A defect that ended the watch for late engines is raised here as well.
        """
        if self._watching is not None and self._watching.done():
            self._watching.result()
        async with self._busy:
            manifest = self._manifest(version, taken)
            began_s = time.monotonic()
            self._newest = None
            await self._group_of_all()
            met_s = time.monotonic()
            staged = await self._uploader.stage(manifest)
            staged_s = time.monotonic()
            await self._uploader.seal(manifest, staged.artifact_id, traceparent)
            sealed_s = time.monotonic()
            self._newest, self._has, self._pauses = version, set(), {}
            await self._bring(version)
            report = PublishReport(
                version=version,
                artifact_id=staged.artifact_id,
                root=manifest.result_root,
                num_bytes=manifest.num_bytes,
                snapshot_s=taken.snapshot_s,
                digest_s=taken.digest_s,
                group_s=met_s - began_s,
                stage_s=staged_s - met_s,
                seal_s=sealed_s - staged_s,
                wire_s=time.monotonic() - sealed_s,
            )
        report.log()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return report

    async def close(self) -> None:
        """Stops to look for engines and leaves the group."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await asyncio.to_thread(self._crew.own.work, {"do": "leave"})
        self._thread.shutdown(wait=False)

    def _manifest(self, version: int, taken: TakenRows) -> Manifest:
        lanes = torch.from_numpy(taken.digests)
        tensors = tuple(
            replace(entry, digest=digest_bytes(lanes[index])) for index, entry in enumerate(self._rows.tensors())
        )
        return build_manifest(
            run_id=self._run_id,
            epoch=self._epoch,
            version=version,
            transport=Transport.NCCL,
            tensors=tensors,
            chunks=(),
            digest_algorithm=SUM128,
            collective=self._rows.collective,
        )

    # --- groups -----------------------------------------------------------------------------------

    async def _seats(self) -> dict[str, EngineInfo]:
        """The engines that can take part."""
        return {
            engine.engine_id: engine
            for engine in await self._client.list_engines()
            if Transport.NCCL in engine.transports
            and engine.collective_ranks
            and engine.collective_backend == self._backend
        }

    async def _group_of_all(self) -> None:
        """Sees to a group of all engines. Without one the version is staged all the same, and brought later."""
        try:
            for _ in range(ATTEMPTS):
                now_s = time.monotonic()
                self._stuck = {name: until_s for name, until_s in self._stuck.items() if until_s > now_s}
                seats = {name: engine for name, engine in (await self._seats()).items() if name not in self._stuck}
                if not seats or self._complete(seats):
                    return
                missing = await self._open(without=self._stuck)
                if not missing:
                    return
                self._stuck |= dict.fromkeys(missing, now_s + STUCK_S)
        except MeshError as error:
            if error.reason not in _PASSING:
                raise
            logger.warning("no group of engines yet: {}", error)

    def _complete(self, seats: Mapping[str, EngineInfo]) -> bool:
        group = self._group
        if group is None or {member.engine_id for member in group.members} != seats.keys():
            return False
        return all(engine.group_generation == group.generation for engine in seats.values())

    async def _open(
        self, *, engine_ids: Collection[str] = (), without: Collection[str] = (), unless: Collection[str] = ()
    ) -> set[str]:
        """Opens a group and meets its engines; returns those that did not come, and there is no group then.

        Neither is there one when its engines are just those in `unless`.

        Raises MeshError GROUP_BROKEN when no engine can take part or it failed otherwise, and as the hub.
        """
        self._group = None
        opened = await self._client.open_group(
            run_id=self._run_id,
            epoch=self._epoch,
            store_address=self._store_address,
            backend=self._backend,
            num_senders=self._rows.collective.num_senders,
            engine_ids=sorted(engine_ids),
            without=sorted(without),
            deadline_s=self._meet_s,
        )
        if {member.engine_id for member in opened.members} == set(unless):
            return set()
        word = {
            "do": "meet",
            "generation": opened.generation,
            "num_receivers": sum(member.num_ranks for member in opened.members),
            "deadline_s": self._meet_s,
        }
        try:
            self.progress.moved(unseen_s=self._meet_s + GRACE_S)
            await self._in_thread(lambda: self._crew.work(word, stall_s=self._meet_s + GRACE_S))
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
        """Engines of which a rank did not come to sender 0, where everybody is met first (see collective.group)."""
        store = PrefixStore(f"g{opened.generation}/s0", self._store)
        return {
            member.engine_id
            for member in opened.members
            if not all(
                store.check([f"here/{1 + rank}"])
                for rank in range(member.first_receiver, member.first_receiver + member.num_ranks)
            )
        }

    # --- sending ----------------------------------------------------------------------------------

    async def _bring(self, version: int) -> None:
        """Sends a sealed version to the group; after a break to those that still lack it."""
        broken: Collection[str] = ()
        if self._group is not None:
            broken = [member.engine_id for member in self._group.members]
            if await self._try(version):
                return
            await asyncio.sleep(SETTLE_S)  # engines that had all of it say so
        # The hub leaves out who is dead. Who lives and is stuck shows when each is sent the version alone.
        lacking = await self._lacking(version)
        if lacking and not await self._try(version, lacking, unless=broken):
            for name in sorted(await self._lacking(version)):
                if not await self._try(version, {name}):
                    self._stuck[name] = time.monotonic() + STUCK_S
                    logger.error("engine {} did not take version {}; it gets it again later", name, version)

    async def _try(self, version: int, engine_ids: Collection[str] = (), unless: Collection[str] = ()) -> bool:
        """Sends a version to the group, or to one of `engine_ids`, but not to just the engines in `unless`.

        Returns whether there was nothing left to do for them.
        """
        try:
            if engine_ids:
                await self._open(engine_ids=engine_ids, unless=unless)
            if self._group is None:
                return False
            await self._send(version, self._group)
        except MeshError as error:
            if error.reason not in _PASSING:
                raise
            logger.warning("version {} did not reach {}: {}", version, sorted(engine_ids) or "the group", error)
            return False
        return True

    async def _send(self, version: int, group: OpenedGroup) -> None:
        word = {"do": "send", "version": version}
        stall_s = self._transfer_deadline_s + GRACE_S  # each rank ends a send that stands still
        try:
            self.progress.moved()
            await self._in_thread(lambda: self._crew.work(word, stall_s=stall_s))
        except MeshError:
            self._group = None
            raise
        self._has |= {member.engine_id for member in group.members}

    async def _lacking(self, version: int) -> set[str]:
        return {name for name, engine in (await self._seats()).items() if not self._holds(engine, version)}

    def _holds(self, engine: EngineInfo, version: int) -> bool:
        """Whether an engine has the newest version; the same number may also be that of an earlier epoch."""
        if engine.state in (AgentState.PREPARED, AgentState.APPLYING):
            self._has.add(engine.engine_id)
            return True
        return engine.serving_version == version and engine.engine_id in self._has

    async def _watch(self) -> None:
        """Looks for engines that lack the newest version while nothing is published, and sends it to them."""
        suspects: set[str] = set()
        while True:
            await asyncio.sleep(self._watch_s)
            if self._busy.locked():
                continue
            try:
                async with self._busy:
                    suspects = await self._bring_to_late(suspects)
            except MeshError as error:  # the hub is away, or a new version came in between: looked at again
                logger.warning("the newest version was not sent again: {}", error)

    async def _bring_to_late(self, suspects: set[str]) -> set[str]:
        """Sends the newest version to an engine that lacked it the last time as well; returns those that lack it."""
        version = self._newest
        if version is None:
            return set()
        now_s = time.monotonic()
        lacking = await self._lacking(version)
        late = {n for n in lacking & suspects if n not in self._pauses or now_s >= self._pauses[n].until_s}
        if not late:
            return lacking
        name = min(late)  # one by one: an engine that breaks its group breaks no other's
        wait_s = self._pauses[name].next_s if name in self._pauses else BACKOFF_S[0]
        self._pauses[name] = _Pause(until_s=now_s + wait_s, next_s=min(2 * wait_s, BACKOFF_S[1]))
        logger.info("sending version {} again, to {}", version, name)
        if await self._try(version, {name}):
            self._stuck.pop(name, None)
        return lacking - {name}

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
