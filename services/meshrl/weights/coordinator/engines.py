"""The engines that hold a lease at the hub: which are live, what each serves, and its next command. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from meshrl.weights.coordinator.engine_groups import EngineGroups
from meshrl.weights.coordinator.states import (
    DECIDED,
    SERVING,
    Action,
    EndSession,
    EngineRecord,
    Key,
    Send,
    VersionRecord,
)
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import (
    AgentCommand,
    AgentFault,
    AgentRegistration,
    AgentState,
    Commit,
    EngineInfo,
    Prepare,
    Resume,
    Sleep,
    Transport,
    VersionState,
)


class EnginePool:
    """Live engines by id, in order of registration."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.engines: dict[str, EngineRecord] = {}
        self._by_lease: dict[str, EngineRecord] = {}

    def register(self, registration: AgentRegistration, lease_id: str, now_s: float) -> list[Action]:
        """Gives `registration` a lease; its earlier one ends."""
        before = self.engines.get(registration.engine_id)
        if before is not None:
            before.connected = False  # a round of sleep waits for no answer on that session
            del self._by_lease[before.lease_id]
        engine = EngineRecord(
            registration=registration,
            lease_id=lease_id,
            seen_s=now_s,
            serving=registration.held_version,
            root=registration.held_root,
            # Until it reports, it is taken to be where it was: commits wait for it.
            group_generation=None if before is None else before.group_generation,
        )
        self.engines[engine.engine_id] = self._by_lease[lease_id] = engine
        return [] if before is None else [EndSession(lease_id=before.lease_id)]

    def by_lease(self, lease_id: str) -> EngineRecord | None:
        return self._by_lease.get(lease_id)

    def leased(self, lease_id: str) -> EngineRecord:
        """Returns the engine of a lease. Raises MeshError LEASE_EXPIRED."""
        engine = self.by_lease(lease_id)
        if engine is None:
            raise MeshError(Reason.LEASE_EXPIRED, f"lease {lease_id!r} is over or unknown; register again")
        return engine

    def expire(self, now_s: float) -> list[Action]:
        """Drops every engine that was silent for a lease."""
        gone = [engine for engine in self.engines.values() if not self._live(engine, now_s)]
        for engine in gone:
            engine.connected = False
            del self.engines[engine.engine_id], self._by_lease[engine.lease_id]
        return [EndSession(lease_id=engine.lease_id) for engine in gone]

    def _live(self, engine: EngineRecord, now_s: float) -> bool:
        return now_s - engine.seen_s <= self.lease_s

    def of_pool(self, engine_pool: str) -> tuple[EngineRecord, ...]:
        """The engines of a pool; empty is all of them."""
        return tuple(e for e in self.engines.values() if not engine_pool or e.registration.engine_pool == engine_pool)

    def infos(self, engine_pool: str, records: Iterable[VersionRecord], now_s: float) -> tuple[EngineInfo, ...]:
        """Lists the engines of a pool (empty: all), with whether requests may be sent to each."""
        vouched = {(r.version, r.root) for r in records if r.state in DECIDED or r.state is VersionState.RETIRED}
        return tuple(
            EngineInfo(
                engine_id=engine.engine_id,
                url=engine.registration.url,
                engine_pool=engine.registration.engine_pool,
                state=engine.state,
                serving_version=engine.serving,
                routable=self._live(engine, now_s)
                and not engine.ejected
                and engine.state in SERVING
                and (engine.serving, engine.root) in vouched,
                last_seen_s=max(0.0, now_s - engine.seen_s),
                last_fault=engine.last_fault,
                transports=engine.registration.transports,
                collective_ranks=engine.registration.collective_ranks,
                collective_backend=engine.registration.collective_backend,
                group_generation=engine.group_generation,
                host=engine.registration.host,
                sleeping=engine.sleeping,
                can_sleep=engine.registration.can_sleep,
                layout_signature=engine.registration.layout_signature,
            )
            for engine in self.of_pool(engine_pool)
        )

    def describe(self, ready: Collection[str], faults: Mapping[str, AgentFault], unreachable: Mapping[str, str]) -> str:
        """Explains to a person why engines are not ready; `unreachable` is why some cannot get the version."""
        if not self.engines:
            return "no engine is registered; start one that points at this hub"
        parts = []
        for engine in self.engines.values():
            if engine.engine_id in ready:
                continue
            fault, why = faults.get(engine.engine_id), unreachable.get(engine.engine_id)
            if fault is not None:
                parts.append(f"{engine.engine_id} refused it ({fault.reason}: {fault.message})")
            else:
                state = engine.state.value + (", ejected" if engine.ejected else "")
                parts.append(f"{engine.engine_id} is {state}" + (f": {why}" if why else ""))
        return "; ".join(parts) or "more engines must register"


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


@dataclass(frozen=True, kw_only=True)
class SleepRound:
    """The engines that were sent Sleep `number`, and how many `others` of the pool cannot sleep or have no session."""

    number: int
    asked: tuple[EngineRecord, ...]
    others: int

    @classmethod
    def begin(cls, engines: tuple[EngineRecord, ...], number: int) -> tuple[SleepRound, list[Action]]:
        """Asks every engine that can sleep and has a session; those asleep, too, which may have been woken since."""
        asked = tuple(engine for engine in engines if engine.registration.can_sleep and engine.connected)
        actions: list[Action] = [
            Send(engine_id=engine.engine_id, lease_id=engine.lease_id, command=Sleep(number=number)) for engine in asked
        ]
        return cls(number=number, asked=asked, others=len(engines) - len(asked)), actions

    @property
    def over(self) -> bool:
        """Whether no engine is waited for any more; one whose session ended is not."""
        return all(self._answered(engine) or not engine.connected for engine in self.asked)

    @property
    def asleep(self) -> int:
        return sum(engine.sleeping and self._answered(engine) for engine in self.asked)

    @property
    def awake(self) -> int:
        return len(self.asked) + self.others - self.asleep

    def _answered(self, engine: EngineRecord) -> bool:
        """Whether an engine has answered this round, or a later one."""
        return engine.sleep_answered is not None and engine.sleep_answered >= self.number
