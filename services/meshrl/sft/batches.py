"""Deals tokenized conversations into steps of packed rows; between tokenization and the learner."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshrl.algorithms.packing import Packing, TrainSample, pack_samples


@dataclass(frozen=True, kw_only=True, eq=False)
class SFTBatch:
    """One step's rows, and how often the data has been through when its last sample was taken."""

    packing: Packing
    samples: int
    tokens: int
    epoch: float


def training_batches(
    samples: Sequence[TrainSample], *, batch_tokens: int, seq_len: int, seed: int, skip: int = 0, dp_size: int = 1
) -> Iterator[SFTBatch]:
    """Endless steps; each epoch sees every sample once, in an order of its own. `skip` leaves out the first steps;
    each is divided among `dp_size` ranks.

    A step takes samples until one more would exceed `batch_tokens`, and at least one. `samples` must not be empty.
    """
    stream = _epochs(len(samples), seed)
    taken, held = 0, next(stream)
    while True:
        chosen: list[TrainSample] = []
        tokens = 0
        while not chosen or tokens + _length(samples[held], seq_len) <= batch_tokens:
            chosen.append(samples[held])
            tokens += _length(samples[held], seq_len)
            held = next(stream)
        taken += len(chosen)
        if skip:
            skip -= 1
            continue
        packing = pack_samples(chosen, seq_len=seq_len, dp_size=dp_size)
        yield SFTBatch(packing=packing, samples=len(chosen), tokens=tokens, epoch=taken / len(samples))


def _epochs(count: int, seed: int) -> Iterator[int]:
    random_source = random.Random(seed)
    while True:
        order = list(range(count))
        random_source.shuffle(order)
        yield from order


def _length(sample: TrainSample, seq_len: int) -> int:
    return min(len(sample.token_ids), seq_len)
