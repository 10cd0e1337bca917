"""The command that an engine should get next: it follows from the versions, the groups and its last report. No I/O."""

from __future__ import annotations

from collections.abc import Collection

from meshrl.weights.coordinator.engine_groups import EngineGroups
from meshrl.weights.coordinator.states import EngineRecord, Key, VersionRecord
from meshrl.wire.types import AgentCommand, AgentState, Commit, Prepare, Resume, Transport, VersionState


def is_ready(engine: EngineRecord, record: VersionRecord) -> bool:
    """Whether an engine has prepared a version, or serves it."""
    return engine.prepared == record.artifact_id or (engine.serves(record) and engine.state is AgentState.READY)


def can_serve(engine: EngineRecord, record: VersionRecord, groups: EngineGroups) -> bool:
    """Whether an engine has a version's bytes, or can get them now."""
    return engine.prepared == record.artifact_id or groups.why_unreachable(engine, record) is None


def wanted_command(
    engine: EngineRecord,
    live: Collection[VersionRecord],
    newest: VersionRecord | None,
    groups: EngineGroups,
    now_s: float,
) -> tuple[AgentCommand | None, Key | None]:
    """The next command, and the version that it is about; `newest` is the newest of the `live` that is decided."""
    reachable = [r for r in live if groups.why_unreachable(engine, r) is None]
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
            return Commit(version=newest.version, artifact_id=newest.artifact_id, hold=hold), newest.key
        once = newest.transport is Transport.NCCL  # its bytes come again only in a newer group
        if not once and (target is None or not target.busy):  # again, ever more rarely, until a newer one is wanted
            if engine.retry_s is not None and now_s < engine.retry_s:
                return None, None
            return Commit(version=newest.version, artifact_id=newest.artifact_id), newest.key
    if newest is not None and _holds(engine, newest):
        waits = engine.engine_id in newest.gang and not newest.released  # a restarted hub forgot its gangs
        return (None, None) if waits else (Resume(version=newest.version), None)
    if target is None or engine.prepared == target.artifact_id:
        return None, None
    return Prepare(version=target.version, artifact_id=target.artifact_id), target.key


def _holds(engine: EngineRecord, record: VersionRecord) -> bool:
    """Whether an engine has applied a version and stays paused. `held` may also name an engine that restarted."""
    applied = engine.engine_id in record.held or engine.state is AgentState.APPLYING
    return applied and engine.serves(record)
