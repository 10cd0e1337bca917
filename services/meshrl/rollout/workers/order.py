"""What the front starts a worker with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerOrder:
    """Worker `number` hosts the environments `names` of `config`, which is a RolloutConfig as JSON."""

    number: int
    config: str
    names: Sequence[str]
    max_memory_mib: int
    mark: str = ""
    """In the environment of what it starts, so that it can be found when the worker is gone."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> WorkerOrder:
        return cls(**json.loads(text))
