"""The engines that hold a lease at the hub, and rounds that put them to sleep. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.weights.coordinator.states import Action, EndSession, EngineRecord, Send
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AgentRegistration, Sleep


class EnginePool:
    """Live engines by id, in order of registration."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.engines: dict[str, EngineRecord] = {}

    def register(self, registration: AgentRegistration, lease_id: str, now_s: float) -> list[Action]:
        before = self.engines.get(registration.engine_id)
        if before is not None:
            before.connected = False  # a round of sleep waits for no answer on that session
        self.engines[registration.engine_id] = EngineRecord(
            registration=registration,
            lease_id=lease_id,
            seen_s=now_s,
            # Until it reports, it is taken to be where it was: commits wait for it.
            group_generation=None if before is None else before.group_generation,
        )
        return [] if before is None else [EndSession(lease_id=before.lease_id)]

    def by_lease(self, lease_id: str) -> EngineRecord | None:
        return next((engine for engine in self.engines.values() if engine.lease_id == lease_id), None)

    def leased(self, lease_id: str) -> EngineRecord:
        """The engine of a lease. Raises MeshError LEASE_EXPIRED."""
        engine = self.by_lease(lease_id)
        if engine is None:
            raise MeshError(Reason.LEASE_EXPIRED, f"lease {lease_id!r} is over or unknown; register again")
        return engine

    def expire(self, now_s: float) -> list[Action]:
        gone = [engine for engine in self.engines.values() if not self.live(engine, now_s)]
        for engine in gone:
            engine.connected = False
            del self.engines[engine.engine_id]
        return [EndSession(lease_id=engine.lease_id) for engine in gone]

    def live(self, engine: EngineRecord, now_s: float) -> bool:
        return now_s - engine.seen_s <= self.lease_s

    def of_pool(self, engine_pool: str) -> tuple[EngineRecord, ...]:
        return tuple(e for e in self.engines.values() if not engine_pool or e.registration.engine_pool == engine_pool)


@dataclass(frozen=True, kw_only=True)
class SleepRound:
    """The engines that were sent Sleep `number`; `others` of the pool cannot sleep or have no session."""

    number: int
    asked: tuple[EngineRecord, ...]
    others: int

    @classmethod
    def begin(cls, engines: tuple[EngineRecord, ...], number: int) -> tuple[SleepRound, list[Action]]:
        """Asks every engine that can, also those asleep, which may have been woken since."""
        asked = tuple(engine for engine in engines if engine.registration.can_sleep and engine.connected)
        actions: list[Action] = [
            Send(engine_id=engine.engine_id, lease_id=engine.lease_id, command=Sleep(number=number)) for engine in asked
        ]
        return cls(number=number, asked=asked, others=len(engines) - len(asked)), actions

    @property
    def over(self) -> bool:
        """Whether no session that goes on has an answer to give."""
        return all(self._answered(engine) or not engine.connected for engine in self.asked)

    @property
    def asleep(self) -> int:
        return sum(engine.sleeping and self._answered(engine) for engine in self.asked)

    @property
    def awake(self) -> int:
        return len(self.asked) + self.others - self.asleep

    def _answered(self, engine: EngineRecord) -> bool:
        return engine.sleep_answered is not None and engine.sleep_answered >= self.number
