"""The hub: connects the coordinator, which decides without I/O, to its log, its store of bytes and its agents.

Calls are passed to the coordinator on the event loop, and the actions that it returns go into the action queue. The hub
stops when an action fails, since its memory may then differ from its log. A restart reads the log.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from loguru import logger
from opentelemetry import trace

from meshrl.core.clock import AwakeClock
from meshrl.core.durable import disk_trouble
from meshrl.core.telemetry.waits import waits_of
from meshrl.core.waiting import Pulse
from meshrl.versions.store import VersionStore
from meshrl.versions.version_bytes import VersionBytes
from meshrl.weights.byte_server import ARRIVAL_DEADLINE_S, ByteServer
from meshrl.weights.compiled import CompiledStore
from meshrl.weights.coordinator.coordinator import Coordinator
from meshrl.weights.coordinator.engine_groups import BroadcastRequest
from meshrl.weights.coordinator.states import (
    DECIDED,
    Action,
    Answer,
    DeleteBytes,
    EndSession,
    Key,
    Save,
    Send,
    VersionRecord,
)
from meshrl.weights.decision_log import DecisionLog, LogError
from meshrl.weights.spans import describe, record_sync
from meshrl.wire import manifest as manifests
from meshrl.wire import manifest_checks
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.types import (
    Activation,
    ActivationRequest,
    AgentCommand,
    AgentRegistration,
    AgentReport,
    Chunk,
    EngineInfo,
    FoundVersion,
    Lease,
    Manifest,
    OpenedGroup,
    SleepOutcome,
    StagedVersion,
    Transport,
    VersionEvent,
    VersionInfo,
    VersionKind,
    VersionState,
)

Session = asyncio.Queue[AgentCommand | MeshError | None]
"""Of an agent: commands, the error that ends the session, or None once the agent hung up."""

FIRST_REPORT_DEADLINE_S = 10.0
LOG_FILE = "decisions.sqlite"

_T = TypeVar("_T")


class Hub:
    """`start` before use, `stop` after; `failed` is done when the hub must not go on."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        spool_dir: Path,
        max_chunk_bytes: int,
        verify_files: Literal["digests", "sizes"],
        tracer: trace.Tracer | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.coordinator = coordinator
        self._log = DecisionLog(spool_dir / LOG_FILE)
        self._store = VersionStore(spool_dir / "artifacts")
        self.compiled = CompiledStore(spool_dir / "compiled")
        self._bytes = ByteServer(self._store, max_chunk_bytes=max_chunk_bytes)
        self._max_chunk_bytes = max_chunk_bytes
        self._verify_files = verify_files
        self._tracer = tracer or trace.get_tracer("meshrl.weights")
        self._waits = waits_of(self._tracer)
        stopped = partial(logger.warning, "this hub was stopped for {:.1f} s: leases and deadlines go on from there")
        self._now, self._wall = AwakeClock(monotonic, stopped=stopped), wall
        self._actions = ActionQueue(self._perform)
        self._sessions: dict[str, Session] = {}  # those that are open, by lease
        # By version, and whether the decision is all that is waited for.
        self._waiters: dict[Key, list[tuple[asyncio.Future[Activation], bool]]] = {}
        self._sealing: dict[str, asyncio.Task[None]] = {}  # by artifact, as those below
        self._deleting: dict[str, asyncio.Task[None]] = {}
        self._changed = Pulse()  # a version did
        self._heard = Pulse()  # of an engine, or that time has passed
        self._opening = asyncio.Lock()  # a repeated request is not answered before the first one is durable
        self._leaving = False  # takes nothing new
        self._draining = False  # ends what stands
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def failed(self) -> asyncio.Future[BaseException]:
        return self._actions.failed

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Reads the log and starts to serve. Raises LogError or OSError when the log cannot be used."""
        saved = await self._log.open()
        self.coordinator.recover(saved, self._now(), self._wall())
        live = {artifact for record in self.coordinator.live for artifact in record.artifacts}
        await asyncio.to_thread(self._store.prepare, live)
        for line in self.coordinator.lines.values():
            newest = line.records.newest_decided()
            text = "goes on from {} with run {}: epoch {}, {} versions kept, newest decided {}"
            decided = "none" if newest is None else f"{newest.version} ({newest.state.value})"
            logger.info(text, self._log.path, line.run_id, line.epoch, len(line.records.live), decided)
        self._tasks = [asyncio.create_task(self._actions.run()), asyncio.create_task(self._tick())]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def drain(self, deadline_s: float | None) -> None:
        """Takes no more uploads, activations and engines; returns once no commit is under way, or at the deadline."""
        self._leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while any(each.deciding or each.state is VersionState.COMMITTING for each in self.coordinator.live):
                    await self._changed.next()

    def _check_stays(self) -> None:
        if self._leaving or self._draining:
            raise MeshError(Reason.DRAINING, "the hub is draining; call again when it is back")

    def close_streams(self) -> None:
        """Ends sessions, watches and waits with DRAINING, so that the server can drain."""
        self._draining = True
        for session in self._sessions.values():
            session.put_nowait(MeshError(Reason.DRAINING, "the hub is shutting down; register again"))
        self._changed.beat()
        self._bytes.close()
        self._refuse_waiters(MeshError(Reason.DRAINING, "the hub is shutting down; call again"))

    async def stop(self) -> None:
        self.close_streams()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._deleting.values(), return_exceptions=True)
        await asyncio.to_thread(self._store.drop_room)
        await self._log.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None or self.failed.done():
            return
        what = "the log cannot be written" if isinstance(error, OSError | LogError) else "the hub met a defect"
        if (trouble := disk_trouble(error)) is not None:
            logger.error("{}: {}; the hub stops", what, trouble)
        else:
            logger.opt(exception=error).error("{}: {!r}; the hub stops", what, error)
        answer = MeshError(Reason.INTERNAL, f"{what} and it is shutting down: {error!r}")
        self._actions.fail(error, answer)
        self._refuse_waiters(answer)

    async def _tick(self) -> None:
        period_s = min(0.25, self.coordinator.pool.lease_s / 10)
        while True:
            await asyncio.sleep(period_s)
            self._actions.put(self.coordinator.tick(self._now()))
            self._heard.beat()

    def _refuse_waiters(self, error: MeshError) -> None:
        waiting, self._waiters = self._waiters, {}
        for outcome, _ in (waiter for waiters in waiting.values() for waiter in waiters):
            refuse(outcome, error)
        self._actions.refuse_all(error)

    async def _perform(self, action: Action) -> None:
        match action:
            case Save():
                await self._log.save(action)
                if action.committed is not None:
                    record_sync(self._tracer, action.committed, self._wall())
                if action.decision is not None:
                    logger.info("version {} of run {} is decided", action.decision.version, action.decision.run_id)
                    self._actions.put(self.coordinator.decided(action.decision, self._now()))
                    for future, until_decided in self._waiters.get(action.decision, []):
                        if until_decided and not future.done():
                            future.set_result(self.coordinator.record(action.decision).decision())
                self._changed.beat()
            case Send():
                if (session := self._sessions.get(action.lease_id)) is not None:
                    session.put_nowait(action.command)
                    logger.debug("to {}: {}", action.engine_id, action.command)
            case EndSession():
                self._end_session(action.lease_id)
            case Answer():
                for future, _ in self._waiters.pop(action.key, []):
                    if isinstance(action.result, MeshError):
                        refuse(future, action.result)
                    elif not future.done():
                        future.set_result(action.result)
            case DeleteBytes():  # takes seconds for gigabytes, which no decision waits for
                self._deleting[action.artifact_id] = deleting = asyncio.create_task(self._delete(action))
                deleting.add_done_callback(self._ended)

    async def _delete(self, action: DeleteBytes) -> None:
        await asyncio.to_thread(self._store.delete, action.artifact_id, action.paths)
        self._bytes.changed()
        if self._deleting.get(action.artifact_id) is asyncio.current_task():
            del self._deleting[action.artifact_id]

    # --- publishers -----------------------------------------------------------------------------

    async def create_version(self, manifest: Manifest, chunks: AsyncIterator[Chunk]) -> StagedVersion:
        """Stages a manifest and the chunks that follow. Raises as `Coordinator.stage` and `VersionBytes.write`."""
        self._check_stays()
        found = manifest_checks.violations(manifest, max_chunk_bytes=self._max_chunk_bytes)
        if found:
            raise invalid([FieldViolation(f"manifest.{field}", text) for field, text in found], "the manifest")
        artifact = await asyncio.to_thread(manifests.artifact_id, manifest)
        describe(manifest, artifact)
        await asyncio.to_thread(self._store.check_base, artifact, manifest)
        record, actions = self.coordinator.stage(manifest, artifact)
        await self._actions.put(actions)
        if not record.takes(artifact):
            return StagedVersion(artifact_id=artifact, missing_offsets=(), max_chunk_bytes=self._max_chunk_bytes)
        if (deleting := self._deleting.get(artifact)) is not None:  # an earlier attempt's
            await asyncio.wait({deleting})
        await asyncio.to_thread(self._store.open, artifact, manifest)
        await self._bytes.store_upload(
            artifact, chunks, lambda: self._actions.put(self.coordinator.arrives(record, self._now()))
        )
        missing = self._store.held(artifact).missing_offsets()
        return StagedVersion(artifact_id=artifact, missing_offsets=missing, max_chunk_bytes=self._max_chunk_bytes)

    async def seal_version(
        self, *, run_id: str, epoch: int, version: int, artifact_id: str, traceparent: str
    ) -> VersionInfo:
        record = self.coordinator.line(run_id).sealing(epoch=epoch, version=version, artifact=artifact_id)
        # A repeated call joins the first: bytes are hashed once, and all are answered once the seal is durable.
        sealing = self._sealing.get(artifact_id)
        if sealing is None and record.takes(artifact_id):
            sealing = self._sealing[artifact_id] = asyncio.create_task(self._seal(record, artifact_id, traceparent))
        if sealing is not None:
            await asyncio.shield(sealing)  # it goes on when its caller hangs up
        return record.info()

    async def _seal(self, record: VersionRecord, artifact: str, traceparent: str) -> None:
        try:
            await asyncio.to_thread(self._store.held(artifact).verify, self._verify_files)
            if artifact == record.copy:
                actions = self.coordinator.copied(record, self._now())
            else:
                actions = self.coordinator.seal(record.key, traceparent, self._now(), self._wall())
            await self._actions.put(actions)
        finally:
            del self._sealing[artifact]
        which = "copied" if artifact == record.copy else "sealed"
        logger.info("version {} is {}: {} bytes, artifact {}", record.version, which, record.num_bytes, artifact)

    async def abort_version(
        self, *, run_id: str, epoch: int, version: int, message: str, artifact_id: str = ""
    ) -> VersionInfo:
        record, actions = self.coordinator.line(run_id).abort(
            epoch=epoch, version=version, artifact_id=artifact_id, message=message, now_s=self._now()
        )
        await self._actions.put(actions)
        if deleting := {self._deleting[artifact] for artifact in record.artifacts if artifact in self._deleting}:
            await asyncio.wait(deleting)  # the publisher's next files may have the same names; its deadline bounds this
        return record.info()

    async def open_group(self, request: BroadcastRequest) -> OpenedGroup:
        """Has engines join a new group; answers once that is durable. Raises as `Coordinator.open_group`."""
        self._check_stays()
        async with self._opening:
            opened, actions = self.coordinator.open_group(request, self._now(), self._wall())
            await self._actions.put(actions)
        members = ", ".join(f"{m.engine_id} ({m.num_ranks} ranks)" for m in opened.members)
        logger.info("group {} at {}: {}", opened.generation, request.store_address, members)
        return opened

    async def close_run(self, *, run_id: str, epoch: int) -> None:
        await self._actions.put(self.coordinator.close_run(run_id, epoch))
        logger.info("run {} is closed", run_id)

    # --- the orchestrator -----------------------------------------------------------------------

    async def activate_version(self, request: ActivationRequest) -> Activation:
        """Commits a version; waits for the outcome, or for the decision alone.

        Raises as `RunLine.activate`, and ENGINES_NOT_READY.
        """
        self._check_stays()
        record, actions = self.coordinator.line(request.run_id).activate(request, self._now())
        if request.return_when_decided and record.state in DECIDED:
            await self._actions.put(actions)
            return record.decision()
        outcome: asyncio.Future[Activation] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(record.key, []).append((outcome, request.return_when_decided))
        await self._actions.put(actions)
        with self._waits.waiting(
            "commit",
            lambda: f"version {record.version} at {self._describe_without(record) or 'engines, of which it has none'}",
            lambda: tuple(self._without(record).values()),
        ):
            return await outcome

    def _without(self, record: VersionRecord) -> dict[str, str]:
        engines = self.coordinator.pool.engines.values()
        lacking = (engine for engine in engines if engine.on(record.key.run_id).serving != record.version)
        return {engine.engine_id: engine.registration.url for engine in lacking}

    def _describe_without(self, record: VersionRecord) -> str:
        faults = {} if record.attempt is None else record.attempt.faults
        refusals = {name: f", which refused it ({fault.reason}: {fault.message})" for name, fault in faults.items()}
        return "; ".join(name + refusals.get(name, "") for name in self._without(record))

    async def sleep_engines(self, engine_pool: str, deadline_s: float) -> SleepOutcome:
        """As `Coordinator.sleep`; waits for the engines' answers, at most `deadline_s`."""
        began_s = self._now()
        asked, actions = self.coordinator.sleep(engine_pool)
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._actions.put(actions)
                while not asked.over and not self._draining:
                    await self._heard.next()
        logger.info("{} engines sleep, {} stay awake", asked.asleep, asked.awake)
        return SleepOutcome(asleep=asked.asleep, awake=asked.awake, seconds=self._now() - began_s)

    async def watch_versions(self, run_id: str, after_revision: int) -> AsyncIterator[VersionEvent]:
        """Yields each version that changed after a revision in its current state, then later changes.

        A slow watcher sees the last state of each version, not every one between.
        """
        while True:
            changed = self._changed.upcoming
            for revision, version in self.coordinator.infos(run_id, after_revision):
                yield VersionEvent(revision=revision, version=version)
                after_revision = revision
            await changed.wait()
            if self._draining:
                raise MeshError(Reason.UNREACHABLE, "the hub is shutting down; watch again when it is back")

    # --- engines --------------------------------------------------------------------------------

    async def register(self, registration: AgentRegistration) -> Lease:
        self._check_stays()
        lease, actions = self.coordinator.register(registration, uuid.uuid4().hex, self._now())
        await self._actions.put(actions)
        logger.info("engine {} registered at {}", registration.engine_id, registration.url)
        return lease

    async def session(self, reports: AsyncIterator[AgentReport]) -> AsyncIterator[AgentCommand]:
        """Takes an agent's reports and yields its commands until it hangs up. Raises LEASE_EXPIRED."""
        try:
            first = await asyncio.wait_for(anext(reports), FIRST_REPORT_DEADLINE_S)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise MeshError(Reason.DEADLINE_PASSED, "no report came; send one at once with the lease_id") from error
        if self._draining:
            raise MeshError(Reason.DRAINING)
        lease_id = first.lease_id
        actions = self.coordinator.report(first, self._now())
        self._end_session(lease_id)  # an older one of the same lease
        session = self._sessions[lease_id] = Session()
        await self._actions.put([*actions, *self.coordinator.connect(lease_id, self._now())])
        reader = asyncio.create_task(self._read_reports(reports, lease_id))
        reader.add_done_callback(lambda _: session.put_nowait(None))
        try:
            while (command := await session.get()) is not None:
                if isinstance(command, MeshError):
                    raise command
                yield command
            reader.result()
        finally:
            reader.cancel()
            if self._sessions.get(lease_id) is session:
                del self._sessions[lease_id]
                self.coordinator.disconnect(lease_id)

    def _end_session(self, lease_id: str) -> None:
        session = self._sessions.pop(lease_id, None)
        if session is not None:
            session.put_nowait(MeshError(Reason.LEASE_EXPIRED, "the lease is over; register again"))

    async def _read_reports(self, reports: AsyncIterator[AgentReport], lease_id: str) -> None:
        async for report in reports:
            if report.lease_id != lease_id:
                raise invalid([FieldViolation("lease_id", "must be the same in every report of a session")])
            await self._actions.put(self.coordinator.report(report, self._now()))
            self._heard.beat()

    async def find_version(
        self, run_id: str, version: int | None, artifact_id: str = "", held_root: bytes = b""
    ) -> FoundVersion:
        """Returns a sealed version and the steps that reach it from weights with the root `held_root`.

        A broadcast version has its copy as the only step, once that is here. `artifact_id` chooses between epochs, and
        also finds a version while its bytes arrive. Raises UNKNOWN_VERSION, VERSION_NOT_SEALED.
        """
        coordinator = self.coordinator
        kept = {record.artifact_id for record in coordinator.live}
        if artifact_id not in kept and (part := self._store.part(artifact_id)) is not None:  # a relay asks for it
            return FoundVersion(manifest=part, artifact_id=artifact_id)
        record = coordinator.by_artifact(artifact_id) if artifact_id else coordinator.line(run_id).find(version)
        if record.state is VersionState.STAGING and not (artifact_id and record.arriving):
            raise MeshError(Reason.VERSION_NOT_SEALED, f"version {record.version} is still being staged")
        artifact_id = artifact_id or record.artifact_id
        manifest, steps = self._store.held(artifact_id).manifest, tuple[Manifest, ...]()
        if record.copied and artifact_id != record.copy:
            steps = (self._store.held(record.copy).manifest,)
        elif manifest.kind is VersionKind.DELTA and manifest.transport is not Transport.NCCL:
            whole = record.state is not VersionState.STAGING
            steps = await asyncio.to_thread(self._store.steps, artifact_id, held_root, whole=whole)
        return FoundVersion(manifest=manifest, artifact_id=artifact_id, steps=steps)

    def fetch(self, artifact_id: str, ranges: Sequence[tuple[int, int]], chunk_bytes: int) -> AsyncIterator[bytes]:
        """As `ByteServer.feed`. Raises also VERSION_NOT_SEALED if no bytes come."""
        self._check_comes(artifact_id)
        return self._bytes.feed(artifact_id, ranges, chunk_bytes, partial(self._is_arriving, artifact_id))

    def _check_comes(self, artifact_id: str) -> None:
        record = self._record(artifact_id)
        if record is not None and record.state is VersionState.STAGING and not record.arriving:
            raise MeshError(Reason.VERSION_NOT_SEALED, f"version {record.version} is still being staged")

    def _is_arriving(self, artifact_id: str) -> bool:
        record = self._record(artifact_id)
        return record is not None and record.state is VersionState.STAGING

    async def raw_fetch(self, artifact_id: str, at: int, end: int) -> tuple[VersionBytes, int]:
        """The version, and up to where its bytes from `at` on can be sent. Raises as `fetch`, once none came."""
        self._check_comes(artifact_id)
        held = self._store.held(artifact_id)
        if held.manifest.transport is Transport.NCCL or end > held.manifest.payload_bytes:
            raise invalid([FieldViolation("range", "the hub has no such bytes")], "the fetch")
        arriving = partial(self._is_arriving, artifact_id)
        stop = await self._bytes.available_to(held, at, end, ARRIVAL_DEADLINE_S, arriving)
        if stop == at:
            raise MeshError(Reason.UNREACHABLE, f"no more of artifact {artifact_id} came")
        return held, stop

    async def raw_upload(self, artifact_id: str) -> tuple[VersionBytes, Callable[[], None]]:
        """Where a staged version's chunks are put on a thread, and what is called on the event loop after each."""
        self._check_stays()
        records = (each for each in self.coordinator.live if artifact_id in each.artifacts and each.takes(artifact_id))
        if (record := next(records, None)) is None:
            raise MeshError(Reason.UNKNOWN_VERSION, f"no bytes of artifact {artifact_id} are awaited")

        def came() -> None:
            self._actions.put(self.coordinator.arrives(record, self._now()))
            self._bytes.changed()

        return self._store.held(artifact_id), came

    def _record(self, artifact_id: str) -> VersionRecord | None:
        try:
            return self.coordinator.by_artifact(artifact_id)
        except MeshError:
            if self._store.part(artifact_id) is None:
                raise
            return None

    def list_engines(self, engine_pool: str) -> tuple[EngineInfo, ...]:
        engines, wall_s = self.coordinator.engines(engine_pool, self._now()), self._wall()
        return tuple(replace(engine, last_seen_time=wall_s - engine.last_seen_s) for engine in engines)


class ActionQueue:
    def __init__(self, perform: Callable[[Action], Awaitable[None]]) -> None:
        self._perform = perform
        self._queue: asyncio.Queue[tuple[Sequence[Action], asyncio.Future[None]]] = asyncio.Queue()
        self._under_way: asyncio.Future[None] | None = None  # answered once its actions are carried out
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def put(self, actions: Sequence[Action]) -> asyncio.Future[None]:
        """Adds actions; the future is done once all of them are carried out, or has the MeshError why they are not."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.failed.done():
            refuse(done, MeshError(Reason.INTERNAL, f"the hub is shutting down: {self.failed.result()!r}"))
        elif actions:
            self._queue.put_nowait((actions, done))
        else:
            done.set_result(None)
        return done

    async def run(self) -> None:
        while True:
            actions, done = await self._queue.get()
            self._under_way = done
            for action in actions:
                await self._perform(action)
            if not done.done():
                done.set_result(None)

    def fail(self, error: BaseException, answer: MeshError) -> None:
        """Takes no more actions; `answer` is raised for all that wait for one."""
        self.failed.set_result(error)
        if self._under_way is not None:
            refuse(self._under_way, answer)
        self.refuse_all(answer)

    def refuse_all(self, error: MeshError) -> None:
        while not self._queue.empty():
            refuse(self._queue.get_nowait()[1], error)


def refuse(future: asyncio.Future[_T], error: MeshError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # it need not be awaited
