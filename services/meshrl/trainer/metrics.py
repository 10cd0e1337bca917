"""Computes what a step's DONE event has: metrics, and the logprobs of single rollouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshrl.training.learner import StepResult
from meshrl.training.step_metrics import common_metrics, mean
from meshrl.wire.types import Batch

MAX_BYTES = 2**20
"""Of the logprobs of one event. Rollouts that do not fit are left out."""


def step_metrics(result: StepResult, environments: Sequence[str]) -> dict[str, float]:
    """Loss, policy and optimizer metrics of a step.

    `mismatch_kl` is r - log r - 1 (http://joschu.net/blog/kl-approx.html) of each loss token, with log r = trainer
    logprob - inference logprob: an unbiased, never negative estimate of KL(inference || trainer). `mismatch_abs` is
    |log r|. `loss/mean` is the whole objective; another `loss/<name>` is one of its terms, or a metric of the rl term.
    """
    tokens = result.tokens
    log_ratio = tokens.logprobs.astype(np.float64) - tokens.inference_logprobs
    with np.errstate(over="ignore"):  # a token that the sampler thought impossible counts as infinitely far off
        mismatch_kl = np.exp(log_ratio) - log_ratio - 1.0
    metrics = {f"loss/{name}": value for name, value in result.metrics.items()} | {
        **common_metrics(result),
        "masked_advantage_positive/mean": mean(tokens.masked & (tokens.advantages > 0)),
        "masked_advantage_negative/mean": mean(tokens.masked & (tokens.advantages < 0)),
    }
    selections: dict[str, NDArray[np.bool_]] = {
        name: tokens.env_index == index for index, name in enumerate(environments)
    }
    selections["all"] = np.ones(len(tokens.env_index), dtype=np.bool_)  # an environment of that name has no part here
    for name, of in selections.items():
        if not of.any():
            continue
        metrics[f"mismatch_kl/{name}/mean"] = mean(mismatch_kl[of])
        metrics[f"mismatch_kl/{name}/std"] = float(mismatch_kl[of].std())
        metrics[f"mismatch_kl/{name}/max"] = float(mismatch_kl[of].max())
        metrics[f"mismatch_abs/{name}/mean"] = mean(np.abs(log_ratio[of]))
        metrics[f"mismatch_abs/{name}/max"] = float(np.abs(log_ratio[of]).max())
        metrics[f"entropy/{name}/mean"] = mean(tokens.entropies[of])
    return metrics


def rollout_logprobs(
    batch: Batch, logprobs_N: NDArray[np.float32], passes: Sequence[Sequence[int]] | None = None
) -> dict[str, NDArray[np.float32]]:
    """Those of each rollout that the batch asks for, if it has loss tokens, in the order of the batch's rows.

    `logprobs_N` are those of the N loss tokens of the batch: pass after pass, in each rank after rank and row after
    row. `passes` None is one pass of all rows.
    """
    if not batch.logprob_rollouts:
        return {}
    wanted = set(batch.logprob_rollouts)
    found: defaultdict[str, list[tuple[int, int, NDArray[np.float32]]]] = defaultdict(list)
    start, rows = 0, batch.micro_batches
    ordered = [sorted(each, key=lambda place: (rows[place].dp_rank, place)) for each in passes or [range(len(rows))]]
    for place, row in ((place, rows[place]) for each in ordered for place in each):
        ends = start + np.cumsum(np.add.reduceat(row.loss_mask, row.sample_offsets[:-1], dtype=np.int64))
        for sample, (rollout_id, end) in enumerate(zip(row.rollout_ids, ends.tolist(), strict=True)):
            if rollout_id in wanted and end > start:
                found[rollout_id].append((place, sample, logprobs_N[start:end]))
            start = end
    room, fitting = MAX_BYTES, {}
    for rollout_id in dict.fromkeys(batch.logprob_rollouts):
        pieces = [piece for *_, piece in sorted(found[rollout_id], key=lambda one: one[:2])]
        size = sum(piece.nbytes for piece in pieces)
        if pieces and size <= room:
            room -= size
            fitting[rollout_id] = np.concatenate(pieces)
    return fitting
