"""The versions of one run: which of them engines prepare and serve. Events and the time in, actions out, no I/O inside.

A version is staged, sealed, decided and committed; every move is written to the log. The decision is the point of no
return: `Save(decision=...)` asks for it, and it takes effect when the hub calls `decided`, once it is durable. An
engine's next command follows from the versions and its last report alone (`wanted_command`), so a restarted hub, a new
session and a late engine need no code of their own. Commands are idempotent by (version, artifact).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshrl.weights.coordinator import rows
from meshrl.weights.coordinator.engine_groups import EngineGroups
from meshrl.weights.coordinator.engines import EnginePool
from meshrl.weights.coordinator.states import (
    DECIDED,
    LIVE,
    SERVING,
    UNDECIDED,
    Action,
    Answer,
    Attempt,
    DeleteBytes,
    EngineLine,
    EngineRecord,
    Key,
    Save,
    Send,
    VersionRecord,
    VersionRecords,
)
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.types import (
    Abort,
    Activation,
    ActivationPolicy,
    ActivationRequest,
    AgentCommand,
    AgentFault,
    AgentReport,
    AgentState,
    ApplyReport,
    Commit,
    EngineReport,
    Manifest,
    Prepare,
    Resume,
    Transport,
    VersionState,
)
from meshrl.wire.values import JsonObject


@dataclass(frozen=True, kw_only=True)
class LineLimits:
    """`kept_ended`: how many retired or aborted versions are remembered."""

    keep_versions: int
    min_engines: int
    commit_deadline_s: float
    kept_ended: int = 32


@dataclass(kw_only=True)
class LineLog:
    """The log of all lines: it numbers their changes."""

    revision: int = 0
    epochs: dict[str, int] = field(default_factory=dict)  # by run, of those that were closed as well
    closed: set[str] = field(default_factory=set)
    wall_offset_s: float = 0.0  # wall-clock time minus the clock of the rules
    deciding: int = 0  # decisions on their way to the log, of all lines

    def bump(self, record: VersionRecord) -> None:
        self.revision += 1
        record.revision = self.revision

    def save(
        self,
        record: VersionRecord | None = None,
        *,
        forgotten: Collection[Key] = (),
        groups: Mapping[int, JsonObject | None] | None = None,
        decision: Key | None = None,
        committed: Activation | None = None,
        outlives_power_cut: bool = True,
    ) -> Save:
        # A decision gets its revision once it is durable; its row, and rows that are written until then, count it.
        revision = self.revision + self.deciding
        versions: dict[Key, JsonObject | None] = dict.fromkeys(forgotten)
        if record is not None:
            as_of = revision if record.deciding else record.revision
            versions[record.key] = rows.version(record, as_of, self.wall_offset_s)
        hub = rows.hub(self.epochs, sorted(self.closed), revision)
        return Save(
            run=hub,
            versions=versions,
            groups=groups or {},
            decision=decision,
            committed=committed,
            outlives_power_cut=outlives_power_cut,
        )


class RunLine:
    def __init__(
        self, run_id: str, *, pool: EnginePool, groups: EngineGroups, log: LineLog, limits: LineLimits
    ) -> None:
        self.run_id = run_id
        self.records = VersionRecords()
        self._pool, self._groups, self._log, self._limits = pool, groups, log, limits
        self._last_seen: object = None  # what the commands to all engines were last derived from; see `next_actions`

    # --- reading ----------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The newest epoch that published; 0 before the first."""
        return self._log.epochs.get(self.run_id, 0)

    @property
    def engines(self) -> list[EngineLine]:
        return [engine.on(self.run_id) for engine in self._pool.engines.values()]

    @property
    def changes_base(self) -> bool:
        """Whether a live version of it is not an adapter, or engines are in a group for it."""
        group = self._groups.current
        of_group = group is not None and group.request.run_id == self.run_id
        return of_group or any(not record.adapter for record in self.records.live)

    def find(self, version: int | None) -> VersionRecord:
        """A version of the newest epoch that has it; None is the newest committed one. Raises UNKNOWN_VERSION."""
        if version is None:
            committed = [r for r in self.records.live if r.state is VersionState.COMMITTED]
            if not committed:
                raise MeshError(Reason.UNKNOWN_VERSION, "no version is committed yet; activate one first")
            return max(committed, key=lambda r: r.key)
        keys = [key for key in self.records if key.version == version]
        if not keys:
            text = f"version {version} is unknown, or ended long ago; create and seal it first"
            raise MeshError(Reason.UNKNOWN_VERSION, text)
        return self.records[max(keys)]

    def routable(self, engine: EngineRecord) -> bool:
        line = engine.on(self.run_id)
        vouched = (r for r in self.records.values() if r.state in DECIDED or r.state is VersionState.RETIRED)
        return not line.ejected and line.state in SERVING and any(line.serves(record) for record in vouched)

    # --- publishers -------------------------------------------------------------------------

    def stage(self, manifest: Manifest, artifact: str) -> tuple[VersionRecord, list[Action]]:
        """Takes a manifest; the same artifact again is the same record, whatever its state.

        A broadcast version that is sealed also takes a copy in chunks, for engines that missed it. Raises: STALE_EPOCH,
        INVALID_REQUEST for an epoch beyond the next, VERSION_CONFLICT for another artifact of a version that was not
        aborted, VERSION_SUPERSEDED when a later version is decided.
        """
        self.check_epoch(manifest.epoch)
        key = Key(self.run_id, manifest.epoch, manifest.version)
        known = self.records.get(key)
        if known is not None and known.state is not VersionState.ABORTED:
            if _is_copy(manifest, known):
                known.copy = known.copy or artifact
            if artifact not in known.artifacts:
                raise MeshError(
                    Reason.VERSION_CONFLICT,
                    f"version {key.version} of epoch {key.epoch} is {known.state.value} with artifact "
                    f"{known.artifact_id}, got {artifact}; abort it first or publish the next version"
                    f" (a trainer that lost its file trainer_epoch needs {self.epoch} in it)",
                )
            return known, [self._log.save(known)] if artifact == known.copy else []
        decided = self.records.newest_decided()
        if decided is not None and key < decided.key:
            raise MeshError(
                Reason.VERSION_SUPERSEDED,
                f"version {key.version} is older than version {decided.version}, which is {decided.state.value}",
            )
        record = VersionRecord.staged(manifest, artifact)
        self.records.add(record)  # before older epochs are dropped: files that both name must stay
        begins = manifest.epoch > self.epoch
        actions = self.begin_epoch(manifest.epoch)
        return record, [*actions, self._changed(record, outlives_power_cut=begins)]

    def arrives(self, record: VersionRecord, now_s: float) -> list[Action]:
        """The first bytes of a version come: engines with nothing else to fetch follow a streamed upload."""
        streamed = record.transport is Transport.STREAM
        if not streamed or record.state is not VersionState.STAGING or record.arriving:
            return []
        record.arriving = True
        return self.next_actions(now_s)

    def sealing(self, *, epoch: int, version: int, artifact: str) -> VersionRecord:
        """The record of a version whose bytes are to be checked before `seal`.

        Raises: STALE_EPOCH, UNKNOWN_VERSION, VERSION_CONFLICT, VERSION_SUPERSEDED.
        """
        record = self._owned(epoch, version)
        if artifact not in record.artifacts:
            raise MeshError(
                Reason.VERSION_CONFLICT,
                f"version {version} was staged as artifact {record.artifact_id}, got {artifact}",
            )
        if record.state is VersionState.ABORTED:
            raise MeshError(Reason.VERSION_SUPERSEDED, f"version {version} was aborted; stage it again or go on")
        return record

    def seal(self, key: Key, traceparent: str, now_s: float) -> list[Action]:
        """The bytes of a staged version are complete and right: engines start to prepare it."""
        record = self._owned(key.epoch, key.version)
        if record.state is VersionState.ABORTED:
            raise MeshError(
                Reason.VERSION_SUPERSEDED, f"version {record.version} was aborted while its bytes were checked"
            )
        if record.state is not VersionState.STAGING:
            return []
        record.traceparent, record.sealed_s = traceparent, now_s
        self.records.move(record, VersionState.SEALED)
        for engine in self._refused_by(record.key):  # while bytes were missing
            engine.try_again(record.key)
        return [self._changed(record), *self.next_actions(now_s)]

    def copied(self, record: VersionRecord, now_s: float) -> list[Action]:
        """The copy of a broadcast version is complete: engines that lack it pull it."""
        if record.state not in LIVE:
            return []
        record.copied = True
        for engine in self._refused_by(record.key):
            engine.try_again(record.key)
            if record.attempt is not None:
                record.attempt.faults.pop(engine.engine_id, None)
        return [self._log.save(record), *self.next_actions(now_s)]

    def abort(
        self, *, epoch: int, version: int, artifact_id: str, message: str, now_s: float
    ) -> tuple[VersionRecord, list[Action]]:
        """Drops a version. Raises VERSION_DECIDED once it is decided, VERSION_CONFLICT for another artifact."""
        record = self._owned(epoch, version)
        if artifact_id not in ("", record.artifact_id):
            raise MeshError(
                Reason.VERSION_CONFLICT, f"version {version} is artifact {record.artifact_id}, got {artifact_id}"
            )
        if record.state is VersionState.ABORTED:
            return record, []
        if record.deciding or record.state not in UNDECIDED:
            raise MeshError(
                Reason.VERSION_DECIDED,
                f"version {version} is {record.state.value}: a decision only goes forward; publish the next version",
            )
        return record, [*self._drop(record, message or "its publisher aborted it"), *self.next_actions(now_s)]

    # --- the orchestrator ---------------------------------------------------------------------

    def activate(self, request: ActivationRequest, now_s: float) -> tuple[VersionRecord, list[Action]]:
        """Starts, or joins, the commit of a sealed version; the outcome comes as `Answer` for the record's key.

        With `min_ready` 0 every engine that is live now, and at least one, must have prepared it. Raises:
        UNKNOWN_VERSION, VERSION_CONFLICT for another epoch or artifact, VERSION_NOT_SEALED, VERSION_SUPERSEDED.
        """
        version = request.version
        record = self.find(version)
        if request.epoch not in (0, record.key.epoch) or request.artifact_id not in ("", record.artifact_id):
            raise MeshError(
                Reason.VERSION_CONFLICT,
                f"version {version} is artifact {record.artifact_id} of epoch {record.key.epoch}, got"
                f" {request.artifact_id or 'any'} of epoch {request.epoch or 'any'}; activate the version that was"
                " sealed last",
            )
        if record.answer is not None:
            return record, [Answer(key=record.key, result=record.answer)]
        if record.state is VersionState.STAGING:
            raise MeshError(Reason.VERSION_NOT_SEALED, f"version {version} is still being staged; seal it first")
        if record.state not in LIVE:
            raise MeshError(
                Reason.VERSION_SUPERSEDED, f"version {version} is {record.state.value}; activate a newer one"
            )
        deadline_s = now_s + request.prepare_deadline_s
        if record.attempt is not None:
            record.attempt.deadline_s = max(record.attempt.deadline_s, deadline_s)
            return record, self.next_actions(now_s)
        required = frozenset(engine.engine_id for engine in self.engines if not engine.ejected)
        record.attempt = Attempt(
            min_ready=request.min_ready, policy=request.policy, deadline_s=deadline_s, required=required
        )
        if record.state is VersionState.SEALED:
            for engine in self._refused_by(record.key):
                if _comes_again(record):  # one more try for engines that refused it before the call
                    engine.try_again(record.key)
                elif engine.last_fault is not None:
                    record.attempt.faults[engine.engine_id] = engine.last_fault
        return record, self.next_actions(now_s)

    def decided(self, key: Key, now_s: float) -> list[Action]:
        record = self.records[key]
        record.deciding = False
        self._log.deciding -= 1
        self.records.move(record, VersionState.COMMITTING)
        self.expect_commit(record, now_s)
        engines = self.engines
        ready = {engine.engine_id for engine in engines if is_ready(engine, record)}
        record.commit_set = set(ready)
        if record.policy is ActivationPolicy.GANG:
            record.gang = set(ready)
        for engine in engines:
            self._note_served(engine, None)
        self._log.bump(record)
        actions: list[Action] = []
        for other in [r for r in self.records.live if r.key < key and r.state in UNDECIDED]:
            actions += self._drop(other, f"version {record.version} was committed instead")
        return [*actions, *self.next_actions(now_s)]

    def close(self) -> list[Action]:
        actions: list[Action] = []
        for record in [*self.records.live]:
            self._log.deciding -= record.deciding
            if record.attempt is not None:
                actions += self._give_up(record, Reason.VERSION_SUPERSEDED, f"run {self.run_id!r} was closed")
            actions += self._delete(record, record.paths)
        return [self._log.save(forgotten=tuple(self.records)), *actions]

    def expect_commit(self, record: VersionRecord, now_s: float) -> None:
        record.decided_s = now_s
        record.commit_deadline_s = now_s + self._limits.commit_deadline_s

    # --- engines ------------------------------------------------------------------------------

    def report(self, engine: EngineLine, report: AgentReport, now_s: float) -> None:
        was = engine.state
        engine.state = report.state
        target = self.records.target_of(engine, report)
        if report.applied is not None:
            engine.serving, engine.root = report.applied.version, report.applied.root
        elif report.serving_version != engine.serving:
            engine.serving, engine.root = report.serving_version, b""
            if target is not None and report.state is AgentState.APPLYING and target.version == report.serving_version:
                engine.root = target.root  # applied what it was told to, and holds
        prepared = report.state is AgentState.PREPARED
        engine.prepared = target.artifact_id if prepared and target is not None else None
        if prepared and target is not None:
            engine.faulted.discard(target.key)  # whatever went wrong before, it has it now
        if report.fault is not None:
            # What left a version prepared was not about it, and a group that broke is only about nccl versions.
            group_only = report.fault.reason == Reason.GROUP_BROKEN.name
            about = target is not None and not prepared and (target.transport is Transport.NCCL or not group_only)
            self._fault(engine, report.fault, target.key if target is not None and about else None, now_s)
        elif was is AgentState.POISONED and report.state is not AgentState.POISONED:
            engine.retry_s = None

    def _fault(self, engine: EngineLine, fault: AgentFault, key: Key | None, now_s: float) -> None:
        engine.last_fault = fault
        if key is not None:
            engine.faulted.add(key)
        record = self.records.get(key) if key is not None else None
        if record is not None and record.attempt is not None:
            record.attempt.faults[engine.engine_id] = fault
        decided = record is not None and record.state in DECIDED
        if decided or engine.state is AgentState.POISONED:
            engine.ejected = True
            if record is not None:
                record.commit_set.discard(engine.engine_id)
            engine.sent = None
            engine.retry_s = now_s + engine.backoff.next_s()

    def note_served(self, engine: EngineLine, applied: ApplyReport | None, now_s: float) -> list[Action]:
        self._note_served(engine, applied)
        return self.next_actions(now_s, engine)

    def _note_served(self, engine: EngineLine, applied: ApplyReport | None) -> None:
        newest = self.records.newest_decided()
        for record in self.records.live:
            if record.state not in DECIDED or not engine.serves(record):
                continue
            if engine.state is AgentState.APPLYING:
                if engine.engine_id in record.gang:
                    record.held.add(engine.engine_id)
                continue
            if record is newest and engine.state in (AgentState.READY, AgentState.FETCHING, AgentState.PREPARED):
                engine.ejected, engine.retry_s = False, None
                engine.backoff.reset()
                engine.faulted = {key for key in engine.faulted if key > record.key}
            record.held.discard(engine.engine_id)
            record.commit_set.discard(engine.engine_id)
            if applied is None or applied.version != record.version:
                applied = ApplyReport(
                    version=record.version, root=record.root, pause_s=0.0, prepare_s=0.0, requests_kept=0
                )
            if record.state is VersionState.COMMITTING:
                record.reports.setdefault(engine.engine_id, applied)

    # --- what follows from the records ------------------------------------------------------------

    def next_actions(self, now_s: float, reported: EngineLine | None = None) -> list[Action]:
        """Does everything that has become possible: decide, give up, finish, retire, send commands.

        With `reported`, only this engine has changed: the others are looked at only if the versions have as well.
        """
        actions: list[Action] = []
        for record in sorted(self.records.live, key=lambda r: r.key):
            if record.state is VersionState.SEALED and record.attempt is not None and not record.deciding:
                actions += self._try_decide(record, record.attempt, now_s)
            if record.state in DECIDED:
                self._release(record, now_s)
            if record.state is VersionState.COMMITTING:
                actions += self._try_finish(record, now_s)
        versions = [(r.key, r.artifact_id, r.state, r.busy, r.arriving, r.released) for r in self.records.live]
        seen = (self._groups.generation, versions)
        others_as_before = reported is not None and seen == self._last_seen
        self._last_seen = seen
        for engine in (reported,) if reported is not None and others_as_before else self.engines:
            actions += self._send_command(engine, now_s)
        return actions

    def _send_command(self, engine: EngineLine, now_s: float) -> list[Action]:
        if not engine.engine.connected:
            return []
        command, key = wanted_command(engine, self.records.live, self.records.newest_decided(), self._groups, now_s)
        if command is None or command == engine.sent:
            return []
        engine.sent = command
        engine.sent_key = key or engine.sent_key
        return [Send(engine_id=engine.engine_id, lease_id=engine.engine.lease_id, command=command)]

    def _try_decide(self, record: VersionRecord, attempt: Attempt, now_s: float) -> list[Action]:
        newest = self.records.newest_decided()
        if newest is not None and newest.key > record.key:
            return self._give_up(record, Reason.VERSION_SUPERSEDED, f"version {newest.version} was committed first")
        if any(r.deciding and r.key > record.key for r in self.records.live):
            return []  # the newer decision ends this one once it is durable
        live = {engine.engine_id: engine for engine in self.engines}
        ready = {engine_id for engine_id, engine in live.items() if is_ready(engine, record)}
        unreachable = self._groups.unreachable(self._pool.engines.values(), record)
        required = {e for e in attempt.required if e in live and not live[e].ejected and e not in unreachable}
        if attempt.min_ready:
            enough, wanted = len(ready) >= attempt.min_ready, attempt.min_ready
        else:
            least = self._limits.min_engines if newest is None else 1
            enough, wanted = required <= ready and len(ready) >= least, max(len(required), least)
        if enough:
            record.deciding, record.policy, record.min_ready = True, attempt.policy, attempt.min_ready
            self._log.deciding += 1
            return [self._log.save(record, decision=record.key)]
        refused = set(attempt.faults) & set(live) - ready - set(unreachable)
        short = len(live) - len(refused) < max(1, attempt.min_ready)
        hopeless = bool(refused) and (short or (not attempt.min_ready and bool(refused & required)))
        hopeless = hopeless or self._blocks_newer(record, ready | (set(live) - set(unreachable)), wanted)
        if hopeless or now_s >= attempt.deadline_s:
            why = self._describe(ready, attempt.faults, unreachable)
            text = f"version {record.version} stays sealed: {len(ready)} of {wanted} engines prepared it; {why}"
            return self._give_up(record, Reason.ENGINES_NOT_READY, text, attempt.faults)
        return []

    def _blocks_newer(self, record: VersionRecord, reachable: set[str], wanted: int) -> bool:
        newer = (r for r in self.records.values() if r.state is VersionState.SEALED and r.key > record.key)
        return len(reachable) < wanted and any(
            can_serve(engine, version, self._groups) for version in newer for engine in self.engines
        )

    def _release(self, record: VersionRecord, now_s: float) -> None:
        if not record.commit_set and (record.released or not record.gang):
            return
        live = self._pool.engines
        if now_s >= record.commit_deadline_s:
            for engine_id in record.commit_set & set(live) - record.held:
                live[engine_id].on(self.run_id).ejected = True
            record.commit_set &= record.held
        record.commit_set &= set(live)
        if record.gang and not (record.gang & record.commit_set) - record.held:
            record.released = True

    def _try_finish(self, record: VersionRecord, now_s: float) -> list[Action]:
        outstanding = not record.min_ready and bool(record.commit_set)
        if len(record.reports) >= max(1, record.min_ready) and not outstanding:
            self.records.move(record, VersionState.COMMITTED)
            record.answer = Activation(
                version=record.info(),
                engines=tuple(EngineReport(engine_id=e, applied=a) for e, a in sorted(record.reports.items())),
                commit_s=now_s - record.decided_s,
                lag_s=now_s - record.sealed_s,
            )
            self._log.bump(record)
            record.attempt = None
            return [
                self._log.save(record, committed=record.answer, outlives_power_cut=False),
                Answer(key=record.key, result=record.answer),
                *self._retire(record),
            ]
        if record.attempt is not None and not record.commit_set and now_s >= record.attempt.deadline_s:
            unreachable = self._groups.unreachable(self._pool.engines.values(), record)
            why = self._describe(set(record.reports), record.attempt.faults, unreachable)
            text = (
                f"version {record.version} is decided and only goes forward, but {len(record.reports)} of "
                f"{max(1, record.min_ready)} engines serve it; {why}; call again to wait on"
            )
            return self._give_up(record, Reason.ENGINES_NOT_READY, text, record.attempt.faults)
        return []

    def _describe(
        self, ready: Collection[str], faults: Mapping[str, AgentFault], unreachable: Mapping[str, str]
    ) -> str:
        engines = self.engines
        if not engines:
            return "no engine is registered; start one that points at this hub"
        parts = []
        for engine in engines:
            if engine.engine_id in ready:
                continue
            fault, why = faults.get(engine.engine_id), unreachable.get(engine.engine_id)
            if fault is not None:
                parts.append(f"{engine.engine_id} refused it ({fault.reason}: {fault.message})")
            else:
                state = engine.state.value + (", ejected" if engine.ejected else "")
                parts.append(f"{engine.engine_id} is {state}" + (f": {why}" if why else ""))
        return "; ".join(parts) or "more engines must register"

    def _give_up(
        self, record: VersionRecord, reason: Reason, text: str, faults: Mapping[str, AgentFault] | None = None
    ) -> list[Action]:
        record.attempt = None
        metadata = {engine_id: fault.reason for engine_id, fault in (faults or {}).items()}
        return [Answer(key=record.key, result=MeshError(reason, text, metadata=metadata))]

    def _drop(self, record: VersionRecord, why: str) -> list[Action]:
        if record.state not in UNDECIDED:
            return []
        actions: list[Action] = []
        if record.attempt is not None:
            actions += self._give_up(record, Reason.VERSION_SUPERSEDED, f"version {record.version} was dropped: {why}")
        self.records.move(record, VersionState.ABORTED)
        actions.append(self._changed(record))
        for engine in self.engines:
            if engine.engine.connected and engine.sent_key == record.key and isinstance(engine.sent, Prepare):
                engine.sent = Abort(**_named(record))
                lease_id = engine.engine.lease_id
                actions.append(Send(engine_id=engine.engine_id, lease_id=lease_id, command=engine.sent))
        return [*actions, *self._delete_unneeded(record)]

    def _retire(self, newest: VersionRecord) -> list[Action]:
        live = self.records.live
        committed = sorted((r.key for r in live if r.state is VersionState.COMMITTED), reverse=True)
        late = [r.key for r in live if r.state is VersionState.COMMITTING and r.key < newest.key]
        actions: list[Action] = []
        for key in sorted(committed[self._limits.keep_versions :] + late):
            record = self.records[key]
            if record.attempt is not None:
                text = f"version {newest.version} was committed before enough engines served version {record.version}"
                actions += self._give_up(record, Reason.VERSION_SUPERSEDED, text)
            self.records.move(record, VersionState.RETIRED)
            actions += [self._changed(record), *self._delete_unneeded(record)]
        return actions

    def _delete_unneeded(self, record: VersionRecord) -> list[Action]:
        needed = {path for other in self.records.live for path in other.paths}
        return self._delete(record, tuple(path for path in record.paths if path not in needed))

    def _delete(self, record: VersionRecord, paths: tuple[str, ...]) -> list[Action]:
        return [DeleteBytes(artifact_id=artifact, paths=paths) for artifact in record.artifacts]

    def _changed(self, record: VersionRecord, *, outlives_power_cut: bool = True) -> Save:
        self._log.bump(record)
        forgotten = self._forget() if record.state not in LIVE else ()
        return self._log.save(record, forgotten=forgotten, outlives_power_cut=outlives_power_cut)

    def _forget(self) -> list[Key]:
        engines = self.engines
        served = {(engine.serving, engine.root) for engine in engines}  # they are vouched for as long as they serve it
        gone = self.records.forget(
            keep=self._limits.kept_ended, needed=lambda record: (record.version, record.root) in served
        )
        for engine in engines if gone else ():
            engine.faulted &= self.records.keys()
        return gone

    # --- checks -----------------------------------------------------------------------------------

    def _refused_by(self, key: Key) -> list[EngineLine]:
        return [engine for engine in self.engines if key in engine.faulted]

    def check_epoch(self, epoch: int) -> None:
        """Lets only the newest trainer of the run publish. Raises STALE_EPOCH, INVALID_REQUEST."""
        self.check_not_stale(epoch)
        if self.epoch and epoch > self.epoch + 1:  # or one wrong number would keep every later trainer out
            text = (
                f"must be at most {self.epoch + 1}, got {epoch}: this hub is in epoch {self.epoch}; begin the next one"
            )
            raise invalid([FieldViolation("epoch", text)])

    def begin_epoch(self, epoch: int) -> list[Action]:
        """Drops what is left of earlier epochs. The epoch is durable with the next row that is saved."""
        if epoch <= self.epoch:
            return []
        self._log.epochs[self.run_id] = epoch
        actions: list[Action] = []
        for old in [r for r in self.records.live if r.key.epoch < epoch and not r.deciding]:
            actions += self._drop(old, f"epoch {epoch} began")
        return actions

    def check_not_stale(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise MeshError(
                Reason.STALE_EPOCH,
                f"epoch {epoch} is over: epoch {self.epoch} began; a newer trainer of this run owns the hub, or"
                f" this one lost its file trainer_epoch and needs {self.epoch} in it",
            )

    def _owned(self, epoch: int, version: int) -> VersionRecord:
        self.check_not_stale(epoch)
        record = self.records.get(Key(self.run_id, epoch, version))
        if record is None:
            raise MeshError(
                Reason.UNKNOWN_VERSION, f"version {version} of epoch {epoch} was never staged; create it first"
            )
        return record


def is_ready(engine: EngineLine, record: VersionRecord) -> bool:
    return engine.prepared == record.artifact_id or (engine.serves(record) and engine.state is AgentState.READY)


def can_serve(engine: EngineLine, record: VersionRecord, groups: EngineGroups) -> bool:
    """Whether an engine has a version's bytes, or can get them now."""
    return engine.prepared == record.artifact_id or groups.why_unreachable(engine.engine, record) is None


def wanted_command(
    engine: EngineLine,
    live: Collection[VersionRecord],
    newest: VersionRecord | None,
    groups: EngineGroups,
    now_s: float,
) -> tuple[AgentCommand | None, Key | None]:
    """The next command, and the version that it is about; `newest` is the newest of the `live` that is decided."""
    reachable = [r for r in live if groups.why_unreachable(engine.engine, r) is None]
    sealed = [r for r in reachable if r.state is VersionState.SEALED]
    busy = [r for r in sealed if r.busy]
    target = min(busy, key=lambda r: r.key) if busy else max(sealed, key=lambda r: r.key, default=None)
    if target is None:  # it may follow the newest upload
        arriving = (r for r in reachable if r.state is VersionState.STAGING and r.arriving)
        target = max(arriving, key=lambda r: r.key, default=None)
    if target is not None and target.key in engine.faulted:
        target = None
    if newest is not None and not engine.serves(newest) and can_serve(engine, newest, groups):
        if newest.key not in engine.faulted:
            hold = engine.engine_id in newest.gang and not newest.released
            return Commit(hold=hold, **_named(newest)), newest.key
        if _comes_again(newest) and not (target and target.busy):  # ever more rarely, until a newer one is wanted
            if engine.retry_s is not None and now_s < engine.retry_s:
                return None, None
            return Commit(**_named(newest)), newest.key
    if newest is not None and _holds(engine, newest):
        waits = engine.engine_id in newest.gang and not newest.released  # a restarted hub forgot its gangs
        return (None, None) if waits else (Resume(**_named(newest)), None)
    if target is None or engine.prepared == target.artifact_id:
        return None, None
    return Prepare(**_named(target)), target.key


def _comes_again(record: VersionRecord) -> bool:
    """A broadcast is sent once."""
    return record.transport is not Transport.NCCL or record.copied


def _is_copy(manifest: Manifest, record: VersionRecord) -> bool:
    sealed = record.state in LIVE and record.state is not VersionState.STAGING
    same = manifest.transport is Transport.STREAM and manifest.result_root == record.root
    return sealed and same and record.transport is Transport.NCCL


def _named(record: VersionRecord) -> dict[str, Any]:
    key = record.key
    return {"run_id": key.run_id, "epoch": key.epoch, "version": key.version, "artifact_id": record.artifact_id}


def _holds(engine: EngineLine, record: VersionRecord) -> bool:
    """It stays paused; `held` may also name an engine that restarted."""
    applied = engine.engine_id in record.held or engine.state is AgentState.APPLYING
    return applied and engine.serves(record)
