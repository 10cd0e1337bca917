"""Decides which version engines prepare and serve: events and the time in, actions out, no I/O inside.

A version is staged, sealed, decided and committed; every move is written to the log. The decision is the point of no
return: it is asked for with `Save(decision=...)` and takes effect only when the hub calls `decided`, that is, once it
is durable. What an engine should do next follows from the versions and its last report alone (`_wanted_command`), so a
restarted hub, a new session and a late engine need no code of their own: commands are derived and sent again, and they
are idempotent by (version, artifact).
"""

from __future__ import annotations

from meshrl.weights.coordinator import rows
from meshrl.weights.coordinator.commits import CommitRules
from meshrl.weights.coordinator.engine_groups import GroupRequest, first_version
from meshrl.weights.coordinator.sleeping import SleepRound
from meshrl.weights.coordinator.states import (
    LIVE,
    UNDECIDED,
    Action,
    Answer,
    Attempt,
    EngineRecord,
    Key,
    Save,
    VersionRecord,
)
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.types import (
    ActivationPolicy,
    AgentRegistration,
    AgentReport,
    AgentState,
    Lease,
    Manifest,
    OpenedGroup,
    Transport,
    VersionInfo,
    VersionState,
)


class Coordinator(CommitRules):
    """The events of WeightSync for one run. Not safe for threads: call it from one event loop."""

    # --- reading ----------------------------------------------------------------------------

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

    def by_artifact(self, artifact_id: str) -> VersionRecord:
        """Returns the record of an artifact whose bytes are kept. Raises UNKNOWN_VERSION."""
        for record in self.records.live:
            if record.artifact_id == artifact_id:
                return record
        raise MeshError(Reason.UNKNOWN_VERSION, f"artifact {artifact_id} is unknown or retired; fetch a newer version")

    def has_artifact(self, artifact_id: str) -> bool:
        """Whether it is a version's whose bytes are kept."""
        return any(record.artifact_id == artifact_id for record in self.records.live)

    def infos(self, run_id: str, after_revision: int) -> list[tuple[int, VersionInfo]]:
        """Returns (revision, version) of every version that changed after a revision, in order of change."""
        if run_id and run_id != self.run_id:
            return []
        changed = [r for r in self.records.values() if r.revision > after_revision]
        return [(r.revision, r.info()) for r in sorted(changed, key=lambda r: r.revision)]

    # --- publishers -------------------------------------------------------------------------

    def stage(self, manifest: Manifest, artifact: str, now_s: float) -> tuple[VersionRecord, list[Action]]:
        """Takes a manifest. The same artifact again is the same record, whatever its state.

        Raises: RUN_LIMIT_REACHED for another run; STALE_EPOCH; INVALID_REQUEST for an epoch beyond the next;
        VERSION_CONFLICT for another artifact of a version that was not aborted; VERSION_SUPERSEDED when a later version
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

        Raises: RUN_LIMIT_REACHED for another run; STALE_EPOCH; GROUP_BROKEN when no engine can take part.
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
        ready = {e.engine_id for e in self.pool.engines.values() if self._is_ready(e, record)}
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
        """Tells the engines of a pool (empty: all) to give their memory back until there is work."""
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
        target = self._target_of(engine, report)
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
        self._note_group(engine, report.group_generation)  # after the fault, which is of the group before
        self._note_served(engine, report.applied)
        return self._next_actions(now_s, engine)

    def _target_of(self, engine: EngineRecord, report: AgentReport) -> VersionRecord | None:
        """Returns the version that a report is about; its artifact decides, since epochs share version numbers."""
        sent = self.records.get(engine.sent_key) if engine.sent_key is not None else None
        artifact = report.target_artifact_id
        if report.target_version is None:
            return None
        if sent is not None and sent.version == report.target_version and artifact in ("", sent.artifact_id):
            return sent
        named = (r for r in self.records.values() if r.artifact_id == artifact and r.version == report.target_version)
        return next(named, None)

    def tick(self, now_s: float) -> list[Action]:
        """Time passed: leases expire, deadlines end waits, commits that failed are sent again."""
        return [*self.pool.expire(now_s), *self._next_actions(now_s)]

    # --- recovery -------------------------------------------------------------------------------

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
