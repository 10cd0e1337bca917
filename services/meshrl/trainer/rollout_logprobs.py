"""Picks the trainer's own logprobs of single rollouts out of a step's record, for rollouts that the orchestrator keeps.

Called by the loop of rank 0 after a step; they are sent with its DONE event. The record is made for the metrics anyway,
so a step of which no logprobs are asked for costs nothing more.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from meshrl.wire.types import Batch

MAX_BYTES = 2**20
"""Of the logprobs of one event; what does not fit is left out, and shorter rollouts after it may follow."""


def rollout_logprobs(batch: Batch, logprobs_N: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """The logprobs of each rollout that the batch asks for and that has a token of the rl term.

    `logprobs_N` are those of the N tokens of loss_mask of the whole batch, rank after rank and row after row, as rank 0
    gathers them. The answer has them in the order of the batch's rows.
    """
    if not batch.logprob_rollouts:
        return {}
    wanted = set(batch.logprob_rollouts)
    found: defaultdict[str, list[tuple[int, int, NDArray[np.float32]]]] = defaultdict(list)
    start = 0
    for place, row in sorted(enumerate(batch.micro_batches), key=lambda one: (one[1].dp_rank, one[0])):
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
