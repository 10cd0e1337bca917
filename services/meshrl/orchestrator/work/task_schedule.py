"""Which task comes next: environments mixed by ratio, each shuffled anew every pass; read by the plan of work.

The groups that the plan begins together are sent to the rollout services longest first, as far as lengths are known,
because a batch waits for its last rollouts. That changes neither which tasks are drawn nor for which step.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.algorithms.recipes.base import sampled_tokens
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef

MOST_DRAWS = 4
"""With follow_mixture: an environment whose groups come to nothing takes at most so many times its share of draws."""

REMEMBERED_TASKS = 65_536
REMEMBERED_GROUPS = 32
"""Each group moves the mean of its environment by one part in so many."""


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
    before: int = 0  # of these, those by an earlier process that its share does not count
    given_back: int = 0  # groups that came to nothing
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
    """An endless, deterministic sequence of tasks. The environment that lags its share most comes next, so after any
    number of draws each count is within one draw per other environment of its ratio. With `follow_mixture` a draw that
    was given back does not count, so that the groups that come to something have the ratios; an environment is then
    drawn at most MOST_DRAWS times as often as its ratio asks for, counted since the process began. Raises ValueError
    when there is no environment, a ratio is not positive or a taskset is empty."""

    def __init__(self, sources: Sequence[TrainSource], *, seed: int, follow_mixture: bool = False) -> None:
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
        self._follow_mixture = follow_mixture

    def next_task(self) -> TaskRef:
        stream = self._lagging()
        return TaskRef(environment=stream.source.environment, index=stream.next_index())

    def _lagging(self) -> _Stream:
        fresh = [stream.drawn - stream.before for stream in self._streams]
        counted = [one - stream.given_back for one, stream in zip(fresh, self._streams, strict=True)]
        most = MOST_DRAWS * (sum(fresh) + 1)
        open_to = [place for place, share in enumerate(self._shares) if fresh[place] < most * share]
        total = sum(counted) + 1
        return self._streams[max(open_to, key=lambda place: self._shares[place] * total - counted[place])]

    def give_back(self, environment: str) -> None:
        """A group of this environment came to nothing: dropped whole, failed or too old."""
        for stream in self._streams:
            stream.given_back += self._follow_mixture and stream.source.environment == environment

    def drawn(self) -> dict[str, int]:
        return {stream.source.environment: stream.drawn for stream in self._streams}

    def skip(self, drawn: Mapping[str, int]) -> None:
        """Goes on behind the tasks that were drawn before, by environment."""
        for stream in self._streams:
            stream.drawn += drawn.get(stream.source.environment, 0)
            stream.before = stream.drawn if self._follow_mixture else 0

    def epochs(self) -> dict[str, float]:
        return {
            stream.source.environment: stream.drawn / stream.source.num_tasks
            for stream in self._streams
            if stream.source.num_tasks is not None
        }


class LengthEstimates:
    """Expected lengths in sampled tokens: of a task, that of its last group; of one not seen yet, its environment's."""

    def __init__(self) -> None:
        self._of_task: OrderedDict[TaskRef, float] = OrderedDict()
        self._of_environment: dict[str, tuple[float, int]] = {}  # mean, groups seen

    def observe(self, group: RolloutGroup) -> None:
        """Notes the longest rollout of a group that is over: the group ends with it."""
        if not group.rollouts:
            return
        task, length = group.ticket.task, float(max(map(sampled_tokens, group.rollouts)))
        self._of_task[task] = length
        self._of_task.move_to_end(task)
        if len(self._of_task) > REMEMBERED_TASKS:
            self._of_task.popitem(last=False)
        mean, seen = self._of_environment.get(task.environment, (length, 0))
        weight = 1 / min(seen + 1, REMEMBERED_GROUPS)
        self._of_environment[task.environment] = (mean + weight * (length - mean), seen + 1)

    def expected(self, task: TaskRef) -> float:
        """Sampled tokens of the longest rollout of the next group of a task; 0 where nothing is known."""
        return self._of_task.get(task, self._of_environment.get(task.environment, (0.0, 0))[0])

    def longest_first(self, tickets: Iterable[GroupTicket]) -> list[GroupTicket]:
        """The tickets by the step that they are for, within a step the longest first, else as they came."""
        return sorted(tickets, key=lambda ticket: (ticket.for_step, -self.expected(ticket.task)))
