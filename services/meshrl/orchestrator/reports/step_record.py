"""Turns the events since the last step into one record of metrics.

Names are `what/{all,env}/statistic`, declared in `core.metrics.names`. Reward, length and error statistics are over
every group judged for the step, so that a filter does not flatter them; `off_policy`, `advantage` and `batch` are over
what was trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshrl.algorithms.packing import shared_prefix_ratio
from meshrl.algorithms.recipes.base import sampled_tokens
from meshrl.core.metrics.catalogue import Source
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.metrics.statistics import distribution
from meshrl.orchestrator.work.batches import AssembledBatch, SubmittedStep
from meshrl.orchestrator.work.plan import StalenessLaw
from meshrl.orchestrator.work.screening import DropReason, RunTotals, is_empty
from meshrl.sampling.groups import RolloutGroup
from meshrl.wire.types import Activation, MicroBatch, Rollout, StepEvent

Metrics = dict[str, float]

OF_NO_STEP = frozenset(
    {
        DropReason.RUN_ENDED,
        DropReason.RESTARTED,
        DropReason.UNDONE,
        DropReason.DAMAGED,
        DropReason.REMOVED,
        DropReason.SUPERSEDED,
    }
)
"""Why rollouts are dropped between two processes or runs."""


def step_metrics(
    submitted: SubmittedStep, progress: RunTotals, *, law: StalenessLaw, seq_len: int, seconds: float
) -> Metrics:
    """`seconds` is the wall time since the step before ended."""
    groups, tally = submitted.groups, submitted.tally
    judged = submitted.judged
    return (
        rollout_metrics(judged)
        | staleness_metrics(groups, step=submitted.step, law=law)
        | batch_metrics(submitted.assembled, groups, seq_len=seq_len)
        | {f"dropped/{reason.value}": tally.dropped[reason.value] for reason in DropReason if reason not in OF_NO_STEP}
        | {
            "filters/zero_signal": tally.zero_signal_groups / max(1, len(judged)),
            "perf/rollouts_per_s": sum(len(group.rollouts) for group in judged) / max(seconds, 1e-9),
            "perf/inference_tokens_per_s": sum(group.sampled_tokens for group in judged) / max(seconds, 1e-9),
            "time/step": seconds,
            **tally.seconds,
            **tally.idle_shares,
            "progress/tokens": float(progress.tokens),
            "progress/samples": float(progress.samples),
            "progress/problems": float(progress.problems),
        }
    )


def merged(own: Mapping[str, float], trainer: Mapping[str, float]) -> Metrics:
    """One record. A name of the orchestrator's is entered as the trainer's (`trainer/progress/tokens`), so that no
    total of the run is overwritten."""

    def is_own(name: str) -> bool:
        metric = CATALOGUE.find(name)
        return metric is not None and Source.ORCHESTRATOR in metric.filled_by

    record = dict(own)
    for name, value in trainer.items():
        free = name
        while free in record or is_own(free):
            free = f"trainer/{free}"
        record[free] = value
    return record


def rollout_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    metrics: Metrics = {}
    environments = sorted({group.ticket.task.environment for group in groups})
    scopes = {"all": list(groups)} | {
        name: [group for group in groups if group.ticket.task.environment == name] for name in environments
    }
    for scope, members in scopes.items():
        rollouts = [rollout for group in members for rollout in group.rollouts]
        total = sum(group.ticket.size for group in members)
        metrics |= distribution(f"reward/{scope}", [rollout.reward for rollout in rollouts], "mean std max min")
        metrics |= distribution(f"seq_len/{scope}", [rollout.num_tokens for rollout in rollouts], "mean max min")
        metrics |= distribution(f"completion_len/{scope}", [sampled_tokens(r) for r in rollouts], "mean max min")
        metrics |= distribution(f"is_truncated/{scope}", [rollout.truncated for rollout in rollouts], "mean")
        metrics |= distribution(f"num_turns/{scope}", [rollout.num_turns for rollout in rollouts], "mean max")
        metrics |= distribution(f"time/group/{scope}", [group.seconds for group in members], "mean max")
        if rollouts:
            metrics[f"empty_rollouts/{scope}"] = sum(map(is_empty, rollouts)) / len(rollouts)
            metrics[f"repeated_completions/{scope}"] = _repeated(members) / len(rollouts)
        if total:
            metrics[f"errored_rollouts/{scope}"] = sum(group.errors for group in members) / total
    for name in environments:
        rollouts = [rollout for group in scopes[name] for rollout in group.rollouts]
        metrics |= _named_means(f"reward_parts/{name}", rollouts, lambda rollout: rollout.reward_parts)
        metrics |= _named_means(f"metrics/{name}", rollouts, lambda rollout: rollout.metrics)
    return metrics


def _repeated(groups: Sequence[RolloutGroup]) -> int:
    """Rollouts whose sampled tokens are those of another task's."""
    tasks: dict[bytes, set[str]] = {}
    rollouts: Counter[bytes] = Counter()
    for group in groups:
        for rollout in group.rollouts:
            said = b"".join(sample.token_ids[sample.loss_mask].tobytes() for sample in rollout.samples)
            tasks.setdefault(said, set()).add(rollout.task_key)
            rollouts[said] += 1
    return sum(count for said, count in rollouts.items() if said and len(tasks[said]) > 1)


def staleness_metrics(groups: Sequence[RolloutGroup], *, step: int, law: StalenessLaw) -> Metrics:
    """Versions between the trained policy and the oldest one in each rollout."""
    ages = [
        law.staleness(step=step, oldest_version=oldest)
        for group in groups
        for rollout in group.kept
        if (oldest := rollout.oldest_version) is not None
    ]
    return distribution("off_policy/all", ages, "mean max min")


def batch_metrics(assembled: AssembledBatch, groups: Sequence[RolloutGroup], *, seq_len: int) -> Metrics:
    batch = assembled.batch
    tokens = sum(len(row.token_ids) for row in batch.micro_batches)
    return {
        "batch/groups": len(groups),
        "batch/rollouts": len(assembled.advantages) - len(assembled.untrainable),
        "batch/micro_batches": len(batch.micro_batches),
        "batch/tokens": tokens,
        "batch/loss_tokens": batch.loss_tokens,
        "batch/packing_efficiency": tokens / (len(batch.micro_batches) * seq_len),
        "batch/shared_prefix_ratio": shared_prefix_ratio(batch.micro_batches),
        "batch/truncated_samples": assembled.truncated_samples,
        "batch/dropped_samples": assembled.dropped_samples,
    } | distribution("advantage/all", list(assembled.advantages.values()), "mean std max min")


def mixture_metrics(assembled: AssembledBatch, groups: Sequence[RolloutGroup], asked: Mapping[str, float]) -> Metrics:
    """Each environment's share of a batch, beside the share `asked` of it: filters, losses and slow environments move a
    mixture silently."""
    trained = [rollout for group in groups for rollout in group.kept if rollout.rollout_id not in assembled.untrainable]
    rollouts = Counter(rollout.environment for rollout in trained)
    tokens: Counter[str] = Counter()
    for row in assembled.batch.micro_batches:
        for index, start, end in zip(row.env_index, row.sample_offsets[:-1], row.sample_offsets[1:], strict=True):
            tokens[assembled.batch.environments[index]] += int(np.count_nonzero(trained_tokens(row)[start:end]))
    metrics: Metrics = {}
    for name, share in asked.items():
        metrics[f"mixture/{name}/ratio"] = share
        metrics[f"mixture/{name}/rollouts"] = rollouts[name] / max(1, rollouts.total())
        metrics[f"mixture/{name}/tokens"] = tokens[name] / max(1, tokens.total())
    return metrics


def trained_tokens(row: MicroBatch) -> NDArray[np.bool_]:
    """(T,) the tokens of some term."""
    trained = row.loss_mask.copy()
    for weights in (row.ce_weights, row.ref_kl_weights):
        if weights is not None:
            trained |= weights != 0
    return trained


def trainer_metrics(event: StepEvent) -> Metrics:
    """Under their own names; its whole step is `time/train_step`."""
    times = {
        f"time/{'train_step' if stage == 'step' else stage}": seconds for stage, seconds in event.timings_s.items()
    }
    return times | {name: value for name, value in event.metrics.items() if name != "time/step"}


def activation_metrics(activation: Activation | None, *, skipped: bool = False) -> Metrics:
    """None: engines kept the old weights. `skipped`: a later version is there."""
    if activation is None:
        return {"weights/activated": 0.0} | ({"weights/skipped": 1.0} if skipped else {})
    applied = [report.applied for report in activation.engines]
    metrics: Metrics = {
        "weights/activated": 1.0,
        "weights/engines": len(applied),
        "weights/commit_s": activation.commit_s,
        "weights/lag_s": activation.lag_s,
        "weights/bytes": activation.version.num_bytes,
    }
    if applied:
        metrics["weights/pause_s"] = max(report.pause_s for report in applied)
        metrics["weights/prepare_s"] = max(report.prepare_s for report in applied)
        metrics["weights/requests_kept"] = sum(report.requests_kept for report in applied)
    errors = [report.probe_error for report in applied if report.probe_error is not None]
    if errors:
        metrics["weights/probe_error"] = max(errors)
    return metrics


def _named_means(
    prefix: str, rollouts: Sequence[Rollout], values_of: Callable[[Rollout], Mapping[str, float]]
) -> Metrics:
    names = sorted({name for rollout in rollouts for name in values_of(rollout)})
    metrics: Metrics = {}
    for name in names:
        values = [values_of(rollout)[name] for rollout in rollouts if name in values_of(rollout)]
        metrics |= distribution(f"{prefix}/{name}", values, "mean")
    return metrics
