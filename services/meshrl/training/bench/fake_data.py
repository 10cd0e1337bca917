"""Made-up batches of a given shape, for benchmarks: every token but a sample's first is trained."""

from __future__ import annotations

import numpy as np

from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.training.bench.config import BenchConfig
from meshrl.wire.types import MicroBatch, RoutedShape
from meshrl.wire.types.routes import Routes, narrowed


def fake_batch(
    config: BenchConfig, *, seq_len: int, vocab_size: int, dp_size: int, seed: int, balanced: RoutedShape | None = None
) -> tuple[MicroBatch, ...]:
    """`config.rows` samples for each of `dp_size` ranks, packed.

    Variable lengths are lognormal, one e-fold around the median, cut at seq_len. `balanced`: tokens go through the
    experts in turn.
    """
    source = np.random.default_rng(seed)
    rows = (config.rows or 1) * dp_size
    lengths: list[int] = []
    if config.lengths == "fixed":
        lengths = [seq_len] * rows
    else:
        median = config.median_length or max(2, seq_len // 8)
        while sum(lengths) < 0.95 * rows * seq_len:
            length = int(np.clip(source.lognormal(np.log(median)), 2, seq_len))
            lengths.append(min(length, max(2, rows * seq_len - sum(lengths))))
    samples = [
        TrainSample(
            token_ids=source.integers(0, vocab_size, length).astype(np.int32),
            loss_mask=np.arange(length) > 0,
            logprobs=np.full(length, -np.log(vocab_size), dtype=np.float32),
            advantage=float(source.normal()),
            routed_experts=None if balanced is None else _in_turn(length, balanced),
        )
        for length in lengths
    ]
    return pack_samples(samples, seq_len=seq_len * config.micro_batch_size, dp_size=dp_size).micro_batches


def _in_turn(tokens: int, shape: RoutedShape) -> Routes:
    turns_TK = np.arange(tokens * shape.per_token).reshape(tokens, 1, shape.per_token) % shape.experts
    return narrowed(np.repeat(turns_TK, shape.layers, axis=1), shape.experts)
