"""A group of rollouts of one task, from its ticket to its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshrl.core.metrics.statistics import distribution
from meshrl.wire.types import Rollout, RolloutFailure

RESEED = 2**31
"""Between the seeds of a group and of its completion: the same ones would sample the same rollouts."""

MOVED = 2**30
"""The same for rollouts sampled again because their service was lost."""


def rollout_seed(seed: int, place: int) -> int:
    """By the rollout's place among those of an environment or of the run."""
    return ((seed % 2**31) << 32) + place


@dataclass(frozen=True, kw_only=True)
class TaskRef:
    environment: str
    index: int


@dataclass(frozen=True, kw_only=True)
class GroupTicket:
    """Leave to sample one group: its task, the step it was admitted for, the oldest version that may answer."""

    group_id: str
    task: TaskRef
    size: int
    for_step: int
    min_version: int
    active_version: int
    seed: int | None
    """Of its first rollout, one more for each after it; None leaves the draw to the engines."""
    sequence: int = 0
    """Its place in the order of tasks, which it keeps when it is dispatched again."""
    replaces: str = ""
    """The group of an earlier process that it completes."""

    def for_missing(self, missing: int, *, reseeds: int = 0, moves: int = 0) -> GroupTicket:
        """The same task for the missing rollouts, `moves` of them lost with their services; with neither number the
        seeds are the same again."""
        seed = None if self.seed is None else (self.seed + reseeds * RESEED + moves * MOVED) % 2**63
        return replace(self, size=missing, seed=seed)


@dataclass(kw_only=True)
class RolloutGroup:
    """Over once each rollout finished, failed or was cancelled, or its stream broke. The plan of work chooses those
    that are `kept`."""

    ticket: GroupTicket
    rollouts: list[Rollout] = field(default_factory=list)
    failures: list[RolloutFailure] = field(default_factory=list)
    kept: tuple[Rollout, ...] = ()
    cancelled: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    cut_short: str = ""  # reason of the error that ended the stream early
    carried: int = 0  # rollouts that came back in an earlier process, beside those of the ticket

    @property
    def lost(self) -> int:
        return max(0, self.ticket.size + self.carried - len(self.rollouts) - len(self.failures) - self.cancelled)

    @property
    def episodes(self) -> int:
        """Finished ones: an episode has a rollout of each agent."""
        return max(Counter(rollout.agent for rollout in self.rollouts).values(), default=0)

    @property
    def errors(self) -> int:
        return len(self.failures) + self.lost

    def carry(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts[:0] = rollouts
        self.carried += len(rollouts)


def eval_metrics(name: str, groups: Sequence[RolloutGroup], *, k: int, pass_threshold: float) -> dict[str, float]:
    """`eval/{name}/avg@k` is the mean reward, `pass@k` the share of tasks with a reward of at least `pass_threshold`,
    both over the `scored` rollouts of those `asked` for. `failed` is the share of unfinished rollouts."""
    answered = [group for group in groups if group.rollouts]
    rollouts = [rollout for group in answered for rollout in group.rollouts]
    asked = sum(group.ticket.size for group in groups)
    metrics = {
        f"eval/{name}/failed": sum(group.errors for group in groups) / asked if asked else 0.0,
        f"eval/{name}/scored": float(len(rollouts)),
        f"eval/{name}/asked": float(asked),
    }
    if answered:
        metrics[f"eval/{name}/avg@{k}"] = sum(rollout.reward for rollout in rollouts) / len(rollouts)
        metrics[f"eval/{name}/pass@{k}"] = sum(
            any(rollout.reward >= pass_threshold for rollout in group.rollouts) for group in answered
        ) / len(answered)
    metrics |= distribution(f"eval/{name}/reward", [rollout.reward for rollout in rollouts], "std max min")
    metrics |= distribution(f"eval/{name}/seq_len", [rollout.num_tokens for rollout in rollouts], "mean")
    metrics |= distribution(f"eval/{name}/is_truncated", [rollout.truncated for rollout in rollouts], "mean")
    versions = [rollout.oldest_version for rollout in rollouts if rollout.oldest_version is not None]
    return metrics | distribution(f"eval/{name}/version", versions, "min max")
