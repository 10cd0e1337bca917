"""Decides which versions engines prepare and serve: events and the time in, actions out, no I/O inside.

Each run has a line of versions (`line`); the lines share the engines and one log. An engine has one version of the base
model and any number of adapters, so a hub has the line of one run that trains the base model, or lines of adapters.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshrl.weights.coordinator import rows
from meshrl.weights.coordinator.engine_groups import BroadcastRequest, EngineGroups
from meshrl.weights.coordinator.engines import EnginePool, SleepRound
from meshrl.weights.coordinator.line import LineLimits, LineLog, RunLine
from meshrl.weights.coordinator.states import (
    Action,
    EngineRecord,
    Key,
    Save,
    Send,
    VersionRecord,
)
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.types import (
    AgentRegistration,
    AgentReport,
    EngineInfo,
    Lease,
    Manifest,
    OpenedGroup,
    Retire,
    VersionInfo,
    VersionKind,
    VersionState,
)
from meshrl.wire.values import JsonObject

MAX_RUNS = 64


class Coordinator:
    def __init__(self, limits: LineLimits, *, lease_s: float, max_chunk_bytes: int) -> None:
        self.lines: dict[str, RunLine] = {}  # by run
        self.pool = EnginePool(lease_s)
        self.groups = EngineGroups()
        self._log = LineLog()
        self._limits = limits
        self._sleeps = 0  # rounds of SleepEngines so far
        self._max_chunk_bytes = max_chunk_bytes

    # --- reading ----------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        """The number of the last change of a version, of any run."""
        return self._log.revision

    @property
    def epochs(self) -> Mapping[str, int]:
        return {line.run_id: line.epoch for line in self.lines.values() if line.epoch}

    @property
    def live(self) -> list[VersionRecord]:
        return [record for line in self.lines.values() for record in line.records.live]

    def line(self, run_id: str) -> RunLine:
        """The line of a run; an empty id is the only run's. Raises UNKNOWN_RUN, INVALID_REQUEST."""
        line = self.lines.get(run_id)
        if line is not None:
            return line
        runs = ", ".join(sorted(self.lines))
        if run_id:
            known = f"this hub has {runs}" if runs else "nothing was published yet"
            raise MeshError(Reason.UNKNOWN_RUN, f"run {run_id!r} is unknown: {known}")
        if len(self.lines) > 1:
            raise invalid([FieldViolation("run_id", f"must name one of the runs of this hub: {runs}")])
        return next(iter(self.lines.values()), None) or self._new_line("")

    def record(self, key: Key) -> VersionRecord:
        return self.lines[key.run_id].records[key]

    def by_artifact(self, artifact_id: str) -> VersionRecord:
        """The version of an artifact whose bytes are kept. Raises UNKNOWN_VERSION."""
        for record in self.live:
            if artifact_id == record.artifact_id or (record.copied and artifact_id == record.copy):
                return record
        raise MeshError(Reason.UNKNOWN_VERSION, f"artifact {artifact_id} is unknown or retired; fetch a newer version")

    def infos(self, run_id: str, after_revision: int) -> list[tuple[int, VersionInfo]]:
        """(revision, version) of every version that changed after a revision, in order; an empty run is every run."""
        lines = [line for line in self.lines.values() if run_id in ("", line.run_id)]
        changed = [r for line in lines for r in line.records.values() if r.revision > after_revision]
        offset_s = self._log.wall_offset_s
        return [(r.revision, r.info(offset_s)) for r in sorted(changed, key=lambda r: r.revision)]

    def engines(self, engine_pool: str, now_s: float) -> tuple[EngineInfo, ...]:
        return tuple(self._info(engine, now_s) for engine in self.pool.of_pool(engine_pool))

    def _info(self, engine: EngineRecord, now_s: float) -> EngineInfo:
        given, lines = engine.registration, list(self.lines.values())
        shown = engine.on(lines[0].run_id if lines else "")
        routable = [line.run_id for line in lines if self.pool.live(engine, now_s) and line.routable(engine)]
        return EngineInfo(
            engine_id=engine.engine_id,
            url=given.url,
            engine_pool=given.engine_pool,
            state=shown.state,
            serving_version=shown.serving,
            routable=bool(routable),
            last_seen_s=max(0.0, now_s - engine.seen_s),
            last_fault=next((fault for line in lines if (fault := engine.on(line.run_id).last_fault)), None),
            transports=given.transports,
            collective_ranks=given.collective_ranks,
            collective_backend=given.collective_backend,
            group_generation=engine.group_generation,
            host=given.host,
            sleeping=engine.sleeping,
            can_sleep=given.can_sleep,
            layout_signature=given.layout_signature,
            served=engine.served,
            max_adapters=given.max_adapters,
            max_adapter_rank=given.max_adapter_rank,
            capabilities=given.capabilities,
        )

    # --- publishers -------------------------------------------------------------------------

    def stage(self, manifest: Manifest, artifact: str) -> tuple[VersionRecord, list[Action]]:
        """Takes a manifest, the first of a run included. Raises RUN_LIMIT_REACHED, and as `RunLine.stage`."""
        line = self._line_to_publish(manifest.run_id, adapter=manifest.kind is VersionKind.LORA)
        record, actions = line.stage(manifest, artifact)
        self._open(line)
        return record, actions

    def arrives(self, record: VersionRecord, now_s: float) -> list[Action]:
        line = self.lines.get(record.key.run_id)
        return [] if line is None else line.arrives(record, now_s)

    def seal(self, key: Key, traceparent: str, now_s: float, wall_s: float) -> list[Action]:
        self._log.wall_offset_s = wall_s - now_s
        return self.line(key.run_id).seal(key, traceparent, now_s)

    def copied(self, record: VersionRecord, now_s: float) -> list[Action]:
        line = self.lines.get(record.key.run_id)
        return [] if line is None else line.copied(record, now_s)

    def open_group(self, request: BroadcastRequest, now_s: float, wall_s: float) -> tuple[OpenedGroup, list[Action]]:
        """Forms a group and has its engines join it. A repeated request gets the same answer, until a newer one.

        Raises: RUN_LIMIT_REACHED beside other runs, STALE_EPOCH, GROUP_BROKEN when no engine can take part.
        """
        former = self.groups.current
        if former is not None and former.request.request_id == request.request_id:
            return former.opened(), []
        line = self._line_to_publish(request.run_id, adapter=False)
        line.check_epoch(request.epoch)
        sealed = [record.key for record in line.records.live if record.state is not VersionState.STAGING]
        first = max((key.version + 1 for key in sealed if key.epoch == request.epoch), default=0)
        self._log.wall_offset_s = wall_s - now_s
        group = self.groups.open(request, self.pool.engines.values(), first, now_s)
        self._open(line)
        actions = line.begin_epoch(request.epoch)
        changed: dict[int, JsonObject | None] = {} if former is None else {former.generation: None}
        changed[group.generation] = rows.group(group, self._log.wall_offset_s)
        actions.append(self._log.save(groups=changed))
        return group.opened(), [*actions, *self._next_actions(now_s)]

    def close_run(self, run_id: str, epoch: int) -> list[Action]:
        """Forgets a run and its versions, and has engines let go of them. Raises STALE_EPOCH."""
        line = self.lines.get(run_id)
        if line is None:
            return []
        line.check_not_stale(epoch)
        del self.lines[run_id]
        self._log.closed.add(run_id)
        actions = line.close()
        for engine in self.pool.engines.values():
            engine.lines.pop(run_id, None)
            actions += self._retire_closed(engine)
        return actions

    def _retire_closed(self, engine: EngineRecord) -> list[Action]:
        if not engine.connected:
            return []
        closed = {held for held in engine.served if held.run_id in self._log.closed} - engine.retired
        engine.retired |= closed
        return [
            Send(
                engine_id=engine.engine_id,
                lease_id=engine.lease_id,
                command=Retire(
                    version=held.version, artifact_id=held.artifact_id, run_id=held.run_id, epoch=held.epoch
                ),
            )
            for held in sorted(closed, key=lambda held: (held.run_id, held.version))
        ]

    # --- the orchestrator ---------------------------------------------------------------------

    def decided(self, key: Key, now_s: float) -> list[Action]:
        line = self.lines.get(key.run_id)
        return [] if line is None else line.decided(key, now_s)  # without a line it was closed meanwhile

    def sleep(self, engine_pool: str) -> tuple[SleepRound, list[Action]]:
        """Has the engines of a pool (empty: all) release their memory until they get work."""
        self._sleeps += 1
        return SleepRound.begin(self.pool.of_pool(engine_pool), self._sleeps)

    # --- engines ------------------------------------------------------------------------------

    def register(self, registration: AgentRegistration, lease_id: str, now_s: float) -> tuple[Lease, list[Action]]:
        """Gives an engine a lease; an earlier one of it ends. Commands are sent once its session starts."""
        actions = self.pool.register(registration, lease_id, now_s)
        newest = self.line("").records.newest_decided() if len(self.lines) == 1 else None
        lease = Lease(
            lease_id=lease_id,
            lease_s=self.pool.lease_s,
            max_chunk_bytes=self._max_chunk_bytes,
            committed_version=newest.version if newest is not None and newest.state is VersionState.COMMITTED else None,
        )
        return lease, [*actions, *self._next_actions(now_s)]

    def connect(self, lease_id: str, now_s: float) -> list[Action]:
        """The session of a lease starts. Raises LEASE_EXPIRED."""
        engine = self.pool.leased(lease_id)
        engine.connected, engine.join_sent, engine.seen_s = True, 0, now_s
        engine.retired.clear()
        engine.sleep_answered = None
        for line in engine.lines.values():
            line.sent = None
        return [*self._retire_closed(engine), *self._next_actions(now_s)]

    def disconnect(self, lease_id: str) -> None:
        engine = self.pool.by_lease(lease_id)
        if engine is not None:
            engine.connected = False

    def report(self, report: AgentReport, now_s: float) -> list[Action]:
        """Takes one message of an agent, which renews its lease. Raises LEASE_EXPIRED."""
        engine = self.pool.leased(report.lease_id)
        engine.seen_s = now_s
        engine.sleeping, engine.sleep_answered, engine.served = report.sleeping, report.sleep_answered, report.served
        named = report.run_id or next(iter(self.lines), "") if len(self.lines) < 2 else report.run_id
        line = self.lines.get(named)
        if line is not None:
            line.report(engine.on(line.run_id), report, now_s)
        elif not self.lines:
            engine.on("").state = report.state
        engine.group_generation = report.group_generation
        engine.newest_generation = max(engine.newest_generation, report.group_generation or 0)
        actions = [*self._join_command(engine, now_s), *self._retire_closed(engine)]
        if line is not None:
            actions += line.note_served(engine.on(line.run_id), report.applied, now_s)
        return actions

    def tick(self, now_s: float) -> list[Action]:
        """Time passed: leases expire, waits end, commits that failed are sent again."""
        return [*self.pool.expire(now_s), *self._next_actions(now_s)]

    def _next_actions(self, now_s: float) -> list[Action]:
        actions = [action for engine in self.pool.engines.values() for action in self._join_command(engine, now_s)]
        return actions + [action for line in self.lines.values() for action in line.next_actions(now_s)]

    def _join_command(self, engine: EngineRecord, now_s: float) -> list[Action]:
        join = self.groups.join(engine, now_s) if engine.connected else None
        if join is None:
            return []
        engine.join_sent = join.generation
        return [Send(engine_id=engine.engine_id, lease_id=engine.lease_id, command=join)]

    # --- the lines ------------------------------------------------------------------------------

    def _new_line(self, run_id: str) -> RunLine:
        return RunLine(run_id, pool=self.pool, groups=self.groups, log=self._log, limits=self._limits)

    def _line_to_publish(self, run_id: str, *, adapter: bool) -> RunLine:
        others = [
            line for line in self.lines.values() if line.run_id != run_id and (line.records.live or line.changes_base)
        ]
        base = next((line.run_id for line in others if line.changes_base), None)
        if others and not adapter:
            names = ", ".join(line.run_id for line in others)
            text = f"run {run_id!r} trains the base model, which the engines also serve to {names}; give it its own hub"
            raise MeshError(Reason.RUN_LIMIT_REACHED, text)
        if base is not None:
            text = f"this hub serves run {base!r}, which trains the base model, got {run_id!r}; give each its own hub"
            raise MeshError(Reason.RUN_LIMIT_REACHED, text)
        known = self.lines.get(run_id)
        if known is None and len(self.lines) >= MAX_RUNS:
            text = f"this hub has {len(self.lines)} runs, as many as it takes; close one"
            raise MeshError(Reason.RUN_LIMIT_REACHED, text)
        return known or self._new_line(run_id)

    def _open(self, line: RunLine) -> None:
        self.lines[line.run_id] = line
        self._log.closed.discard(line.run_id)

    # --- the log ----------------------------------------------------------------------------------

    def recover(self, saved: Save | None, now_s: float, wall_s: float) -> None:
        """Restores an earlier hub's rows, if any. Engines register again."""
        log = self._log
        log.wall_offset_s = wall_s - now_s
        if saved is None:
            return
        epochs, closed, log.revision = rows.hub_of(saved.run)
        log.epochs, log.closed = dict(epochs), set(closed)
        self.lines = {run_id: self._new_line(run_id) for run_id in epochs if run_id not in log.closed}
        for group in filter(None, (row for _, row in sorted(saved.groups.items()))):
            self.groups.current = rows.group_of(group, now_s - wall_s)
        for version in filter(None, (row for _, row in sorted(saved.versions.items()))):
            record = rows.version_of(version, now_s - wall_s)
            line = self.lines[record.key.run_id]
            line.records.add(record)
            if record.state is VersionState.COMMITTING:
                line.expect_commit(record, now_s)
