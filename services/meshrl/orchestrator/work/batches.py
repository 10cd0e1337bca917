"""Turns the groups that a step took into its batch: what each sample trains, in rows.

When the trainer refuses a batch, `BatchMaker.at_fault` names the rollouts that the loop drops; the others go into new
batches.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import numpy as np

from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.algorithms.recipes.base import Recipe, SampleStreams, Scores, Streams
from meshrl.algorithms.recipes.custom import check_streams
from meshrl.orchestrator.teachers.scorer import RolloutScorer
from meshrl.orchestrator.work.screening import StepTally
from meshrl.sampling.groups import RolloutGroup
from meshrl.sampling.retry import RunError
from meshrl.wire.errors import MeshError
from meshrl.wire.trainable import rollout_problems
from meshrl.wire.types import Batch, Rollout, Sample, TrainerInfo

_ROW = re.compile(r"micro_batches\[(\d+)\]")

AlgorithmState = Mapping[str, Mapping[str, float]]
"""What algorithms remember from step to step, by environment."""


class BatchMaker:
    """Makes the batches of one run for one trainer, by each environment's algorithm."""

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        scorer: RolloutScorer,
        trainer: TrainerInfo,
        *,
        run_id: str,
        seq_len: int,
        environments: Mapping[str, int],
    ) -> None:
        """Rows have at most `seq_len` tokens, and samples as many as `environments` has for theirs."""
        self._recipes = recipes
        self._scorer = scorer
        self._trainer = trainer
        self._run_id = run_id
        self._seq_len = seq_len
        self._environments = environments

    async def begin(self, state: AlgorithmState) -> None:
        """Goes on from the algorithms' `state`. Raises RunError when a model that is to score cannot."""
        await self._scorer.check()
        self.restore(state)

    async def close(self) -> None:
        await self._scorer.close()

    def restore(self, state: AlgorithmState) -> None:
        """Goes back to an earlier state of the algorithms; environments may be gone."""
        for name, recipe in self._recipes.items():
            recipe.restore(state.get(name, {}))

    async def make(self, step: int, groups: Sequence[Sequence[Rollout]], *, traceparent: str) -> AssembledBatch:
        """Raises RunError when no batch can be made."""
        scores = await self._scorer.score(groups)
        return await asyncio.to_thread(self._assemble, step, groups, scores, traceparent)

    def _assemble(
        self, step: int, groups: Sequence[Sequence[Rollout]], scores: Scores, traceparent: str
    ) -> AssembledBatch:
        streams = self._streams(groups, scores)
        try:
            assembled = assemble(
                groups,
                run_id=self._run_id,
                step=step,
                streams=streams,
                environments=self._environments,
                seq_len=self._seq_len,
                dp_size=self._trainer.dp_size,
                min_shared_prefix=self._trainer.min_shared_prefix,
                traceparent=traceparent,
            )
        except ValueError as error:  # no rollout fits: a shorter prompt or a longer row is needed
            raise RunError(f"step {step} has nothing to train on: {error}; raise orchestrator.seq_len") from error
        states = {name: dict(recipe.state()) for name, recipe in self._recipes.items()}
        return replace(assembled, algorithms={name: state for name, state in states.items() if state})

    def _streams(self, groups: Sequence[Sequence[Rollout]], scores: Scores) -> dict[str, tuple[SampleStreams, ...]]:
        made: dict[str, tuple[SampleStreams, ...]] = {}
        for group in groups:
            environment = group[0].environment
            try:
                streams = self._recipes[environment].streams(group, scores)
                check_streams(group, streams)
            except ValueError as error:
                raise RunError(f"the algorithm of environment {environment!r}: {error}") from error
            made |= {rollout.rollout_id: tuple(streams[rollout.rollout_id]) for rollout in group}
        return made

    def at_fault(self, error: MeshError, submitted: SubmittedStep) -> frozenset[str]:
        """Ids of the rollouts to leave out after the trainer's `error`: those that break a known rule, else all in the
        rows that the error names, else all of the batch. Empty when the refusal is about the batch as a whole, its
        header for example."""
        assembled, vocab_size = submitted.assembled, self._trainer.vocab_size or None
        rollouts = [rollout for group in submitted.groups for rollout in group.kept]
        found = {rollout.rollout_id for rollout in rollouts if rollout_problems(rollout, vocab_size=vocab_size)}
        with np.errstate(over="ignore"):  # too large for the batch's float32 is what is looked for
            found |= {one for one, value in assembled.advantages.items() if not np.isfinite(np.float32(value))}
        if found:
            return frozenset(found)
        if not error.violations:
            return frozenset(rollout.rollout_id for rollout in rollouts)
        rows = [int(named[1]) for violation in error.violations if (named := _ROW.match(violation.field))]
        micro_batches = assembled.batch.micro_batches
        return frozenset(one for row in rows if row < len(micro_batches) for one in micro_batches[row].rollout_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class AssembledBatch:
    """A batch of a multiple of `dp_size` rows, and the outcome of its rollouts. `advantages` is by rollout id, 0
    without a token of the rl term; `algorithms` is their state after it."""

    batch: Batch
    advantages: Mapping[str, float]
    untrainable: frozenset[str]
    truncated_samples: int
    dropped_samples: int
    dp_size: int
    algorithms: AlgorithmState = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class SubmittedStep:
    step: int
    groups: tuple[RolloutGroup, ...]
    assembled: AssembledBatch
    tally: StepTally

    @property
    def judged(self) -> list[RolloutGroup]:
        """Its groups, and those discarded on the way."""
        return [*self.groups, *self.tally.discarded]

    @property
    def lost(self) -> tuple[str, ...]:
        """Rollouts of the batch whose payload in the ledger is damaged."""
        known = {rollout.rollout_id for group in self.groups for rollout in group.kept} | self.assembled.untrainable
        return tuple(rollout_id for rollout_id in self.assembled.advantages if rollout_id not in known)


def assemble(
    groups: Sequence[Sequence[Rollout]],
    *,
    run_id: str,
    step: int,
    streams: Streams,
    environments: Mapping[str, int],
    seq_len: int,
    dp_size: int,
    min_shared_prefix: float | None = None,
    traceparent: str = "",
) -> AssembledBatch:
    """Packs whole groups into rows of at most `seq_len` tokens, their number a multiple of `dp_size`. `environments`
    has the most tokens of a sample, `min_shared_prefix` is the trainer's. Raises ValueError when no sample has a token
    to train on within its length."""
    env_index = {name: index for index, name in enumerate(environments)}
    samples = [
        _train_sample(
            rollout, sample, trains, room=environments[rollout.environment], env_index=env_index, group=str(index)
        )
        for index, group in enumerate(groups)
        for rollout in group
        for sample, trains in zip(rollout.samples, streams[rollout.rollout_id], strict=True)
    ]
    packing = pack_samples(samples, seq_len=seq_len, dp_size=dp_size, min_shared_prefix=min_shared_prefix)
    packed = {rollout_id for row in packing.micro_batches for rollout_id in row.rollout_ids}
    advantages = {
        rollout.rollout_id: next((one.advantage for one in streams[rollout.rollout_id] if one.advantage), 0.0)
        for group in groups
        for rollout in group
    }
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
        dp_size=dp_size,
    )


def _train_sample(
    rollout: Rollout, sample: Sample, streams: SampleStreams, *, room: int, env_index: Mapping[str, int], group: str
) -> TrainSample:
    """Without an advantage none of its tokens is of the rl term."""
    whole = TrainSample(
        token_ids=sample.token_ids,
        loss_mask=np.zeros_like(sample.loss_mask) if streams.advantage is None else sample.loss_mask,
        logprobs=sample.logprobs,
        advantage=streams.advantage or 0.0,
        temperature=sample.temperature,
        env_index=env_index[rollout.environment],
        rollout_id=rollout.rollout_id,
        traceparent=rollout.traceparent,
        ce_weights=streams.ce_weights,
        ref_kl_weights=streams.ref_kl_weights,
        ref_logprobs=streams.ref_logprobs,
        ref_top_ids=streams.ref_top_ids,
        ref_top_logprobs=streams.ref_top_logprobs,
        routed_experts=sample.routed_experts,
        group=group,
    )
    return whole.part(0, room)


def split_groups(submitted: SubmittedStep, bad: AbstractSet[str]) -> Iterator[tuple[RolloutGroup, list[Rollout]]]:
    for group in submitted.groups:
        batched = [one for one in group.kept if one.rollout_id not in submitted.assembled.untrainable]
        kept = tuple(one for one in batched if one.rollout_id not in bad)
        yield replace(group, kept=kept), [one for one in batched if one.rollout_id in bad]
