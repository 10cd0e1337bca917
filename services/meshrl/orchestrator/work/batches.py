"""Turns the groups that a step took into its batch: advantages, then rows of tokens; drained by the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshrl.algorithms.advantages import Advantage
from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.orchestrator.work.screening import ReadyGroup, by_agent
from meshrl.orchestrator.work.tally import StepTally
from meshrl.wire.types import Batch, Rollout


@dataclass(frozen=True, kw_only=True, eq=False)
class AssembledBatch:
    """A batch and what became of the rollouts in it. `advantages` is by rollout_id."""

    batch: Batch
    advantages: Mapping[str, float]
    untrainable: frozenset[str]
    truncated_samples: int
    dropped_samples: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SubmittedStep:
    """A step that the trainer has, with what its record needs."""

    step: int
    groups: tuple[ReadyGroup, ...]
    assembled: AssembledBatch
    tally: StepTally

    @property
    def lost(self) -> tuple[str, ...]:
        """Rollouts that are in the batch, and of which nothing else is kept: their payload in the ledger is damaged."""
        known = {rollout.rollout_id for ready in self.groups for rollout in ready.kept} | self.assembled.untrainable
        return tuple(rollout_id for rollout_id in self.assembled.advantages if rollout_id not in known)


def assemble(
    groups: Sequence[Sequence[Rollout]],
    *,
    run_id: str,
    step: int,
    advantage: Advantage,
    environments: Mapping[str, int],
    seq_len: int,
    dp_size: int,
    min_shared_prefix: float | None = None,
    traceparent: str = "",
) -> AssembledBatch:
    """Packs whole groups into micro-batches of at most `seq_len` tokens, their number a multiple of `dp_size`.

    `environments` has the most tokens of one sample of each environment, at most `seq_len`, and `min_shared_prefix` is
    what the trainer says (TrainerInfo). Raises ValueError when no sample has a loss token within
    its length.
    """
    advantages = {
        rollout_id: value for group in groups for rollout_id, value in group_advantages(group, advantage).items()
    }
    env_index = {name: index for index, name in enumerate(environments)}
    samples = [
        TrainSample(
            token_ids=sample.token_ids[: environments[rollout.environment]],
            loss_mask=sample.loss_mask[: environments[rollout.environment]],
            logprobs=sample.logprobs[: environments[rollout.environment]],
            advantage=advantages[rollout.rollout_id],
            temperature=sample.temperature,
            env_index=env_index[rollout.environment],
            rollout_id=rollout.rollout_id,
            traceparent=rollout.traceparent,
            group=str(index),
        )
        for index, group in enumerate(groups)
        for rollout in group
        for sample in rollout.samples
    ]
    packing = pack_samples(samples, seq_len=seq_len, dp_size=dp_size, min_shared_prefix=min_shared_prefix)
    packed = {rollout_id for row in packing.micro_batches for rollout_id in row.rollout_ids}
    return AssembledBatch(
        batch=Batch(
            run_id=run_id,
            step=step,
            micro_batches=packing.micro_batches,
            loss_tokens=packing.loss_tokens,
            environments=tuple(environments),
            traceparent=traceparent,
        ),
        advantages=advantages,
        untrainable=frozenset(advantages) - packed,
        truncated_samples=sum(
            len(sample.token_ids) > environments[rollout.environment]
            for group in groups
            for rollout in group
            for sample in rollout.samples
            if sample.loss_mask[1 : environments[rollout.environment]].any()
        ),
        dropped_samples=packing.dropped_samples,
    )


def group_advantages(rollouts: Sequence[Rollout], advantage: Advantage) -> dict[str, float]:
    """Advantage of each rollout relative to those of the same agent in its group, by rollout_id."""
    result: dict[str, float] = {}
    for members in by_agent(rollouts).values():
        values = advantage(
            [rollout.reward for rollout in members], [max(1, sampled_tokens(rollout)) for rollout in members]
        )
        result |= {rollout.rollout_id: float(value) for rollout, value in zip(members, values, strict=True)}
    return result


def sampled_tokens(rollout: Rollout) -> int:
    """Tokens that the policy sampled."""
    return int(sum(np.count_nonzero(sample.loss_mask) for sample in rollout.samples))
