"""The result of an evaluation: scores of groups of rollouts in one environment; read by the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.core.metrics.statistics import distribution
from meshrl.sampling.groups import RolloutGroup


def eval_metrics(name: str, groups: Sequence[RolloutGroup], *, k: int, pass_threshold: float) -> dict[str, float]:
    """`eval/{name}/avg@k` is the mean reward; `pass@k` the share of tasks with a reward of at least `pass_threshold`.

    Both are over the `scored` rollouts of those `asked` for: a task without one counts for neither. `failed` is the
    share of rollouts that did not finish.
    """
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
