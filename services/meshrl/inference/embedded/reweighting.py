"""Applies logit_bias and penalties to the logits of the rows that ask for them, before the sampler.

In vLLM's order and by its formulas, so that both engines sample alike. Shapes: R rows, V tokens of the vocabulary, U
different tokens of one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.inference.embedded.slots import SlotTable
from meshrl.inference.engine import SamplingParams


def reweight(logits_RV: torch.Tensor, table: SlotTable, slots: Sequence[int]) -> torch.Tensor:
    """A copy of the logits in float32 with those of the decoding rows in `slots` reweighted as each row asks."""
    reweighted_RV = logits_RV.to(torch.float32, copy=True)
    for slot in slots:
        params = table.rows[slot].request.sampling
        logits_V = reweighted_RV[slot]
        if params.logit_bias:
            ids_U = torch.tensor(list(params.logit_bias), device=logits_V.device)
            logits_V[ids_U] += torch.tensor(list(params.logit_bias.values()), device=logits_V.device)
        if params.penalised:
            _penalise(logits_V, params, *table.sequence(slot))
    return reweighted_RV


def _penalise(
    logits_V: torch.Tensor, params: SamplingParams, prompt: NDArray[np.int32], made: NDArray[np.int32]
) -> None:
    """In place. Repetition counts prompt and completion (arXiv 1909.05858), the two others the completion alone."""
    if params.repetition_penalty != 1.0:
        seen_U = torch.from_numpy(np.union1d(prompt, made).astype(np.int64)).to(logits_V.device)
        values_U = logits_V[seen_U]
        logits_V[seen_U] = torch.where(
            values_U > 0, values_U / params.repetition_penalty, values_U * params.repetition_penalty
        )
    made_U, counts_U = np.unique(made, return_counts=True)
    ids_U = torch.from_numpy(made_U.astype(np.int64)).to(logits_V.device)
    times_U = torch.from_numpy(counts_U.astype(np.float32)).to(logits_V.device)
    logits_V[ids_U] -= params.frequency_penalty * times_U + params.presence_penalty
