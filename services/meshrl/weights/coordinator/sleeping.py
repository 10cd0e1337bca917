"""One call of SleepEngines at the hub: which engines were asked, and what each answered. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.weights.coordinator.states import Action, EngineRecord, Send
from meshrl.wire.types import Sleep


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
