"""Shared prefixes change what a row holds and nothing of what is trained: every sample can be read back from it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.algorithms.packing import Packing, TrainSample, pack_samples, shared_prefix_ratio
from meshrl.wire import convert
from meshrl.wire.types import Batch, MicroBatch

SEQ_LEN = 40


@st.composite
def sample(draw: st.DrawFn, index: int) -> TrainSample:
    """Prompts of a small alphabet, so that some are equal and some begin alike; answers in one or two turns."""
    prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
    answer = draw(st.lists(st.integers(2, 9), min_size=1, max_size=12))
    tool = draw(st.lists(st.integers(0, 1), max_size=3))
    tokens = [*prompt, *answer, *tool, *answer[:2]]
    mask = [False] * len(prompt) + [True] * len(answer) + [False] * len(tool) + [True] * len(answer[:2])
    if draw(st.booleans()):  # a later sample of the same rollout: its history is not trained again
        mask[: len(prompt) + len(answer)] = [False] * (len(prompt) + len(answer))
    length = len(tokens)
    weights = np.array(draw(st.lists(st.sampled_from([0.0, 0.5]), min_size=length, max_size=length)), np.float32)
    return TrainSample(
        token_ids=np.array(tokens, np.int32),
        loss_mask=np.array(mask),
        logprobs=-np.arange(length, dtype=np.float32) - index,
        advantage=float(index) - 3.5,
        temperature=1.0 + index,
        rollout_id=str(index),
        group=draw(st.sampled_from(["a", "b", None])),
        ce_weights=weights if draw(st.integers(0, 3)) == 0 else None,
    )


@st.composite
def batch(draw: st.DrawFn) -> list[TrainSample]:
    return [draw(sample(index)) for index in range(draw(st.integers(1, 12)))]


def whole(row: MicroBatch) -> dict[str, dict[str, list[float]]]:
    """What each sample of a row is, its prefix included, by its rollout."""
    found = {}
    for at, rollout_id in enumerate(row.rollout_ids):
        start, end = row.sample_offsets[at], row.sample_offsets[at + 1]
        prefix: list[int] = []
        if row.prefix_tokens is not None and row.prefix_samples is not None and row.prefix_tokens[at]:
            first = row.sample_offsets[row.prefix_samples[at]]
            prefix = row.token_ids[first : first + row.prefix_tokens[at]].tolist()
        zeros = [0.0] * len(prefix)
        weights = np.zeros(len(row.token_ids)) if row.ce_weights is None else row.ce_weights
        found[rollout_id] = {
            "token_ids": prefix + row.token_ids[start:end].tolist(),
            "loss_mask": zeros + row.loss_mask[start:end].astype(float).tolist(),
            "advantages": zeros + row.advantages[start:end].tolist(),
            "logprobs": zeros + row.inference_logprobs[start:end].tolist(),
            "ce_weights": zeros + weights[start:end].tolist(),
            "positions": [*range(len(prefix)), *row.position_ids[start:end].tolist()],
            "temperature": [float(row.temperatures[at])],
        }
    return found


def read_back(packing: Packing) -> dict[str, dict[str, list[float]]]:
    """The samples of all rows but those that only fill up the ranks."""
    rows = [row for row in packing.micro_batches if row.loss_mask.any() or row.ce_weights is not None]
    return {name: value for row in rows for name, value in whole(row).items()}


def pack(samples: list[TrainSample], dp_size: int, share: float | None) -> Packing | None:
    try:
        return pack_samples(samples, seq_len=SEQ_LEN, dp_size=dp_size, min_shared_prefix=share)
    except ValueError:  # nothing to train on
        return None


@settings(max_examples=60, deadline=None)
@given(batch(), st.integers(1, 3), st.sampled_from([0.0, 0.3]))
def test_every_sample_is_the_same_with_its_prefix_shared(made: list[TrainSample], dp_size: int, share: float) -> None:
    shared, repeated = pack(made, dp_size, share), pack(made, dp_size, None)
    assert (shared is None) == (repeated is None)
    if shared is None or repeated is None:
        return
    assert read_back(shared) == read_back(repeated)
    assert shared.loss_tokens == repeated.loss_tokens == sum(int(row.loss_mask.sum()) for row in shared.micro_batches)
    assert (shared.truncated_samples, shared.dropped_samples) == (repeated.truncated_samples, repeated.dropped_samples)
    assert shared_prefix_ratio(repeated.micro_batches) == 0.0
    assert len(shared.micro_batches) % dp_size == 0
    assert all(len(row.token_ids) <= SEQ_LEN for row in shared.micro_batches)


@settings(max_examples=40, deadline=None)
@given(batch(), st.integers(1, 3))
def test_shared_rows_cross_the_wire_and_are_what_the_trainer_accepts(made: list[TrainSample], dp_size: int) -> None:
    packing = pack(made, dp_size, 0.0)
    if packing is None:
        return
    sent = Batch(
        run_id="r",
        step=1,
        micro_batches=packing.micro_batches,
        loss_tokens=packing.loss_tokens,
        environments=("e",),
    )
    reader = convert.BatchReader(seq_len=SEQ_LEN, dp_size=dp_size)
    for message in convert.batch_to_messages(sent):
        reader.feed(message)
    for came, row in zip(reader.finish().micro_batches, packing.micro_batches, strict=True):
        assert whole(came) == whole(row)
        groups = {one.rollout_id: one.group for one in made}
        if came.prefix_tokens is not None and came.prefix_samples is not None:
            for at in np.flatnonzero(came.prefix_tokens):
                root = came.rollout_ids[came.prefix_samples[at]]
                assert groups[came.rollout_ids[at]] == groups[root] is not None
