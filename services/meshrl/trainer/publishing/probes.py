"""The probe of a version: a fixed prompt, and its logprobs under the weights that are captured for the version."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from meshrl.models.logprobs import PackedRow
from meshrl.training.learner import Learner, to_row
from meshrl.training.run_state import RunState
from meshrl.wire.types import MicroBatch, VersionProbe

SEED = 0

PendingProbe = Callable[[], VersionProbe]
"""Waits until the device has scored the prompt; for any thread."""


def prober(learner: Learner, run: RunState, num_tokens: int) -> Callable[[], PendingProbe] | None:
    """Begins a probe of `num_tokens` under the weights of the moment; collective. None for fewer than 2 tokens.

    The prompt is random, so that it needs no tokenizer and meets many rows and experts.
    """
    if num_tokens < 2:
        return None
    vocab_size = int(learner.model.config.get_text_config().vocab_size)
    token_ids = np.random.default_rng(SEED).integers(vocab_size, size=num_tokens, dtype=np.int32)

    @cache
    def row() -> PackedRow:
        return to_row(_micro_batch(token_ids), learner.device, learner.policy.kernels)

    def begin() -> PendingProbe:
        with torch.compiler.set_stance("force_eager"):  # a row of this length is not worth kernels of its own
            logprobs = learner.score(run, row())
        if logprobs.device.type != "cuda":
            return lambda: _probe(token_ids, logprobs)
        # The training thread does not wait for the device: it would stand still between two steps.
        on_host = torch.empty(logprobs.shape, pin_memory=True)
        on_host.copy_(logprobs, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
        done.record(torch.cuda.current_stream(logprobs.device))

        def finish() -> VersionProbe:
            done.synchronize()
            return _probe(token_ids, on_host)

        return finish

    return begin


def _probe(token_ids: np.ndarray[tuple[int], np.dtype[np.int32]], logprobs: torch.Tensor) -> VersionProbe:
    return VersionProbe(token_ids=tuple(token_ids.tolist()), logprobs=tuple(logprobs.tolist()))


def _micro_batch(token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> MicroBatch:
    num_tokens = len(token_ids)
    zeros = np.zeros(num_tokens, np.float32)
    return MicroBatch(
        dp_rank=0,
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
