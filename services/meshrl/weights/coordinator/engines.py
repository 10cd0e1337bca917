"""The engines that hold a lease at the hub: which are live, what each serves, which may get requests. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from meshrl.weights.coordinator.states import DECIDED, SERVING, Action, EndSession, EngineRecord, VersionRecord
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AgentFault, AgentRegistration, EngineInfo, VersionState


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
