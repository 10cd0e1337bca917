"""Which task comes next: environments mixed by ratio, each shuffled anew every epoch; read by the plan of work."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.sampling.groups import TaskRef


@dataclass(frozen=True, kw_only=True)
class TrainSource:
    """One training environment: its share of the tasks, and how many it has (None: infinitely many)."""

    environment: str
    ratio: float
    num_tasks: int | None


@dataclass
class _Stream:
    """The tasks of one environment in order. Epoch e is a permutation that depends on (seed, environment, e) alone."""

    source: TrainSource
    seed: int
    drawn: int = 0
    _epoch: int = -1
    _order: list[int] = field(default_factory=list)

    def next_index(self) -> int:
        position = self.drawn
        self.drawn += 1
        if self.source.num_tasks is None:
            return position
        epoch, place = divmod(position, self.source.num_tasks)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(self.source.num_tasks))
            random.Random(f"{self.seed}/{self.source.environment}/{epoch}").shuffle(self._order)
        return self._order[place]


class TaskSchedule:
    """An endless, deterministic sequence of tasks.

    The environment that lags its share most comes next, so after any number of draws each count is within one draw per
    other environment of its ratio. Raises ValueError when there is no environment, a ratio is not positive or a taskset
    is empty.
    """

    def __init__(self, sources: Sequence[TrainSource], *, seed: int) -> None:
        if not sources:
            raise ValueError("orchestrator.train.env must name at least one environment, got none")
        for source in sources:
            if source.ratio <= 0:
                raise ValueError(f"ratio of environment {source.environment!r} must be positive, got {source.ratio}")
            if source.num_tasks == 0:
                raise ValueError(f"environment {source.environment!r} has no tasks; check the arguments of its taskset")
        total = sum(source.ratio for source in sources)
        self._shares = [source.ratio / total for source in sources]
        self._streams = [_Stream(source=source, seed=seed) for source in sources]
        self._drawn = 0

    def next_task(self) -> TaskRef:
        self._drawn += 1
        lag = [share * self._drawn - stream.drawn for share, stream in zip(self._shares, self._streams, strict=True)]
        stream = self._streams[lag.index(max(lag))]
        return TaskRef(environment=stream.source.environment, index=stream.next_index())

    def drawn(self) -> dict[str, int]:
        """Tasks drawn so far, by environment."""
        return {stream.source.environment: stream.drawn for stream in self._streams}

    def skip(self, drawn: Mapping[str, int]) -> None:
        """Goes on behind the tasks that were drawn before, by environment."""
        for stream in self._streams:
            stream.drawn += drawn.get(stream.source.environment, 0)
        self._drawn = sum(stream.drawn for stream in self._streams)

    def epochs(self) -> dict[str, float]:
        """Passes over each finite environment so far."""
        return {
            stream.source.environment: stream.drawn / stream.source.num_tasks
            for stream in self._streams
            if stream.source.num_tasks is not None
        }
