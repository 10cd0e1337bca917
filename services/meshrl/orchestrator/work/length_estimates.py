"""Estimates how long groups will be, so that the dispatcher can start the longest first; learns from each that ends.

A batch waits for its last rollouts, so those that are expected to be long are started first. This changes only the
order in which the groups of one step are sent, not which tasks are drawn nor for which step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from meshrl.algorithms.recipes.base import sampled_tokens
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef

REMEMBERED_TASKS = 65_536
REMEMBERED_GROUPS = 32
"""Each group moves the mean of its environment by one part in so many."""


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
