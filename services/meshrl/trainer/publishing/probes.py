"""The probe of a version: a fixed prompt, and its logprobs under the weights that are captured for the version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from meshrl.training.learner import Learner
from meshrl.training.run_state import RunState
from meshrl.wire.types import MicroBatch, VersionProbe

SEED = 0


def prober(learner: Learner, run: RunState, num_tokens: int) -> Callable[[], VersionProbe] | None:
    """A collective that makes the run's probe of `num_tokens`, right on rank 0; None where that is 0.

    The prompt is drawn from the whole vocabulary, so that it needs no tokenizer and meets many rows and experts.
    """
    if num_tokens < 2:
        return None
    vocab_size = int(learner.model.config.get_text_config().vocab_size)
    token_ids = np.random.default_rng(SEED).integers(vocab_size, size=num_tokens, dtype=np.int32)
    rows = [_row(rank, token_ids) for rank in range(learner.parallel.plan.dp_size)]

    def probe() -> VersionProbe:
        with torch.compiler.set_stance("force_eager"):  # a row of this length is not worth kernels of its own
            logprobs = learner.evaluate(run, rows).logprobs[: num_tokens - 1]
        return VersionProbe(token_ids=tuple(token_ids.tolist()), logprobs=tuple(logprobs.tolist()))

    return probe


def _row(dp_rank: int, token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> MicroBatch:
    num_tokens = len(token_ids)
    zeros = np.zeros(num_tokens, np.float32)
    return MicroBatch(
        dp_rank=dp_rank,
        token_ids=token_ids,
        position_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=np.arange(num_tokens) > 0,
        advantages=zeros,
        inference_logprobs=zeros,
        sample_offsets=np.array([0, num_tokens]),
        temperatures=np.ones(1, np.float32),
        env_index=np.zeros(1, np.int32),
        rollout_ids=("probe",),
    )
