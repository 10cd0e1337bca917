"""What a worker tells the front twice a second: that its loop runs, what its rollouts do, how busy its engines are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.rollout.deadlines.stages import RolloutStage, StageKind

BEAT_EVERY_S = 0.5


@dataclass(frozen=True)
class Beat:
    """`stages` are those that changed since the last beat, by group and rollout; `in_flight` model calls by engine."""

    stages: Sequence[tuple[int, int, RolloutStage]] = ()
    in_flight: Mapping[str, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        stages = [(group, index, stage.what, stage.began_s, stage.kind.value) for group, index, stage in self.stages]
        return json.dumps({"stages": stages, "in_flight": dict(self.in_flight)}).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Beat:
        told = json.loads(payload)
        stages = [
            (group, index, RolloutStage(what, began_s, StageKind(kind)))
            for group, index, what, began_s, kind in told["stages"]
        ]
        return cls(stages, told["in_flight"])
