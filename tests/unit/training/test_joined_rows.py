"""Rows that go through the model together: the same samples, the same losses and gradients, in fewer passes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from loss_curves import stream_batch
from meshrl.algorithms.losses import gspo_loss
from meshrl.algorithms.objective import Objective
from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.models.load import load_model
from meshrl.models.logprobs import PackedPolicy
from meshrl.training.config import OptimConfig
from meshrl.training.joined_rows import join_rows
from meshrl.training.learner import Learner
from meshrl.training.model_config import TrainerModelConfig
from meshrl.wire.types import MicroBatch
from tiny_qwen3 import SHAPE, save_tiny_qwen3
from trained import Trained

VOCAB = SHAPE["vocab_size"]


def sizes(rows: Sequence[MicroBatch]) -> list[tuple[int, int]]:
    return [(row.dp_rank, len(row.token_ids)) for row in rows]


def samples_of(rows: Sequence[MicroBatch]) -> list[list[float]]:
    """What each sample has, prefixes as tokens of the sample that has them."""
    found = []
    for row in rows:
        for number, (start, end) in enumerate(zip(row.sample_offsets[:-1], row.sample_offsets[1:], strict=True)):
            before: list[float] = []
            if row.prefix_tokens is not None and row.prefix_samples is not None and row.prefix_tokens[number]:
                first = row.sample_offsets[row.prefix_samples[number]]
                before = row.token_ids[first : first + row.prefix_tokens[number]].tolist()
            found.append([*before, *row.token_ids[start:end], *row.position_ids[start:end], *row.advantages[start:end]])
    return found


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_as_many_rows_are_joined_as_fit_alike_for_each_rank(dp_size: int, share: bool) -> None:
    rows = stream_batch(0, dp_size=dp_size, vocab_size=VOCAB, prompt=12, share=share)
    joined = join_rows(rows, max_tokens=200)
    assert len(joined) < len(rows)
    assert all(tokens <= 200 for _, tokens in sizes(joined))
    assert len({sum(row.dp_rank == rank for row in joined) for rank in range(dp_size)}) == 1
    for rank in range(dp_size):
        own, before = ([row for row in each if row.dp_rank == rank] for each in (joined, rows))
        assert samples_of(own) == samples_of(before)
    for limit in (None, 1):
        assert sorted(sizes(join_rows(rows, max_tokens=limit))) == sorted(sizes(rows))


def test_rows_with_other_quantities_stay_apart() -> None:
    def sample(weighted: bool) -> TrainSample:
        return TrainSample(
            token_ids=np.arange(6, dtype=np.int32),
            loss_mask=np.arange(6) > 0,
            logprobs=np.zeros(6, np.float32),
            ce_weights=np.full(6, 0.5, np.float32) if weighted else None,
        )

    rows = [pack_samples([sample(weighted)], seq_len=6).micro_batches[0] for weighted in (False, True, True, False)]
    assert [len(row.token_ids) for row in join_rows(rows, max_tokens=100)] == [6, 12, 6]


@pytest.mark.parametrize("share", [False, True])
def test_joined_rows_train_as_they_do_one_by_one(tmp_path: Path, share: bool) -> None:
    """With a loss over whole sequences."""
    name = save_tiny_qwen3(tmp_path, num_hidden_layers=2)
    curves = []
    for pass_tokens in (None, 200):
        policy = PackedPolicy(load_model(TrainerModelConfig(name=name, device="cpu")))
        trained = Trained.by(
            Learner(policy, pass_tokens=pass_tokens),
            Objective(loss=partial(gspo_loss, clip_low=0.2, clip_high=0.2)),
            OptimConfig(lr=1e-2),
        )
        steps = [
            trained.step(stream_batch(step, dp_size=1, vocab_size=VOCAB, prompt=12, share=share)) for step in range(3)
        ]
        curves.append([(step.loss, step.grad_norm, *step.tokens.logprobs.tolist()) for step in steps])
    for apart, together in zip(*curves, strict=True):
        assert together == pytest.approx(apart, rel=1e-4, abs=1e-5)
