"""The stages of a rollout, and what makes it overdue."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import lru_cache

from meshrl.core.config.shared import StageDeadlinesConfig
from meshrl.core.telemetry.waits import CountedWait

_URL = re.compile(r"https?://[^\s,;)]+")
_WORKER = re.compile(r"^worker (\d+)")


@lru_cache(maxsize=1024)  # a thousand rollouts in the same few stages are looked at every few seconds
def _awaited(what: str, worker: str) -> tuple[str, ...]:
    return tuple(_URL.findall(what)) or tuple(f"rollout_worker_{number}" for number in _WORKER.findall(worker))


class StageKind(enum.StrEnum):
    SETUP = "setup_s"
    TURN = "turn_s"
    SCORING = "scoring_s"
    OTHER = ""


@dataclass(frozen=True)
class RolloutStage:
    """What a rollout does, such as "in its rewards and metrics", since `began_s` (time.time)."""

    what: str
    began_s: float
    kind: StageKind = StageKind.OTHER
    worker: str = ""
    """The worker process that plays it, and the code that blocks it; "" in the process itself."""

    def seconds(self, now_s: float) -> float:
        return max(0.0, now_s - self.began_s)

    def wait(self, key: object, environment: str) -> CountedWait:
        place = f" ({self.worker})" if self.worker else ""
        return CountedWait(
            key=key,
            name=f"{environment} {self.kind or 'other'}",
            on=_awaited(self.what, self.worker),
            began_s=self.began_s,
            words=f"rollouts of {environment!r} {self.what}{place}",
        )

    def describe(self, now_s: float) -> str:
        place = f" ({self.worker})" if self.worker else ""
        return f"it was {self.what}{place}, {self.seconds(now_s):.1f} s into this stage"


BEGINNING = "beginning its episode"


def overdue(deadlines: StageDeadlinesConfig, stage: RolloutStage, began_s: float, now_s: float) -> str:
    """Words for the limit that a rollout which began at `began_s` has overstepped; "" within its limits."""
    if deadlines.rollout_s is not None and now_s - began_s > deadlines.rollout_s:
        return f"not finished within deadlines.rollout_s = {deadlines.rollout_s:g}"
    most_s: float | None = getattr(deadlines, stage.kind.value) if stage.kind.value else None
    if most_s is not None and stage.seconds(now_s) > most_s:
        return f"longer in one stage than deadlines.{stage.kind.value} = {most_s:g}"
    return ""


def shortest_s(deadlines: StageDeadlinesConfig) -> float | None:
    given = (deadlines.setup_s, deadlines.turn_s, deadlines.scoring_s, deadlines.rollout_s)
    return min((most_s for most_s in given if most_s is not None), default=None)
