"""The rules of a commit: when a version is decided, when it is committed, what each engine should do next. No I/O.

`Coordinator`, which derives from `CommitRules`, changes the records by each event; `_next_actions` then says what
follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshrl.weights.coordinator import rows
from meshrl.weights.coordinator.engine_groups import EngineGroups
from meshrl.weights.coordinator.engines import EnginePool
from meshrl.weights.coordinator.records import VersionRecords
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
)
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import (
    Abort,
    Activation,
    AgentCommand,
    AgentFault,
    AgentState,
    ApplyReport,
    Commit,
    EngineReport,
    Prepare,
    Resume,
    Transport,
    VersionState,
)
from meshrl.wire.values import JsonObject

KEPT_ENDED = 32  # versions that are known after they were retired or aborted


class CommitRules:
    """The records of versions and engines, and what follows from them."""

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

    def newest_decided(self) -> VersionRecord | None:
        """The version that every engine should serve."""
        return self.records.newest_decided()

    # --- rules ----------------------------------------------------------------------------------

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
            engine.retry_s = now_s + min(30.0, 0.5 * 2**engine.retries)
            engine.retries = min(engine.retries + 1, 8)

    def _note_group(self, engine: EngineRecord, generation: int | None) -> None:
        """Records the group that an engine is in; in a newer group, what failed in older ones is tried again."""
        engine.group_generation = generation
        if generation is None or generation <= engine.newest_generation:
            return
        engine.newest_generation = generation
        for record in self.records.live:
            if record.transport is not Transport.NCCL:
                continue
            engine.faulted.discard(record.key)
            if record.attempt is not None:
                record.attempt.faults.pop(engine.engine_id, None)
            if engine.sent_key == record.key:
                engine.sent = None

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
                engine.ejected, engine.retries, engine.retry_s = False, 0, None
                engine.faulted = {key for key in engine.faulted if key > record.key}
            record.held.discard(engine.engine_id)
            record.commit_set.discard(engine.engine_id)
            if applied is None or applied.version != record.version:
                applied = ApplyReport(
                    version=record.version, root=record.root, pause_s=0.0, prepare_s=0.0, requests_kept=0
                )
            if record.state is VersionState.COMMITTING:
                record.reports.setdefault(engine.engine_id, applied)

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
        command, key = self._wanted_command(engine, newest, now_s)
        if command is not None and command != engine.sent:
            engine.sent = command
            engine.sent_key = key or engine.sent_key
            actions.append(Send(engine_id=engine.engine_id, lease_id=engine.lease_id, command=command))
        return actions

    def _is_ready(self, engine: EngineRecord, record: VersionRecord) -> bool:
        """Whether an engine has prepared a version, or serves it."""
        return engine.prepared == record.artifact_id or (engine.serves(record) and engine.state is AgentState.READY)

    def _unreachable(self, record: VersionRecord) -> dict[str, str]:
        """Engines that cannot get a version now, and why."""
        reasons = {
            engine.engine_id: self.groups.why_unreachable(engine, record) for engine in self.pool.engines.values()
        }
        return {engine_id: reason for engine_id, reason in reasons.items() if reason is not None}

    def _try_decide(self, record: VersionRecord, attempt: Attempt, now_s: float) -> list[Action]:
        newest = self.newest_decided()
        if newest is not None and newest.key > record.key:
            return self._give_up(record, Reason.VERSION_SUPERSEDED, f"version {newest.version} was committed first")
        if any(r.deciding and r.key > record.key for r in self.records.live):
            return []  # the newer decision ends this one once it is durable
        live = self.pool.engines
        ready = {engine.engine_id for engine in live.values() if self._is_ready(engine, record)}
        unreachable = self._unreachable(record)
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
            self._can_serve(engine, version) for version in newer for engine in self.pool.engines.values()
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
            record.answer = Activation(
                version=record.info(),
                engines=tuple(EngineReport(engine_id=e, applied=a) for e, a in sorted(record.reports.items())),
                commit_s=now_s - record.decided_s,
                lag_s=now_s - record.sealed_s,
            )
            self.records.move(record, VersionState.COMMITTED)
            record.answer = rows.with_state(record.answer, VersionState.COMMITTED)
            notify = self._bump(record)
            actions += [self._save(record, committed=record.answer), notify]
            actions.append(Answer(key=record.key, result=record.answer))
            record.attempt = None
            return actions + self._retire(record)
        if record.attempt is not None and not record.commit_set and now_s >= record.attempt.deadline_s:
            why = self.pool.describe(set(record.reports), record.attempt.faults, self._unreachable(record))
            text = (
                f"version {record.version} is decided and only goes forward, but {len(record.reports)} of "
                f"{max(1, record.min_ready)} engines serve it; {why}; call again to wait on"
            )
            actions += self._give_up(record, Reason.ENGINES_NOT_READY, text, record.attempt.faults)
        return actions

    def _can_serve(self, engine: EngineRecord, record: VersionRecord) -> bool:
        return engine.prepared == record.artifact_id or self.groups.why_unreachable(engine, record) is None

    def _holds(self, engine: EngineRecord, record: VersionRecord) -> bool:
        """Whether an engine has applied a version and stays paused. `held` may also name an engine that restarted."""
        applied = engine.engine_id in record.held or engine.state is AgentState.APPLYING
        return applied and engine.serves(record)

    def _wanted_command(
        self, engine: EngineRecord, newest: VersionRecord | None, now_s: float
    ) -> tuple[AgentCommand | None, Key | None]:
        sealed = [
            r
            for r in self.records.live
            if r.state is VersionState.SEALED and self.groups.why_unreachable(engine, r) is None
        ]
        busy = [r for r in sealed if r.busy]
        target = min(busy, key=lambda r: r.key) if busy else max(sealed, key=lambda r: r.key, default=None)
        if target is None:
            target = self._arriving(engine)
        if target is not None and target.key in engine.faulted:
            target = None
        if newest is not None and not engine.serves(newest) and self._can_serve(engine, newest):
            if newest.key not in engine.faulted:
                hold = engine.engine_id in newest.gang and not newest.released
                return Commit(version=newest.version, artifact_id=newest.artifact_id, hold=hold), newest.key
            once = newest.transport is Transport.NCCL  # its bytes come again only in a newer group
            if not once and (target is None or not target.busy):  # again, ever more rarely, until a newer one is wanted
                if engine.retry_s is not None and now_s < engine.retry_s:
                    return None, None
                return Commit(version=newest.version, artifact_id=newest.artifact_id), newest.key
        if newest is not None and self._holds(engine, newest):
            waits = engine.engine_id in newest.gang and not newest.released  # a restarted hub forgot its gangs
            return (None, None) if waits else (Resume(version=newest.version), None)
        if target is None or engine.prepared == target.artifact_id:
            return None, None
        return Prepare(version=target.version, artifact_id=target.artifact_id), target.key

    def _arriving(self, engine: EngineRecord) -> VersionRecord | None:
        """The version whose upload an engine may follow: the newest one whose bytes arrive and that can reach it."""
        arriving = (r for r in self.records.live if r.state is VersionState.STAGING and r.arriving)
        return max(
            (r for r in arriving if self.groups.why_unreachable(engine, r) is None), key=lambda r: r.key, default=None
        )

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
