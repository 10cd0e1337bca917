"""Which rollouts are to be played."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshrl.sampling.groups import rollout_seed
from meshrl.sampling.retry import RunError

TrialKey = tuple[str, str, int, int]
"""Checkpoint, environment, task, and number among the task's rollouts."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    environment: str
    task: int
    number: int
    seed: int

    def key(self, checkpoint: str) -> TrialKey:
        return (checkpoint, self.environment, self.task, self.number)


@dataclass(frozen=True, kw_only=True)
class TaskSpan:
    """The first `tasks` tasks of an environment, `group_size` rollouts each."""

    environment: str
    tasks: int
    group_size: int

    @property
    def rollouts(self) -> int:
        return self.tasks * self.group_size


def task_span(environment: str, *, wanted: int, there: int | None, group_size: int) -> TaskSpan:
    """The first `wanted` of `there` tasks; -1 takes all. Raises RunError where they never run out (None)."""
    if there is None and wanted < 0:
        raise RunError(f"{environment} never runs out of tasks; say how many to play (--num-examples 100)")
    tasks = wanted if there is None else there if wanted < 0 else min(wanted, there)
    return TaskSpan(environment=environment, tasks=tasks, group_size=group_size)


def plan_trials(spans: Sequence[TaskSpan], *, seed: int, checkpoint: str, done: Collection[TrialKey]) -> list[Trial]:
    """The trials of one checkpoint that are not done, environments evenly mixed. Seeds are those of the evaluations of
    a run with this seed."""
    placed: list[tuple[float, Trial]] = []
    for span in spans:
        for place in range(span.rollouts):
            task, number = divmod(place, span.group_size)
            trial = Trial(environment=span.environment, task=task, number=number, seed=rollout_seed(seed, place))
            if trial.key(checkpoint) not in done:
                placed.append((place / span.rollouts, trial))
    return [trial for _, trial in sorted(placed, key=lambda pair: pair[0])]


def differing_settings(kept: Mapping[str, object], now: Mapping[str, object], prefix: str = "") -> list[str]:
    """The settings that differ, as `key was X and is Y`. New keys do not."""
    problems: list[str] = []
    for key, was in kept.items():
        name, new = f"{prefix}{key}", now.get(key)
        if isinstance(was, Mapping) and isinstance(new, Mapping):
            problems += differing_settings(was, new, f"{name}.")
        elif new != was and not (prefix == "env." and new is None):  # an environment may be left out
            problems.append(f"{name} was {was!r} and is {new!r}")
    return problems
