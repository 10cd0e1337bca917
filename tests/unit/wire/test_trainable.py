"""A rollout that is let in can be trained: what the door passes, the trainer takes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.trainer.service import check_batch
from meshrl.wire import convert
from meshrl.wire.trainable import rollout_problems
from meshrl.wire.types import Batch, Rollout, Sample, VersionSpan

VOCAB_SIZE = 8
LOGPROBS = st.sampled_from([-1.5, -0.0, 0.0005, 0.01, float("nan"), float("-inf"), float("inf")])
TEMPERATURES = st.sampled_from([1.0, 0.5, 0.0, -1.0, float("nan"), float("inf")])


@st.composite
def samples(draw) -> Sample:
    length = draw(st.integers(1, 5))
    mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    return Sample(
        token_ids=np.array(draw(st.lists(st.integers(-1, VOCAB_SIZE), min_size=length, max_size=length)), np.int32),
        loss_mask=mask,
        logprobs=np.array(draw(st.lists(LOGPROBS, min_size=length, max_size=length)), np.float32),
        version_spans=(VersionSpan(start=0, end=length, version=draw(st.integers(0, 4))),),
        temperature=draw(TEMPERATURES),
    )


def rollout(*samples: Sample) -> Rollout:
    return Rollout(rollout_id="r", group_id="g", task_key="t", environment="echo", samples=samples, reward=1.0)


@given(sample=samples())
def test_what_passes_the_door_passes_the_trainer(sample: Sample) -> None:
    if rollout_problems(rollout(sample), vocab_size=VOCAB_SIZE) or not sample.loss_mask.any():
        return
    packing = pack_samples(
        [
            TrainSample(
                token_ids=sample.token_ids,
                loss_mask=sample.loss_mask,
                logprobs=sample.logprobs,
                temperature=sample.temperature,
            )
        ],
        seq_len=16,
    )
    batch = Batch(
        run_id="main",
        step=1,
        micro_batches=packing.micro_batches,
        loss_tokens=packing.loss_tokens,
        environments=("echo",),
    )
    reader = convert.BatchReader(seq_len=16)
    for message in convert.batch_to_messages(batch):
        reader.feed(message)
    check_batch(reader.finish(), vocab_size=VOCAB_SIZE)


def good(**changes) -> Sample:
    values = {
        "token_ids": np.array([1, 2, 3], np.int32),
        "loss_mask": np.array([False, True, True]),
        "logprobs": np.array([0.0, -1.0, 0.0005], np.float32),
        "version_spans": (VersionSpan(start=1, end=3, version=4),),
    }
    return Sample(**(values | changes))


def test_a_sound_rollout_has_no_problems() -> None:
    assert rollout_problems(rollout(good()), vocab_size=4, newest_version=4) == ()


def test_what_is_not_known_is_not_checked() -> None:
    far = good(token_ids=np.array([1, 2, 10**6], np.int32))
    assert rollout_problems(rollout(far), vocab_size=None) == ()


def test_every_problem_is_named_with_its_sample() -> None:
    bad = good(token_ids=np.array([1, 2, 4], np.int32), temperature=0.0)
    found = dict(rollout_problems(rollout(good(), bad), vocab_size=4, newest_version=3))
    assert found == {
        "samples[0].version_spans": "name version 4, but the newest is 3",
        "samples[1].token_ids": "must lie in the model's vocabulary, 0 to 3; got 1 to 4",
        "samples[1].temperature": "must be above 0: a greedy sample has no distribution to correct for",
        "samples[1].version_spans": "name version 4, but the newest is 3",
    }
