"""What front and worker tell each other in JSON: a worker's start-up settings, and its heartbeat twice a second.

Everything else that goes between them is a message of the contract; `frames` carries both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from meshrl.rollout.deadlines.stages import RolloutStage, StageKind

HEARTBEAT_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Worker `number` hosts the environments `names` of `config`, which is a RolloutConfig as JSON."""

    number: int
    config: str
    names: Sequence[str]
    max_memory_mib: int
    mark: str = ""
    """In the environment variables of every process that the worker starts, so that they can be found and ended."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> WorkerSettings:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Heartbeat:
    """Says that a worker's event loop runs.

    `stages` are the rollout stages that changed since the last heartbeat, as (group, rollout, stage); `in_flight` has
    the worker's model calls by engine URL.
    """

    stages: Sequence[tuple[int, int, RolloutStage]] = ()
    in_flight: Mapping[str, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        stages = [(group, index, stage.what, stage.began_s, stage.kind.value) for group, index, stage in self.stages]
        return json.dumps({"stages": stages, "in_flight": dict(self.in_flight)}).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Heartbeat:
        values = json.loads(payload)
        stages = [
            (group, index, RolloutStage(what, began_s, StageKind(kind)))
            for group, index, what, began_s, kind in values["stages"]
        ]
        return cls(stages, values["in_flight"])
