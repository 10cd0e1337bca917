"""Decides which version engines prepare and serve: events and the time in, actions out, no I/O inside.

A version is staged, sealed, decided and committed; every move is written to the log. The decision is the point of no
return: it is asked for with `Save(decision=...)` and takes effect only when the hub calls `decided`, that is, once it
is durable. What an engine should do next follows from the versions and its last report alone (`wanted_command`), so a
restarted hub, a new session and a late engine need no code of their own: commands are derived and sent again, and they
are idempotent by (version, artifact).
"""

from __future__ import annotations

from collections.abc import Mapping

from meshrl.weights.coordinator import rows
from meshrl.weights.coordinator.engine_groups import EngineGroups, GroupRequest, first_version
from meshrl.weights.coordinator.engines import EnginePool, SleepRound, can_serve, is_ready, wanted_command
from meshrl.weights.coordinator.states import (
    DECIDED,
    LIVE,
    UNDECIDED,
    Action,
    Answer,
    Attempt,
    DeleteBytes,
    EngineRecord,
    Key,
    Notify,
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
    AgentFault,
    AgentRegistration,
    AgentReport,
    AgentState,
    ApplyReport,
    EngineReport,
    Lease,
    Manifest,
    OpenedGroup,
    Prepare,
    Transport,
    VersionInfo,
    VersionState,
)
from meshrl.wire.values import JsonObject

KEPT_ENDED = 32  # versions that are known after they were retired or aborted


class Coordinator:
    """The versions and engines of one run. Not safe for threads: call it from one event loop."""

    def __init__(
        self,
        *,
        lease_s: float,
        max_chunk_bytes: int,
        keep_versions: int,
        min_engines: int,
        commit_deadline_s: float,
        kept_ended: int = KEPT_ENDED,
    ) -> None:
        """`kept_ended`: how many versions are known after their end."""
        self.run_id = ""
        self.epoch = 0
        self.revision = 0
        self.records = VersionRecords()
        self.pool = EnginePool(lease_s)
        self.groups = EngineGroups()
        self._sleeps = 0  # rounds of SleepEngines so far
        self._max_chunk_bytes = max_chunk_bytes
        self._keep_versions = keep_versions
        self._min_engines = min_engines
        self._commit_deadline_s = commit_deadline_s
        self._kept_ended = kept_ended
        self._wall_offset_s = 0.0  # wall-clock time minus the clock of the rules
        self._last_seen: object = None  # what the commands to all engines were last derived from; see `_next_actions`

    # --- reading ----------------------------------------------------------------------------

    def newest_decided(self) -> VersionRecord | None:
        """The version that every engine should serve."""
        return self.records.newest_decided()

    def find(self, run_id: str, version: int | None) -> VersionRecord:
        """Returns a version of the newest epoch that has it; None is the newest committed one. Raises UNKNOWN_*."""
        self._check_run(run_id)
        if version is None:
            committed = [r for r in self.records.live if r.state is VersionState.COMMITTED]
            if not committed:
                raise MeshError(Reason.UNKNOWN_VERSION, "no version is committed yet; activate one first")
            return max(committed, key=lambda r: r.key)
        keys = [key for key in self.records if key[1] == version]
        if not keys:
            text = f"version {version} is unknown, or ended long ago; create and seal it first"
            raise MeshError(Reason.UNKNOWN_VERSION, text)
        return self.records[max(keys)]

    def infos(self, run_id: str, after_revision: int) -> list[tuple[int, VersionInfo]]:
        """Returns (revision, version) of every version that changed after a revision, in order of change."""
        if run_id and run_id != self.run_id:
            return []
        changed = [r for r in self.records.values() if r.revision > after_revision]
        return [(r.revision, r.info()) for r in sorted(changed, key=lambda r: r.revision)]

    # --- publishers -------------------------------------------------------------------------

    def stage(self, manifest: Manifest, artifact: str, now_s: float) -> tuple[VersionRecord, list[Action]]:
        """Takes a manifest. The same artifact again is the same record, whatever its state.

        Raises: RUN_LIMIT_REACHED for another run, STALE_EPOCH, INVALID_REQUEST for an epoch beyond the next,
        VERSION_CONFLICT for another artifact of a version that was not aborted, VERSION_SUPERSEDED when a later version
        is decided.
        """
        self._check_owner(manifest.run_id, manifest.epoch)
        key = (manifest.epoch, manifest.version)
        known = self.records.get(key)
        if known is not None and known.state is not VersionState.ABORTED:
            if known.artifact_id != artifact:
                raise MeshError(
                    Reason.VERSION_CONFLICT,
                    f"version {key[1]} of epoch {key[0]} is {known.state.value} with artifact {known.artifact_id}, "
                    f"got {artifact}; abort it first or publish the next version",
                )
            return known, []
        decided = self.newest_decided()
        if decided is not None and key < decided.key:
            raise MeshError(
                Reason.VERSION_SUPERSEDED,
                f"version {key[1]} is older than version {decided.version}, which is {decided.state.value}",
            )
        record = VersionRecord.staged(manifest, artifact)
        self.records.add(record)  # before older epochs are dropped: files that both name must stay
        actions = self._begin_epoch(manifest.run_id, manifest.epoch)
        return record, [*actions, *self._changed(record)]

    def arrives(self, record: VersionRecord, now_s: float) -> list[Action]:
        """The first bytes of a streamed version come: engines with nothing else to fetch follow its upload."""
        streamed = record.transport is Transport.STREAM
        if not streamed or record.state is not VersionState.STAGING or record.arriving:
            return []
        record.arriving = True
        return self._next_actions(now_s)

    def sealing(self, *, run_id: str, epoch: int, version: int, artifact: str) -> VersionRecord:
        """Returns the record, whose bytes must be checked before `seal` while it is still being staged.

        Raises: UNKNOWN_RUN, STALE_EPOCH, UNKNOWN_VERSION, VERSION_CONFLICT, VERSION_SUPERSEDED.
        """
        record = self._owned(run_id, epoch, version)
        if record.artifact_id != artifact:
            raise MeshError(
                Reason.VERSION_CONFLICT,
                f"version {version} was staged as artifact {record.artifact_id}, got {artifact}",
            )
        if record.state is VersionState.ABORTED:
            raise MeshError(Reason.VERSION_SUPERSEDED, f"version {version} was aborted; stage it again or go on")
        return record

    def seal(self, key: Key, traceparent: str, now_s: float, wall_s: float) -> list[Action]:
        """The bytes of a staged version are complete and right: engines start to prepare it."""
        record = self.records[key]
        if record.state is VersionState.ABORTED:
            raise MeshError(Reason.VERSION_SUPERSEDED, f"version {key[1]} was aborted while its bytes were checked")
        if record.state is not VersionState.STAGING:
            return []
        record.traceparent, record.sealed_s = traceparent, now_s
        self._wall_offset_s = wall_s - now_s
        self.records.move(record, VersionState.SEALED)
        for engine in self._refused_by(key):  # while bytes were missing
            engine.try_again(key)
        return [*self._changed(record), *self._next_actions(now_s)]

    def abort(
        self, *, run_id: str, epoch: int, version: int, message: str, now_s: float
    ) -> tuple[VersionRecord, list[Action]]:
        """Drops a version that is not decided. Raises VERSION_DECIDED once it is."""
        record = self._owned(run_id, epoch, version)
        if record.state is VersionState.ABORTED:
            return record, []
        if record.deciding or record.state not in UNDECIDED:
            raise MeshError(
                Reason.VERSION_DECIDED,
                f"version {version} is {record.state.value}: a decision only goes forward; publish the next version",
            )
        return record, [*self._drop(record, message or "its publisher aborted it"), *self._next_actions(now_s)]

    def open_group(self, request: GroupRequest, now_s: float, wall_s: float) -> tuple[OpenedGroup, list[Action]]:
        """Forms a group and has its engines join it. The same request again gets the first answer.

        Raises: RUN_LIMIT_REACHED for another run, STALE_EPOCH, GROUP_BROKEN when no engine can take part.
        """
        answer = self.groups.answer(request.request_id)
        if answer is not None:
            return answer, []
        self._check_owner(request.run_id, request.epoch)
        newest = self.newest_decided()
        sealed = [record.key for record in self.records.live if record.state is VersionState.SEALED]
        first = first_version(request, sealed, None if newest is None else newest.key)
        self._wall_offset_s = wall_s - now_s
        before = set(self.groups.generations)
        group = self.groups.open(request, self.pool.engines.values(), first, now_s)
        actions = self._begin_epoch(request.run_id, request.epoch)
        gone = before.difference(self.groups.generations)
        row = rows.group(group, self._wall_offset_s)
        actions.append(self._save(groups={**dict.fromkeys(gone), group.generation: row}))
        return group.opened(), [*actions, *self._next_actions(now_s)]

    # --- the orchestrator ---------------------------------------------------------------------

    def activate(
        self, *, run_id: str, version: int, policy: ActivationPolicy, min_ready: int, wait_s: float, now_s: float
    ) -> tuple[VersionRecord, list[Action]]:
        """Starts, or joins, the commit of a sealed version; the outcome comes as `Answer` for the record's key.

        With `min_ready` 0 every engine that is live now must have prepared it, and at least one in any case; engines
        that join later catch up. Raises: UNKNOWN_RUN, UNKNOWN_VERSION, VERSION_NOT_SEALED, VERSION_SUPERSEDED.
        """
        record = self.find(run_id, version)
        if record.answer is not None:
            return record, [Answer(key=record.key, result=record.answer)]
        if record.state is VersionState.STAGING:
            raise MeshError(Reason.VERSION_NOT_SEALED, f"version {version} is still being staged; seal it first")
        if record.state not in LIVE:
            raise MeshError(
                Reason.VERSION_SUPERSEDED, f"version {version} is {record.state.value}; activate a newer one"
            )
        deadline_s = now_s + wait_s
        if record.attempt is not None:
            record.attempt.deadline_s = max(record.attempt.deadline_s, deadline_s)
            return record, self._next_actions(now_s)
        required = frozenset(e.engine_id for e in self.pool.engines.values() if not e.ejected)
        record.attempt = Attempt(min_ready=min_ready, policy=policy, deadline_s=deadline_s, required=required)
        if record.state is VersionState.SEALED:
            for engine in self._refused_by(record.key):
                if record.transport is not Transport.NCCL:  # one more try for engines that refused it before the call
                    engine.try_again(record.key)
                elif engine.last_fault is not None:  # its bytes come again only in a newer group
                    record.attempt.faults[engine.engine_id] = engine.last_fault
        return record, self._next_actions(now_s)

    def decided(self, key: Key, now_s: float) -> list[Action]:
        """The decision for `key` is durable: from now on it only goes forward."""
        record = self.records[key]
        record.deciding = False
        self.records.move(record, VersionState.COMMITTING)
        record.decided_s = now_s
        record.commit_deadline_s = now_s + self._commit_deadline_s
        ready = {e.engine_id for e in self.pool.engines.values() if is_ready(e, record)}
        record.commit_set = set(ready)
        if record.policy is ActivationPolicy.GANG:
            record.gang = set(ready)
        for engine in self.pool.engines.values():
            self._note_served(engine, None)
        actions: list[Action] = [self._bump(record)]
        for other in [r for r in self.records.live if r.key < key and r.state in UNDECIDED]:
            actions += self._drop(other, f"version {record.version} was committed instead")
        return [*actions, *self._next_actions(now_s)]

    def sleep(self, engine_pool: str) -> tuple[SleepRound, list[Action]]:
        """Has the engines of a pool (empty: all) release their memory until they get work."""
        self._sleeps += 1
        return SleepRound.begin(self.pool.of_pool(engine_pool), self._sleeps)

    # --- engines ------------------------------------------------------------------------------

    def register(self, registration: AgentRegistration, lease_id: str, now_s: float) -> tuple[Lease, list[Action]]:
        """Gives an engine a lease; an earlier one of it ends. Commands are sent once its session starts."""
        actions = self.pool.register(registration, lease_id, now_s)
        newest = self.newest_decided()
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
        engine.connected, engine.sent, engine.join_sent, engine.seen_s = True, None, 0, now_s
        engine.sleep_answered = None
        return self._next_actions(now_s)

    def disconnect(self, lease_id: str) -> None:
        """The session broke off; the lease goes on until it expires."""
        engine = self.pool.by_lease(lease_id)
        if engine is not None:
            engine.connected = False

    def report(self, report: AgentReport, now_s: float) -> list[Action]:
        """Takes one message of an agent, which renews its lease. Raises LEASE_EXPIRED."""
        engine = self.pool.leased(report.lease_id)
        engine.seen_s = now_s
        was = engine.state
        engine.state = report.state
        engine.sleeping, engine.sleep_answered = report.sleeping, report.sleep_answered
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
        self.groups.joined(
            engine, report.group_generation, self.records.live
        )  # after the fault, which is of the group before
        self._note_served(engine, report.applied)
        return self._next_actions(now_s, engine)

    def _fault(self, engine: EngineRecord, fault: AgentFault, key: Key | None, now_s: float) -> None:
        engine.last_fault = fault
        if key is not None:
            engine.faulted.add(key)
        record = self.records.get(key) if key is not None else None
        if record is not None and record.transport is Transport.NCCL and fault.reason == Reason.GROUP_BROKEN.name:
            engine.broken_generation = engine.newest_generation
        if record is not None and record.attempt is not None:
            record.attempt.faults[engine.engine_id] = fault
        decided = record is not None and record.state in DECIDED
        if decided or engine.state is AgentState.POISONED:
            engine.ejected = True
            if record is not None:
                record.commit_set.discard(engine.engine_id)
            engine.sent = None
            engine.retry_s = now_s + engine.backoff.next_s()

    def _note_served(self, engine: EngineRecord, applied: ApplyReport | None) -> None:
        newest = self.newest_decided()
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

    def tick(self, now_s: float) -> list[Action]:
        """Time passed: leases expire, deadlines end waits, commits that failed are sent again."""
        return [*self.pool.expire(now_s), *self._next_actions(now_s)]

    # --- what follows from the records ------------------------------------------------------------

    def _next_actions(self, now_s: float, reported: EngineRecord | None = None) -> list[Action]:
        """Does everything that has become possible: decide, give up, finish, retire, tell engines.

        With `reported`, nothing but this engine has changed: what the others should do follows from the versions, and
        they are only looked at when those have changed as well.
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
        seen = (self.groups.generation, versions)
        others_as_before = reported is not None and seen == self._last_seen
        self._last_seen = seen
        newest = self.newest_decided()
        for engine in (reported,) if reported is not None and others_as_before else self.pool.engines.values():
            actions += self._send_commands(engine, newest, now_s)
        return actions

    def _send_commands(self, engine: EngineRecord, newest: VersionRecord | None, now_s: float) -> list[Action]:
        """Sends an engine its next command, unless that is the one it was sent last."""
        if not engine.connected:
            return []
        actions: list[Action] = []
        join = self.groups.join(engine, now_s)
        if join is not None:
            engine.join_sent = join.generation
            actions.append(Send(engine_id=engine.engine_id, lease_id=engine.lease_id, command=join))
        command, key = wanted_command(engine, self.records.live, newest, self.groups, now_s)
        if command is not None and command != engine.sent:
            engine.sent = command
            engine.sent_key = key or engine.sent_key
            actions.append(Send(engine_id=engine.engine_id, lease_id=engine.lease_id, command=command))
        return actions

    def _try_decide(self, record: VersionRecord, attempt: Attempt, now_s: float) -> list[Action]:
        newest = self.newest_decided()
        if newest is not None and newest.key > record.key:
            return self._give_up(record, Reason.VERSION_SUPERSEDED, f"version {newest.version} was committed first")
        if any(r.deciding and r.key > record.key for r in self.records.live):
            return []  # the newer decision ends this one once it is durable
        live = self.pool.engines
        ready = {engine.engine_id for engine in live.values() if is_ready(engine, record)}
        unreachable = self.groups.unreachable(self.pool.engines.values(), record)
        required = {e for e in attempt.required if e in live and not live[e].ejected and e not in unreachable}
        if attempt.min_ready:
            enough, wanted = len(ready) >= attempt.min_ready, attempt.min_ready
        else:
            least = self._min_engines if newest is None else 1
            enough, wanted = required <= ready and len(ready) >= least, max(len(required), least)
        if enough:
            record.deciding, record.policy, record.min_ready = True, attempt.policy, attempt.min_ready
            return [self._save(record, decision=record.key)]
        refused = set(attempt.faults) & set(live) - ready - set(unreachable)
        short = len(live) - len(refused) < max(1, attempt.min_ready)
        hopeless = bool(refused) and (short or (not attempt.min_ready and bool(refused & required)))
        hopeless = hopeless or self._blocks_newer(record, ready | (set(live) - set(unreachable)), wanted)
        if hopeless or now_s >= attempt.deadline_s:
            why = self.pool.describe(ready, attempt.faults, unreachable)
            text = f"version {record.version} stays sealed: {len(ready)} of {wanted} engines prepared it; {why}"
            return self._give_up(record, Reason.ENGINES_NOT_READY, text, attempt.faults)
        return []

    def _blocks_newer(self, record: VersionRecord, reachable: set[str], wanted: int) -> bool:
        """Whether too few engines can get a version, while some engine can get a newer one.

        A restarted engine is sent the newest version again: to wait for an older one would keep it from serving.
        """
        newer = (r for r in self.records.values() if r.state is VersionState.SEALED and r.key > record.key)
        return len(reachable) < wanted and any(
            can_serve(engine, version, self.groups) for version in newer for engine in self.pool.engines.values()
        )

    def _release(self, record: VersionRecord, now_s: float) -> None:
        """Ejects engines past the deadline of the commit; releases a gang once all that are left have applied."""
        live = self.pool.engines
        if not record.commit_set and (record.released or not record.gang):
            return
        if now_s >= record.commit_deadline_s:
            for engine_id in record.commit_set & set(live) - record.held:
                live[engine_id].ejected = True
            record.commit_set &= record.held
        record.commit_set &= set(live)
        if record.gang and not (record.gang & record.commit_set) - record.held:
            record.released = True

    def _try_finish(self, record: VersionRecord, now_s: float) -> list[Action]:
        actions: list[Action] = []
        outstanding = not record.min_ready and bool(record.commit_set)
        if len(record.reports) >= max(1, record.min_ready) and not outstanding:
            self.records.move(record, VersionState.COMMITTED)
            record.answer = Activation(
                version=record.info(),
                engines=tuple(EngineReport(engine_id=e, applied=a) for e, a in sorted(record.reports.items())),
                commit_s=now_s - record.decided_s,
                lag_s=now_s - record.sealed_s,
            )
            notify = self._bump(record)
            actions += [self._save(record, committed=record.answer), notify]
            actions.append(Answer(key=record.key, result=record.answer))
            record.attempt = None
            return actions + self._retire(record)
        if record.attempt is not None and not record.commit_set and now_s >= record.attempt.deadline_s:
            why = self.pool.describe(
                set(record.reports), record.attempt.faults, self.groups.unreachable(self.pool.engines.values(), record)
            )
            text = (
                f"version {record.version} is decided and only goes forward, but {len(record.reports)} of "
                f"{max(1, record.min_ready)} engines serve it; {why}; call again to wait on"
            )
            actions += self._give_up(record, Reason.ENGINES_NOT_READY, text, record.attempt.faults)
        return actions

    def _give_up(
        self, record: VersionRecord, reason: Reason, text: str, faults: Mapping[str, AgentFault] | None = None
    ) -> list[Action]:
        record.attempt = None
        metadata = {engine_id: fault.reason for engine_id, fault in (faults or {}).items()}
        return [Answer(key=record.key, result=MeshError(reason, text, metadata=metadata))]

    def _drop(self, record: VersionRecord, why: str) -> list[Action]:
        """Aborts an undecided version: answers its waiters, deletes its bytes, has engines drop what they fetched."""
        if record.state not in UNDECIDED:
            return []
        actions: list[Action] = []
        if record.attempt is not None:
            actions += self._give_up(record, Reason.VERSION_SUPERSEDED, f"version {record.version} was dropped: {why}")
        self.records.move(record, VersionState.ABORTED)
        actions += self._changed(record)
        for engine in self.pool.engines.values():
            if engine.connected and engine.sent_key == record.key and isinstance(engine.sent, Prepare):
                engine.sent = Abort(version=record.version)
                actions.append(Send(engine_id=engine.engine_id, lease_id=engine.lease_id, command=engine.sent))
        actions.append(self._delete(record))
        return actions

    def _retire(self, newest: VersionRecord) -> list[Action]:
        live = self.records.live
        committed = sorted((r.key for r in live if r.state is VersionState.COMMITTED), reverse=True)
        late = [r.key for r in live if r.state is VersionState.COMMITTING and r.key < newest.key]
        actions: list[Action] = []
        for key in sorted(committed[self._keep_versions :] + late):
            record = self.records[key]
            if record.attempt is not None:
                text = f"version {newest.version} was committed before enough engines served version {record.version}"
                actions += self._give_up(record, Reason.VERSION_SUPERSEDED, text)
            self.records.move(record, VersionState.RETIRED)
            actions += [*self._changed(record), self._delete(record)]
        return actions

    def _delete(self, record: VersionRecord) -> DeleteBytes:
        needed = {path for other in self.records.live for path in other.paths}
        return DeleteBytes(artifact_id=record.artifact_id, paths=tuple(p for p in record.paths if p not in needed))

    def _bump(self, record: VersionRecord) -> Notify:
        self.revision += 1
        record.revision = self.revision
        return Notify(revision=self.revision)

    # --- the log ----------------------------------------------------------------------------------

    def recover(self, saved: Save | None, now_s: float, wall_s: float) -> None:
        """Takes all that an earlier hub saved, if there was one. Engines are not in it: they register again."""
        self._wall_offset_s = wall_s - now_s
        if saved is None:
            return
        self.run_id, self.epoch, self.revision = (saved.run[name] for name in ("run_id", "epoch", "revision"))
        for group in filter(None, (row for _, row in sorted(saved.groups.items()))):
            self.groups.adopt(rows.group_of(group, now_s - wall_s))
        for version in filter(None, (row for _, row in sorted(saved.versions.items()))):
            self.records.add(rows.version_of(version, now_s - wall_s))
        for record in self.records.live:
            if record.state is VersionState.COMMITTING:
                record.decided_s, record.commit_deadline_s = now_s, now_s + self._commit_deadline_s

    def _changed(self, record: VersionRecord) -> list[Action]:
        """A version is in another state: writes its row and wakes the watchers."""
        notify = self._bump(record)
        return [self._save(record), notify]

    def _save(
        self,
        record: VersionRecord | None = None,
        *,
        groups: Mapping[int, JsonObject | None] | None = None,
        decision: Key | None = None,
        committed: Activation | None = None,
    ) -> Save:
        """The rows of the run and of what changed in it, and the versions that are forgotten meanwhile."""
        # A decision gets its revision once it is durable; its row, and rows that are written until then, count it.
        revision = self.revision + sum(each.deciding for each in self.records.live)
        versions: dict[Key, JsonObject | None] = {}
        if record is not None:
            versions.update(dict.fromkeys(self._forget() if record.state not in LIVE else ()))
            as_of = revision if record.deciding else record.revision
            versions[record.key] = rows.version(record, as_of, self._wall_offset_s)
        run = rows.run(self.run_id, self.epoch, revision)
        return Save(run=run, versions=versions, groups=groups or {}, decision=decision, committed=committed)

    def _forget(self) -> list[Key]:
        """Forgets versions that ended long ago; returns their keys."""
        engines = self.pool.engines.values()
        served = {(engine.serving, engine.root) for engine in engines}  # they are vouched for as long as they serve it
        gone = self.records.forget(keep=self._kept_ended, needed=lambda record: (record.version, record.root) in served)
        for engine in engines if gone else ():
            engine.faulted &= self.records.keys()
        return gone

    # --- checks -----------------------------------------------------------------------------------

    def _refused_by(self, key: Key) -> list[EngineRecord]:
        return [engine for engine in self.pool.engines.values() if key in engine.faulted]

    def _check_run(self, run_id: str) -> None:
        if run_id and run_id != self.run_id:
            known = f"this hub serves {self.run_id!r}" if self.run_id else "nothing was published yet"
            raise MeshError(Reason.UNKNOWN_RUN, f"run {run_id!r} is unknown: {known}")

    def _check_owner(self, run_id: str, epoch: int) -> None:
        """Lets only the newest trainer of this hub's run publish; the first one that comes is that."""
        if self.run_id and run_id != self.run_id:
            raise MeshError(
                Reason.RUN_LIMIT_REACHED,
                f"this hub serves run {self.run_id!r}, got {run_id!r}; give each run its own hub",
            )
        self._check_epoch(epoch)
        if self.epoch and epoch > self.epoch + 1:  # or one wrong number would keep every later trainer out
            text = (
                f"must be at most {self.epoch + 1}, got {epoch}: this hub is in epoch {self.epoch}; begin the next one"
            )
            raise invalid([FieldViolation("epoch", text)])

    def _begin_epoch(self, run_id: str, epoch: int) -> list[Action]:
        """Drops what is left of earlier epochs. The epoch is durable with the next row that is saved."""
        if epoch <= self.epoch:
            return []
        self.run_id, self.epoch = run_id, epoch
        actions: list[Action] = []
        for old in [r for r in self.records.live if r.key[0] < epoch and not r.deciding]:
            actions += self._drop(old, f"epoch {epoch} began")
        return actions

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise MeshError(
                Reason.STALE_EPOCH,
                f"epoch {epoch} is over: epoch {self.epoch} began; a newer trainer of this run owns the hub",
            )

    def _owned(self, run_id: str, epoch: int, version: int) -> VersionRecord:
        self._check_run(run_id)
        self._check_epoch(epoch)
        record = self.records.get((epoch, version))
        if record is None:
            raise MeshError(
                Reason.UNKNOWN_VERSION, f"version {version} of epoch {epoch} was never staged; create it first"
            )
        return record
