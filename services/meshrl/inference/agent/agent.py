"""The agent of an engine: registers it at the weight hub, loads new versions, and swaps them under running requests.

A version is loaded while the engine generates, which pauses only for the swap. The rules in `states` ask for actions;
here each is carried out in a task of its own. A hub that is away is called again while the engine serves on.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from loguru import logger
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode

from meshrl.client import WeightSyncClient
from meshrl.client.backoff import AWAY_S, Backoff
from meshrl.core.config.shared import WeightBroadcastConfig
from meshrl.core.credentials.https import scheme
from meshrl.core.telemetry.tracing import SYNC_APPLY_SPAN
from meshrl.core.telemetry.waits import Waits
from meshrl.core.waiting import StoppedError, next_within, set_within, unless_stopped
from meshrl.inference.agent.ahead import VersionAhead
from meshrl.inference.agent.probe import ProbeRule
from meshrl.inference.agent.states import (
    Action,
    AgentMachine,
    CancelFetch,
    Leave,
    LetGo,
    LineMachine,
    ResumeEngine,
    SendReport,
    StartApply,
    StartFetch,
    StartJoin,
    StartSleep,
    fault_of,
)
from meshrl.inference.agent.version_loader import PreparedVersion, VersionFetcher, VersionLoader
from meshrl.inference.engine import Engine
from meshrl.versions.downloads import Downloader
from meshrl.versions.files import Spool
from meshrl.versions.sources import LinkLimits
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.trace import sync_context
from meshrl.wire.types import (
    AgentFault,
    AgentRegistration,
    AgentReport,
    AgentState,
    ApplyReport,
    JoinGroup,
    Lease,
    Manifest,
    Transport,
    VersionKind,
    capabilities,
)

_PERMANENT = frozenset({Reason.CONTRACT_MISMATCH, Reason.INVALID_REQUEST, Reason.NOT_SUPPORTED})
APPLY_DEADLINE_S = 60.0
HOLD_S = 30.0  # a gang's pause, if the hub never ends it
PROBE_DEADLINE_S = 10.0  # an engine without room for one more prompt has none until requests end
SLEEP_DEADLINE_S = 240.0  # to fall asleep or wake up, beyond what an engine gives itself
STOOD_S = 5.0  # a session that lasted as long was a good one


@dataclass(kw_only=True, eq=False)
class LineWork:
    """A run's version that is being fetched, and the prepared one."""

    loader: VersionLoader
    probes: ProbeRule
    failed: str = ""  # the artifact that could not be applied last, which is tried again and again
    fetching: asyncio.Task[None] | None = None
    prepared: PreparedVersion | None = None

    def cancel(self) -> None:
        _cancel(self.fetching)
        self.fetching, self.prepared = None, None


@dataclass(frozen=True, kw_only=True)
class Held:
    began_s: float
    line: LineMachine
    report: ApplyReport
    prepared: PreparedVersion


@dataclass(frozen=True, kw_only=True)
class Membership:
    """An engine's name at its hubs; without an id the address at which it serves."""

    engine_id: str = ""
    engine_pool: str = ""
    broadcast: WeightBroadcastConfig | None = None


class WeightAgent:
    """Keeps one engine on the hub's versions. `run` ends when `stop` is set or the hub asks the agent to leave."""

    def __init__(
        self,
        client: WeightSyncClient,
        engine: Engine,
        membership: Membership,
        address: str,
        *,
        spool_dir: Path | None = None,
        url: str = "",
        away_s: float | None = None,
        waits: Waits | None = None,
        ahead: VersionAhead | None = None,
    ) -> None:
        """`address` is the host:port at which the engine serves; `url` is the hub's way to it, if another.

        spool_dir: as of `Spool`; away_s: the agent ends once the hub was away so long, None is never; ahead: what came
        while the engine started, which is closed here.
        """
        self._client = client
        self._engine = engine
        self._engine_id, self._engine_pool = membership.engine_id or address, membership.engine_pool
        self._url, self._away_s = url or f"{scheme()}://{address}", away_s
        self.connected = False  # to the hub
        self.waits = waits or Waits()
        self._ahead, self._spool = ahead, None
        if engine.stages_from_files:
            self._spool = Spool(spool_dir) if ahead is None else ahead.spool
        broadcast = membership.broadcast or WeightBroadcastConfig()
        self._max_probe_error = broadcast.max_probe_error
        self.downloader = Downloader(client, LinkLimits.of(broadcast), broadcast.relays)
        self._signature = manifests.layout_signature(engine.layout())
        self.machine = AgentMachine(version=engine.version)
        self._lease: Lease | None = None
        self._registered: tuple[str, ...] = ()  # capabilities
        self._outbox: asyncio.Queue[AgentReport] = asyncio.Queue()
        self._leave = asyncio.Event()
        self._defect: BaseException | None = None  # what ended a task: the agent ends with it
        self._lines: dict[str, LineWork] = {}
        self._join_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._hold_timer: asyncio.Task[None] | None = None
        self._live_root = b""
        self._held: Held | None = None

    # --- life -----------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Registers and follows the hub. Raises errors that waiting does not cure: CONTRACT_MISMATCH, or a defect."""
        self._live_root = self._engine.root or await self._engine.weights_root()
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: self._leave.set())
        backoff = Backoff(*AWAY_S)
        gone_s: float | None = None  # when the hub was last there, while it is away
        try:
            while not self._leave.is_set():
                began_s = time.monotonic()
                try:
                    await unless_stopped(self._leave, self._follow())
                    gone_s = None
                except MeshError as error:
                    if error.reason in _PERMANENT:
                        raise
                    if gone_s is None or self.connected:  # logged once each time that it goes away
                        logger.warning("the weight hub is away: {}; calling again", error)
                        gone_s = time.monotonic()
                    if self._away_s is not None and time.monotonic() - gone_s >= self._away_s:
                        logger.info("the weight hub is away for {:g} s; the engine waits for another", self._away_s)
                        break
                finally:
                    self.connected = False
                if time.monotonic() - began_s > STOOD_S:
                    backoff.reset()
                await set_within(self._leave, backoff.next_s())
        except StoppedError:  # by `stop` or by the hub
            pass
        finally:
            stopping.cancel()
            await self._wind_down()
        if self._defect is not None:
            raise self._defect

    async def _wind_down(self) -> None:
        for work in self._lines.values():
            work.cancel()
        _cancel(self._join_task)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=APPLY_DEADLINE_S)
        await self._resume()
        for work in self._lines.values():
            work.loader.drop_image()
        if self._spool is not None:
            self._spool.drop_room()
        await self._close_ahead()
        await self.downloader.close()

    async def _close_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            await ahead.close()

    async def _follow(self) -> None:
        vouched = any(line.version is not None for line in self.machine.lines.values())
        held = self._engine.version if vouched else None
        support, adapters = self._engine.collective, self._engine.adapters
        self._registered = self._capabilities()
        self._lease = await self._client.register(
            AgentRegistration(
                engine_id=self._engine_id,
                url=self._url,
                engine_pool=self._engine_pool,
                transports=(Transport.FILESYSTEM, Transport.STREAM, *(() if support is None else (Transport.NCCL,))),
                layout_signature=self._signature,
                held_version=held,
                held_root=self._live_root if held is not None else b"",
                collective_ranks=0 if support is None else support.ranks,
                collective_backend="" if support is None else support.backend,
                host=platform.node(),
                can_sleep=self._engine.can_sleep,
                max_adapters=0 if adapters is None else adapters.max_adapters,
                max_adapter_rank=0 if adapters is None else adapters.max_rank,
                capabilities=self._registered,
            )
        )
        self._outbox, self.connected = asyncio.Queue(), True
        self._perform(self.machine.connected())
        logger.info("registered at the weight hub as {}", self._engine_id)
        async for command in self._client.session(self._reports(self._lease)):
            logger.debug("from the hub: {}", command)
            self._perform(self.machine.command(command))

    async def _reports(self, lease: Lease) -> AsyncIterator[AgentReport]:
        outbox = self._outbox
        while True:
            report = await next_within(outbox, lease.lease_s / 3)
            if report is None:
                root = self._engine.root
                if root is not None and root != self._live_root and self._displaced():
                    self._live_root = root  # in a new session the hub has its own version served again
                    logger.warning("weights were loaded by hand as version {}: registering anew", self._engine.version)
                    return
                if self._capabilities() != self._registered:
                    return  # it registers anew
                for run_id in [*self.machine.lines]:
                    yield self._report(SendReport(run_id=run_id))
                continue
            yield report

    def _capabilities(self) -> tuple[str, ...]:
        takes = (capabilities.BROADCAST_DELTAS,) if self._engine.receives_deltas else ()
        return (*capabilities.ENGINE, *takes)

    def _displaced(self) -> bool:
        version, of_adapters = self._engine.version, self._engine.runs
        of_base = (line for line in self.machine.lines.values() if line.run_id not in of_adapters)
        return bool([line for line in of_base if line.displaced(version)])

    def _report(self, action: SendReport) -> AgentReport:
        machine = self.machine
        line = machine.lines.get(action.run_id) or next(iter(machine.lines.values()))
        of_no_version = action.of_group and line.state is not AgentState.PREPARED
        target = action.about or (None if of_no_version else line.target)
        return AgentReport(
            lease_id=self._lease.lease_id if self._lease is not None else "",
            run_id=line.run_id,
            state=line.state,
            serving_version=line.version,
            target_version=None if target is None else target.version,
            target_artifact_id="" if target is None else target.artifact_id,
            fault=action.fault,
            applied=action.applied,
            group_generation=machine.group,
            sleeping=self._engine.sleeping,
            sleep_answered=machine.sleep_answered,
            served=() if self._engine.adapters is None else self._engine.adapters.served,
        )

    # --- actions --------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendReport():
                    self._outbox.put_nowait(self._report(action))
                case StartFetch():
                    work = self._work(action.run_id)
                    work.cancel()
                    work.fetching = self._spawn(self._fetch(action))
                case CancelFetch():
                    self._work(action.run_id).cancel()
                case StartApply():
                    self._spawn(self._apply(action))
                case ResumeEngine():
                    self._spawn(self._resume())
                case LetGo():
                    self._let_go(action.run_id)
                case StartJoin():
                    _cancel(self._join_task)
                    self._join_task = self._spawn(self._join(action.group))
                case StartSleep():
                    self._spawn(self._sleep(action.number))
                case Leave():
                    self._leave.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._defect = error  # the engine is in an unknown state, perhaps paused
            self._leave.set()

    def _work(self, run_id: str) -> LineWork:
        work = self._lines.get(run_id)
        if work is None:
            ahead = None if self._ahead is None else self._ahead.take
            fetcher = VersionFetcher(self.downloader, spool=self._spool, ahead=ahead)
            loader = VersionLoader(self._client, self._engine, fetcher, self._signature, run_id)
            work = self._lines[run_id] = LineWork(loader=loader, probes=ProbeRule(self._max_probe_error))
        return work

    def _let_go(self, run_id: str) -> None:
        self._lines.pop(run_id, None)
        if self._engine.adapters is not None:
            self._engine.adapters.retire(run_id)
        logger.info("run {} is over: its requests end, and no more are taken", run_id)
        self._perform(self.machine.let_go(run_id))

    async def _join(self, group: JoinGroup) -> None:
        try:
            await self._engine.join_group(group)
        except Exception as error:  # noqa: BLE001 (whatever it was, the publisher goes on without this engine)
            logger.warning("group {} was not joined: {!r}", group.generation, error)
            self._perform(self.machine.join_failed(group, fault_of(error)))
            return
        logger.info("joined group {}", group.generation)
        self._perform(self.machine.joined(group))

    async def _sleep(self, number: int) -> None:
        fault = None
        try:
            await self._within_sleep_deadline("falling asleep", self._engine.sleep())
        except Exception as error:  # noqa: BLE001 (the engine says itself whether it may serve on)
            logger.error("the engine does not sleep: {}", error)
            fault = fault_of(error)
        self._perform(self.machine.slept(number, fault))

    async def _within_sleep_deadline(self, doing: str, work: Awaitable[object]) -> None:
        try:
            await asyncio.wait_for(work, SLEEP_DEADLINE_S)
        except TimeoutError as error:
            raise MeshError(Reason.DEADLINE_PASSED, f"{doing} took longer than {SLEEP_DEADLINE_S:g} s") from error

    async def _fetch(self, action: StartFetch) -> None:
        began_s, work, line = time.monotonic(), self._work(action.run_id), self.machine.lines[action.run_id]
        version, artifact_id = action.version, action.artifact_id
        try:
            with self.waits.waiting("version", lambda: work.loader.fetcher.arriving(version), ("weights",)):
                manifest, adopt = await self._stage(work.loader, version, artifact_id)
        except Exception as error:  # noqa: BLE001 (nothing was applied: the old version stays, and the hub must hear)
            logger.opt(exception=not isinstance(error, MeshError)).error("version {} is refused: {!r}", version, error)
            self._perform(line.fetch_failed(artifact_id, fault_of(error)))
            return
        prepare_s = time.monotonic() - began_s
        times = work.loader.times
        work.prepared = PreparedVersion(
            manifest=manifest, artifact_id=artifact_id, adopt=adopt, prepare_s=prepare_s, parts=times.seconds
        )
        logger.info("version {} is prepared in {:.3f} s: {}", version, prepare_s, times)
        self._perform(line.fetched(artifact_id))
        await self._close_ahead()

    async def _stage(self, loader: VersionLoader, version: int, artifact_id: str) -> tuple[Manifest, bool]:
        generation = self.machine.group
        await self._within_sleep_deadline("waking up", self._engine.wake())
        manifest = (found := await loader.find(version, artifact_id)).manifest
        through_group = manifest.transport is Transport.NCCL and not found.steps
        # Who is in a group takes what is broadcast, or the others would wait for it. An adapter alone says nothing of
        # the weights it is for.
        if not through_group and manifest.kind is not VersionKind.LORA and manifest.result_root == self._live_root:
            return manifest, True
        try:
            await loader.load(found)
        except BaseException:  # refused or abandoned: then the others must not wait for this engine either
            if through_group:
                await asyncio.shield(self._leave_group(generation))
            raise
        return manifest, False

    async def _leave_group(self, generation: int | None) -> None:
        actions = self.machine.group_lost(generation)
        if actions:  # else it is in a newer one already
            self._perform(actions)
            await self._engine.leave_group()

    async def _apply(self, action: StartApply) -> None:
        work, line, began_s = self._work(action.run_id), self.machine.lines[action.run_id], time.monotonic()
        prepared = work.prepared
        with apply_span(action.version, prepared, self._engine_id) as span:
            try:
                if prepared is None or prepared.artifact_id != action.artifact_id:
                    raise MeshError(Reason.ENGINE_FAILED, f"version {action.version} is not staged")
                async with asyncio.timeout(APPLY_DEADLINE_S):
                    kept = await self._swap(prepared, action)
                swapped_s = time.monotonic()
                hold = action.hold and not prepared.is_adapter
                probe_error = None if hold else await self._probe(line.run_id, prepared)
            except Exception as error:  # noqa: BLE001 (whatever it was, the weights may be torn: the engine stays paused)
                span.set_status(Status(StatusCode.ERROR, str(error)))
                self._poison(line, action.version, prepared, fault_of(error, Reason.ENGINE_FAILED))
                return
            work.prepared, root = None, prepared.manifest.result_root
            paused = not (prepared.adopt or prepared.is_adapter)
            if not prepared.is_adapter:
                self._live_root = root
            report = ApplyReport(
                version=action.version,
                root=root,
                pause_s=swapped_s - began_s if hold or paused else 0.0,
                prepare_s=prepared.prepare_s,
                requests_kept=kept,
                probe_error=probe_error,
            )
            span.set_attribute("meshrl.pause_s", round(report.pause_s, 6))
            span.set_attribute("meshrl.requests_kept", kept)
            if probe_error is not None:
                span.set_attribute("meshrl.probe_error", probe_error)
            if hold:
                self._held = Held(began_s=began_s, line=line, report=report, prepared=prepared)
                self._hold_timer = asyncio.create_task(self._end_hold(line, action.version))
            else:
                self._log_served(report)
            self._perform(line.applied(action.artifact_id, report))

    async def _swap(self, prepared: PreparedVersion, action: StartApply) -> int:
        engine, version, root = self._engine, action.version, prepared.manifest.result_root
        if prepared.is_adapter and engine.adapters is not None:
            return engine.adapters.serve(action.run_id, version, artifact_id=action.artifact_id, root=root)
        if prepared.adopt and not action.hold:  # the very weights that are live: nothing to stand still for
            await engine.adopt(version, root)
            return engine.in_flight
        kept = await engine.pause()
        await (engine.adopt(version, root) if prepared.adopt else engine.apply(version, root))
        if not action.hold:
            await engine.resume()
        return kept

    async def _end_hold(self, line: LineMachine, version: int) -> None:
        await asyncio.sleep(HOLD_S)  # the version is decided, so it may be served
        if line.held and line.version == version:
            logger.warning("no resume came for version {} in {:g} s; going on alone", version, HOLD_S)
            self._spawn(self._resume())

    async def _resume(self) -> None:
        held, timer, self._held, self._hold_timer = self._held, self._hold_timer, None, None
        if timer is not None:
            timer.cancel()
        if held is None:
            return
        await self._engine.resume()
        report = replace(held.report, pause_s=time.monotonic() - held.began_s)
        try:
            report = replace(report, probe_error=await self._probe(held.line.run_id, held.prepared))
        except MeshError as error:
            self._poison(held.line, report.version, held.prepared, fault_of(error))
            return
        self._log_served(report)
        self._perform(held.line.resumed(report))

    async def _probe(self, run_id: str, prepared: PreparedVersion) -> float | None:
        """The error in nats of the version just applied; None without a probe. Raises MeshError ENGINE_FAILED."""
        probe, engine, version = prepared.manifest.probe, self._engine, prepared.manifest.version
        if probe is None:
            return None
        try:
            prompt = probe.token_ids[: engine.max_model_len - 1]
            policy = f"{run_id}@{version}" if prepared.is_adapter else None
            scored = await asyncio.wait_for(engine.score(prompt, policy), PROBE_DEADLINE_S)
            return self._work(run_id).probes.judge(probe, scored)
        except (MeshError, TimeoutError, RuntimeError) as error:
            if not isinstance(error, MeshError) or error.reason is not Reason.ENGINE_FAILED:  # no room, or no memory
                why = f"no answer in {PROBE_DEADLINE_S:g} s" if isinstance(error, TimeoutError) else error
                logger.warning("version {} is served, but could not be probed: {}", version, why)
                return None
            if engine.lost is None:
                if not prepared.is_adapter:
                    await engine.condemn(f"version {version} is refused: {error.message}")
                elif engine.adapters is not None:
                    engine.adapters.retire(run_id)
            raise

    def _log_served(self, report: ApplyReport) -> None:
        logger.info(
            "version {} is served, pause {:.4f} s, {} requests kept, probe {}",
            report.version,
            report.pause_s,
            report.requests_kept,
            "none" if report.probe_error is None else f"{report.probe_error:.2g} nats off",
        )

    def _poison(self, line: LineMachine, version: int, prepared: PreparedVersion | None, fault: AgentFault) -> None:
        work = self._work(line.run_id)
        work.prepared = None
        again = prepared is not None and prepared.artifact_id == work.failed
        logger.log(
            "DEBUG" if again else "ERROR",
            "applying version {} failed, the engine serves nothing until it is seeded again: {}",
            version,
            fault.message,
        )
        work.failed = "" if prepared is None else prepared.artifact_id
        if prepared is None or not prepared.is_adapter:
            self._live_root = b""
        self._perform(line.apply_failed(fault))


def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()


@contextmanager
def apply_span(
    version: int, prepared: PreparedVersion | None, engine_id: str, tracer: trace.Tracer | None = None
) -> Iterator[trace.Span]:
    """The span `rl.sync.apply`: from the decision for a version until the engine serves it.

    It is in the trace of the hub's `rl.sync` of the version: both compute its ids alike (`meshrl.wire.trace`). Without
    anything prepared it is alone.
    """
    parent = None if prepared is None else sync_context(version, prepared.manifest.result_root)
    context = Context() if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent))
    with (tracer or trace.get_tracer("meshrl.inference")).start_as_current_span(
        SYNC_APPLY_SPAN, context=context, attributes={"meshrl.version": version, "meshrl.engine_id": engine_id}
    ) as span:
        if prepared is not None:
            span.set_attribute("meshrl.artifact_id", prepared.artifact_id)
            span.set_attribute("meshrl.prepare_s", round(prepared.prepare_s, 4))
            for part, seconds in prepared.parts.items():
                span.set_attribute(f"meshrl.prepare.{part}_s", round(seconds, 4))
        yield span
